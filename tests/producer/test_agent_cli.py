"""`stoker agent`: its requests, its output and its failures."""

import json

import pytest
from tests.producer.played_worker import PlayedWorker, playing

from stoker.agent_cli import agent
from stoker_shared.wire import AGENT_TASK_PATH, REQUEST_KWARG, TASK_PATH

pytestmark = pytest.mark.server

BASE = {"job_id": "j", "agent_id": "a"}
INFO = {
    **BASE, "action": "info", "exists": True, "version": 3, "tokens": 40, "messages": 2, "cached_tokens": 40,
    "own_bytes": 500, "last_used": "\x1b[2J\nstate  fine",
    "versions": [{"version": 1, "tokens": 10}, {"version": 2, "tokens": 20, "job_id": "x"}],
}  # fmt: skip
ANSWERS = {
    ("info", "a"): (INFO, r"last used \x1b[2J\nstate  fine"),
    ("forget", "nobody", "--yes"): (
        {**BASE, "agent_id": "nobody", "action": "forget", "existed": False, "version": 0},
        "there is no agent 'nobody'",
    ),
    ("fork", "a", "b"): (
        {**BASE, "action": "fork", "target": "b", "version": 1, "from_version": 3, "tokens": 40},
        "'b' continues from 'a' at version 3: 40 tokens",
    ),
    ("rollback", "a", "--to", "2", "--expect-version", "3"): (
        {**BASE, "action": "rollback", "version": 4, "to_version": 2, "from_version": 3, "tokens": 20},
        "'a' is at version 4, as it was at version 2: 20 tokens",
    ),
    ("forget", "a", "--yes"): (
        {**BASE, "action": "forget", "existed": True, "version": 3, "blocks": 2, "block_bytes": 9, "shared_blocks": 1},
        "forgot 'a' and 2 blocks (9 bytes); 1 more are in use by other agents",
    ),
}


@pytest.fixture
def requests(connection):
    """The job's request; the job is answered as soon as it is in the queue."""
    asked, answers, worker = [], [], PlayedWorker(connection)

    def play(job_id):
        job = worker.job(job_id)
        assert job.func_name == AGENT_TASK_PATH
        asked.append(job.kwargs[REQUEST_KWARG])
        answer = answers.pop(0)
        if isinstance(answer, str):
            worker.fail(job.id, answer)
        else:
            worker.finish(job.id, answer)

    with playing(connection, play):
        yield asked, answers


@pytest.mark.parametrize("arguments", ANSWERS)
def test_each_command_submits_one_job_and_prints_its_result(stoker, requests, arguments):
    asked, answers = requests
    result, words = ANSWERS[arguments]
    answers += [result, result]
    code, text, err = stoker("agent", *arguments)
    assert (code, err) == (0, "")
    assert words in text
    code, out, err = stoker("agent", *arguments, "--json")
    assert code == 0
    shown = json.loads(out)
    assert {name: shown[name] for name in result if name != "versions"}.items() <= result.items()
    assert asked[0] == asked[1]
    assert (asked[0]["v"], asked[0]["action"], asked[0]["agent_id"]) == (1, arguments[0], arguments[1])
    if arguments[0] == "info":
        assert "rollback  to 1, 2" in text
    if arguments[0] == "rollback":
        assert (asked[0]["version"], asked[0]["expect_version"]) == (2, 3)


def test_forget_tells_what_redis_still_has_of_the_agent_and_removes_it(connection, stoker, producer, requests):
    _, answers = requests
    answers += [ANSWERS["forget", "a", "--yes"][0]] * 4
    assert "Redis has no job of it" in stoker("agent", "forget", "a", "--yes")[1]
    played, ticket = PlayedWorker(connection), producer.submit(agent_id="a", prompt="x", queue="other")
    played.finish(ticket.job_id)
    code, out, _ = stoker("agent", "forget", "a", "--yes")
    assert code == 0
    assert "Redis still has jobs of it: 1 ended; --jobs removes them" in out
    waiting = producer.submit(agent_id="a", prompt="x", queue="other")
    code, out, _ = stoker("agent", "forget", "a", "--yes", "--jobs")
    assert code == 0
    assert "removed 2 of its jobs from Redis; Redis has no job of it any more" in out
    assert not connection.exists(f"rq:job:{ticket.job_id}", f"rq:job:{waiting.job_id}", f"rq:results:{ticket.job_id}")
    shown = json.loads(stoker("agent", "forget", "a", "--yes", "--jobs", "--json")[1])
    assert shown["in_redis"] == {"waiting": 0, "running": 0, "ended": 0, "removed": 0}


