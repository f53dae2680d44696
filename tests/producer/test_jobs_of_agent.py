"""The jobs of an agent that are in Redis: found wherever they are, and removed with all their texts."""

import pytest
from rq import Queue
from rq.serializers import JSONSerializer

from stoker import ResultTimeout, agents
from stoker.agents import JobsOfAgent
from stoker_shared.wire import AGENT_TASK_PATH, TASK_PATH

pytestmark = pytest.mark.server

LONG = "an agent with a long id, of which a description has only the beginning: " + "\u00e9" * 100


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(agents, "_PAGE", 2)


@pytest.fixture(params=["a", LONG], ids=["short", "long"])
def agent_id(request):
    return request.param


@pytest.fixture
def state_of(producer, worker, connection, agent_id):
    """A job of the agent in each state, each between jobs of others that must stay, by state."""
    foreign = Queue("other", connection=connection, serializer=JSONSerializer)
    others = [{"agent_id": name, "prompt": "x"} for name in (agent_id + "b", agent_id[:-1] or "b")]
    others += [{"agent_id": "x", "prompt": f"for agent {agent_id[:60]!r}"}, {"prompt": "x"}]
    by_state = {}

    def submit(state, end=None, **options):
        for request in others:
            job_id = producer.submit(**request, **{name: options[name] for name in options.keys() & {"cache"}}).job_id
            if end:
                end(job_id)
        by_state[state] = producer.submit(agent_id=agent_id, prompt="secret", **options).job_id
        if end:
            end(by_state[state])

    def start(job_id):
        worker.start(job_id)
        connection.zadd("rq:wip:generate", {f"{job_id}:run": 1})

    def failed(job_id):
        worker.fail(job_id, "E: secret", "secret")
        connection.zadd("rq:failed:generate", {job_id: 1})

    submit("queued")
    submit("deferred", depends_on=by_state["queued"])
    submit("started", start)
    submit("finished", lambda job_id: worker.finish(job_id, text="secret"))
    connection.xadd(f"stoker:stream:{by_state['finished']}", {"text": "secret"})
    submit("failed", failed)
    submit("canceled", lambda job_id: producer.ticket(job_id).cancel())
    submit("without memory", cache="off", context="full")
    for name in ("x", agent_id):
        job = foreign.enqueue(TASK_PATH, request={"agent_id": name, "prompt": "secret"}, description="")
        by_state["of RQ's client"] = job.id
        about = {"agent_id": name, "action": "info"}
        foreign.enqueue(AGENT_TASK_PATH, request=about, description="")
        with pytest.raises(ResultTimeout):
            producer.agents.forget(name, timeout_s=0)
    return by_state


def contents(connection):
    readers = {b"hash": connection.hgetall, b"set": connection.smembers, b"stream": connection.xrange}
    readers |= {b"list": lambda key: connection.lrange(key, 0, -1), b"zset": lambda key: connection.zrange(key, 0, -1)}
    found = {key.decode(): readers.get(connection.type(key), connection.get)(key) for key in connection.scan_iter()}
    return {key: held for key, held in found.items() if held is not None}


def test_all_jobs_of_an_agent_are_counted_and_nothing_is_changed(producer, connection, state_of, agent_id):
    before = contents(connection)
    assert producer.agents.jobs(agent_id) == JobsOfAgent(waiting=4, running=1, ended=3)
    assert contents(connection) == before
    assert producer.agents.jobs("nobody") == JobsOfAgent()


def test_they_are_removed_with_their_texts_and_those_of_others_stay(producer, connection, state_of, agent_id):
    n_jobs = len([key for key, held in contents(connection).items() if key.startswith("rq:job:") and b"status" in held])
    assert producer.agents.jobs(agent_id, remove=True) == JobsOfAgent(removed=8)
    assert producer.agents.jobs(agent_id) == JobsOfAgent()
    left = contents(connection)
    del left["rq:wip:generate"]  # the worker removes its entry
    assert len([key for key in left if key.startswith("rq:job:") and b"status" in left[key]]) == n_jobs - 8
    assert not [key for key in left for job_id in state_of.values() if job_id in key or job_id in str(left[key])]


def test_a_job_whose_turn_is_being_saved_and_one_of_a_forbidden_id_stay(producer, connection, worker):
    saved = producer.submit(agent_id="a", prompt="x").job_id
    worker.start(saved)
    connection.zadd("rq:wip:generate", {f"{saved}:run": 1})
    connection.hset(f"rq:job:{saved}", "stoker_saving", connection.hget(f"rq:job:{saved}", "created_at"))
    hash_of_other = connection.hgetall(f"rq:job:{producer.submit(agent_id='a', prompt='x').job_id}")
    connection.hset("rq:job:an id!", mapping=hash_of_other)
    connection.rpush("rq:queue:generate", "an id!", "gone", b"\xff", saved)
    left = producer.agents.jobs("a", remove=True)
    assert (left.removed, left.running, left.waiting) == (1, 1, 1)
