"""The only places of prompts and answers: a job's payload and its result."""

import subprocess
import sys
import zlib
from contextlib import suppress

import pytest
from rq import Queue
from rq.serializers import JSONSerializer
from tests.support.worker_process import burst, running_worker

from stoker import JobFailed
from stoker_shared.wire import TASK_PATH

pytestmark = pytest.mark.server

SECRET = "PatientZero"
SAY_IT = f"say {SECRET}"


def fields(connection, key):
    """The fields of a key, as (field, text), unpacked where RQ packs them."""
    kind = connection.type(key)
    if kind == b"hash":
        pairs = list(connection.hgetall(key).items())
    elif kind == b"stream":
        pairs = [pair for _, entry in connection.xrange(key) for pair in entry.items()]
    else:
        pairs = [(b"", connection.dump(key))]
    for name, value in pairs:
        with suppress(zlib.error):
            value = zlib.decompress(value)  # noqa: PLW2901
        yield name.decode(), value


def test_neither_prompts_nor_answers_are_in_logs_descriptions_or_any_other_place(
    producer, redis_url, connection, store
):
    command = [sys.executable, "-c", "from stoker.cli import main; main()", "--redis", redis_url]
    with running_worker(redis_url, store, "-v", "--scripted-steps-per-s", "100") as worker:
        first = producer.submit(agent_id="a", prompt=SAY_IT, context="append", max_tokens=40)
        assert SECRET in first.result(timeout_s=30).text
        chat = [{"role": "user", "content": SAY_IT}]
        assert SECRET in producer.submit(agent_id="b", messages=chat, max_tokens=40).result(timeout_s=30).text
        late = producer.submit(agent_id="c", prompt=SAY_IT * 2000, max_tokens=100_000, job_timeout_s=1)
        stopped = producer.submit(agent_id="d", prompt=SECRET, max_tokens=100_000)
        worker.wait_for(lambda: stopped.status().state == "started")
        stopped.cancel()
        with pytest.raises(JobFailed, match="GenerationTimedOut"):
            late.result(timeout_s=30)
        shell = subprocess.run(
            [*command, "submit", "--agent", "e", "--prompt", SAY_IT], capture_output=True, check=True
        )
        mistyped = subprocess.run(
            [*command, "submit", "--agent", "", "--prompt", SECRET], capture_output=True, check=False
        )
        producer.ticket(shell.stdout.decode().strip()).result(timeout_s=30)
    assert SECRET not in worker.log
    assert SECRET.encode() not in shell.stdout + shell.stderr + mistyped.stdout + mistyped.stderr
    allowed = {("rq:job:", "data"), ("rq:results:", "return_value")}
    allowed |= {("rq:job:", "meta")}  # the partial text of a timed-out job
    for key in connection.scan_iter("*"):
        for name, value in fields(connection, key):
            if (key.decode().rpartition(":")[0] + ":", name) not in allowed:
                assert SECRET.encode() not in value, (key, name)


def test_a_refused_job_of_a_plain_rq_client_is_refused_without_quoting_it(producer, redis_url, connection, store):
    """RQ's own description of such a job contains its prompt; the worker copies it nowhere."""
    queue = Queue("generate", connection=connection, serializer=JSONSerializer)
    bad = [
        {"agent_id": "a", "prompt": SECRET, "bogus": SECRET},
        {"agent_id": "a", "prompt": {"text": SECRET}},
        {"agent_id": "a", "messages": [SECRET]},
        {"agent_id": "a", "prompt": "x", "max_tokens": SECRET},
    ]
    jobs = [queue.enqueue(TASK_PATH, request=request) for request in bad]
    jobs.append(queue.enqueue(TASK_PATH, SECRET))
    fine = queue.enqueue(TASK_PATH, request={"agent_id": "a", "prompt": SAY_IT, "max_tokens": 4})
    log = burst(redis_url, store, "-v")
    reasons = []
    for job in jobs:
        with pytest.raises(JobFailed) as caught:
            producer.ticket(job.id).result(timeout_s=1)
        reasons.append(caught.value.reason)
    assert SECRET not in " ".join(reasons)
    assert producer.ticket(fine.id).result(timeout_s=1).text
    assert SECRET not in log
