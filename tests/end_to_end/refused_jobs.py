"""Jobs that a worker fails, and the reasons, for the messages of docs/troubleshooting.md."""

import sqlite3
from contextlib import closing
from dataclasses import replace

from rq import Queue
from rq.serializers import JSONSerializer
from tests.support.worker_process import running_worker
from tests.worker.memory.agents import ids
from tests.worker.memory.replica.sharing import Machine, SharedFolder

from stoker import Producer
from stoker_shared.agents import build_agent_request
from stoker_shared.errors import StokerError
from stoker_shared.request import GenerationRequest, build_request
from stoker_shared.wire import TASK_PATH
from stoker_worker.ports import Delivery, GenerationWork
from stoker_worker.ports.model import Batching, ServingMode


def raised(call, *arguments, **fields):
    try:
        call(*arguments, **fields)
    except StokerError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def plain_job(connection, function=TASK_PATH, serializer=JSONSerializer, **options):
    """The reason for which the worker fails a job that RQ enqueued."""
    queue = Queue("generate", connection=connection, serializer=serializer)
    options = {"kwargs": {"request": {"prompt": "x", "max_tokens": 1}}, **options}
    job = queue.enqueue(function, job_timeout=60, result_ttl=60, failure_ttl=60, **options)
    while (entry := job.latest_result(timeout=4)) is None:
        pass
    return entry.exc_string


def refused_guide():
    from stoker_worker.models.guides import grammar_text

    asked = build_request(
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f"}], "tool_choice": "required"}
    )
    return raised(grammar_text, asked, None)


def refused_length():
    """The reason of an engine with two blocks of KV memory, in a process where MLX is."""
    from stoker_worker.engine.batch_engine import assemble
    from stoker_worker.engine.scripted import ScriptedProvider

    _, loaded = ScriptedProvider(max_batch=1, steps_per_s=1000).load()
    loaded = replace(loaded, mode=ServingMode(Batching.ONE_AT_A_TIME))
    engine = assemble(None, loaded, max_bytes=5000, max_batch=1, prefill_tokens=16, max_step_s=1)
    request = GenerationRequest(prompt="x", max_tokens=2000)
    return raised(engine.submit, GenerationWork(request, (120,)))


def damaged_agent(store, ask):
    ask(agent_id="damaged", prompt="x")
    with closing(sqlite3.connect(store / "agents.db", timeout=20)) as database, database:
        database.execute("UPDATE turns SET new_tokens = x'00' WHERE agent = (SELECT max(agent) FROM turns)")
    return raised(ask, agent_id="damaged", prompt="x", context="append")


def answer_not_kept(folder):
    """With a shared store, a delivery comes again after its agent was forgotten."""
    folder.mkdir()
    machine = Machine(folder / "store", SharedFolder(folder))
    with closing(machine.store) as store:
        turn = machine.agent().turn(ids(10))
        store.save(turn)
        store.agent_jobs.run(build_agent_request({"action": "forget", "agent_id": "agent"}), Delivery("forget", "now"))
        return raised(store.answer, "agent", turn.delivery)


def lost_job(redis_url, folder):
    with Producer(redis_url, queue="lost") as producer:
        ticket = producer.submit(prompt="crash")
        for _ in range(3):
            with running_worker(redis_url, folder / "lost", "--queues", "lost") as worker:
                worker.wait()
        with running_worker(redis_url, folder / "lost", "--queues", "lost", "--burst") as worker:
            worker.wait()
        return raised(ticket.result)