def test_forget_does_not_wait_for_the_jobs_that_it_removes(connection, stoker, producer):
    waiting = producer.submit(agent_id="a", prompt="x")
    code, _, err = stoker("agent", "forget", "a", "--yes", "--jobs", "--timeout-s", "1")
    assert code == 1
    assert "ResultTimeout" in err
    assert not connection.exists(f"rq:job:{waiting.job_id}")


def test_an_unknown_agent_is_exit_code_1_with_the_reason(stoker, requests):
    _, answers = requests
    reason = "there is no agent 'nobody'"
    answers += [{**BASE, "agent_id": "nobody", "action": "info", "exists": False}] * 2 + [f"AgentNotFound: {reason}"]
    assert stoker("agent", "info", "nobody") == (1, "", f"AgentNotFound: {reason}\n")
    code, out, err = stoker("agent", "info", "nobody", "--json")
    assert (code, err) == (1, "")
    assert json.loads(out) == {"error": {"type": "AgentNotFound", "message": reason}}
    code, out, err = stoker("agent", "rollback", "nobody")
    assert (code, out, f"AgentNotFound: {reason}" in err) == (1, "", True)


def test_forget_asks_first(stoker):
    for answer in (b"n\n", b""):
        code, out, err = stoker("agent", "forget", "a", stdin=answer)
        assert (code, out) == (1, "")
        assert "Remove agent 'a'" in err
        assert err.endswith("nothing was removed\n")
    code, out, err = stoker("agent", "forget", "a", "--json")
    assert code == 2
    assert "--yes" in json.loads(out)["error"]["message"]


def test_an_invalid_command_is_exit_code_2_and_enqueues_nothing(stoker, connection):
    for arguments in (("fork", "a", ""), ("info", "a\nb"), ("rollback", "a", "--expect-version", "0")):
        assert stoker("agent", *arguments)[0] == 2, arguments
    assert connection.keys("rq:*") == []


def test_a_job_of_ones_own_id_is_made_once(stoker, requests):
    asked, answers = requests
    answers.append(ANSWERS["fork", "a", "b"][0])
    for _ in range(2):
        assert stoker("agent", "fork", "a", "b", "--job-id", "once")[0] == 0
    assert len(asked) == 1
    code, _, err = stoker("agent", "fork", "a", "c", "--job-id", "once")
    assert (code, "DuplicateJob" in err) == (2, True)


def test_without_a_worker_a_command_ends_by_itself_and_tells_why(connection, stoker):
    assert {parameter.name: parameter.default for parameter in agent.commands["info"].params}["timeout_s"] == 30
    for command in (["info", "a"], ["forget", "a", "--yes"], ["fork", "a", "b"], ["rollback", "a"]):
        code, out, err = stoker("agent", *command, "--timeout", "0.01")
        assert (code, out) == (1, "")
        assert "ResultTimeout" in err
        assert "no worker listens to 'generate'" in err
    assert connection.llen("rq:queue:generate") == 4


def test_a_job_of_millions_of_values_is_no_job_of_the_agent(connection, stoker, producer, requests):
    _, answers = requests
    answers += [ANSWERS["forget", "a", "--yes"][0]]
    ticket = producer.submit(agent_id="a", prompt="x", queue="other")
    data = b'["%s",null,[],{"request":{"agent_id":"a","tools":[%b0]}}]' % (TASK_PATH.encode(), b"0," * 300_000)
    connection.hset(f"rq:job:{ticket.job_id}", mapping={"data": data, "stoker_agent": ""})
    assert "Redis has no job of it" in stoker("agent", "forget", "a", "--yes")[1]
