"""A rejected answer: its job goes on to the next model's queue, once."""

import logging

import pytest
from redis.exceptions import ConnectionError as Lost
from rq.job import Job
from rq.serializers import JSONSerializer
from tests.worker.queue.ends import fail, finish
from tests.worker.queue.looking import taken_over
from tests.worker.queue.members import claim, claim_within, ids

from stoker_shared.errors import ContextLimitExceeded, EngineFailed, OwnershipLost, RedisUnavailable
from stoker_shared.result import Attempt
from stoker_shared.trust import Counts
from stoker_shared.wire import FIELD_TRIED, TASK_PATH, TRUST_KEY
from stoker_worker.queue.end import RqClaimedJob

pytestmark = pytest.mark.server

ROUTE = ({"model": "small", "queue": "generate"}, {"model": "large", "queue": "large"})
BOTH = {"t small": "0.0000 1.0000", "t large": "1.0000 0.0000"}


def enqueue(plain, job_id="job", **fields):
    request = {"v": 5, "prompt": "p", "check": {"contains": ["x"]}, "route": ROUTE, "task": "t", **fields}
    plain.enqueue(TASK_PATH, kwargs={"request": request}, job_id=job_id)


def answer(text, model="small"):
    usage, timing = {"prompt_tokens": 2, "completion_tokens": 3}, {"prefill_s": 0.25, "decode_s": 0.5}
    return {"text": text, "finish_reason": "stop", "model": model, "usage": usage, "timing": timing}


REJECTED, ACCEPTED = answer("secret"), answer("x", "large")


def go_on(queue):
    [job] = claim(queue)
    assert not job.finish(REJECTED)
    job.release()


def verdicts(connection):
    return {field.decode(): value.decode() for field, value in connection.hgetall(TRUST_KEY).items()}


def waiting(connection, queue="large"):
    return [job_id.decode() for job_id in connection.lrange(f"rq:queue:{queue}", 0, -1)]


def assert_moved_once(connection):
    assert waiting(connection) == ["job"]
    assert waiting(connection, "generate") == []
    assert connection.hmget("rq:job:job", "status", "origin") == [b"queued", b"large"]
    assert verdicts(connection) == {"t small": "0.0000 1.0000"}
    assert not connection.exists("rq:wip:generate", "rq:executions:job")
    assert not connection.keys("rq:execution:*")


def attempts_of(connection, job_id="job"):
    result = Job.fetch(job_id, connection, JSONSerializer).return_value()
    return [Attempt.model_validate(attempt) for attempt in result["attempts"]]


def test_the_job_goes_on_under_its_id_and_ends_with_all_attempts_known(connection, queue, plain, join, caplog):
    caplog.set_level(logging.INFO)
    enqueue(plain)
    [job] = claim(queue)
    assert job.model == "small"
    assert not job.finish(REJECTED)
    job.release()
    assert_moved_once(connection)
    assert "escalated job=job reason=contains to=large" in caplog.messages
    assert "secret" not in caplog.text
    assert claim(queue) == []
    [job] = claim(join("large", queues="large"))
    assert (job.model, job.attempt, job.job_id) == ("large", 1, "job")
    assert job.finish(ACCEPTED)
    job.release()
    assert verdicts(connection) == BOTH
    assert Job.fetch("job", connection, JSONSerializer).get_status() == "finished"
    figures = {"prompt_tokens": 2, "completion_tokens": 3, "seconds": 0.75}
    assert attempts_of(connection) == [
        Attempt(model="small", accepted=False, reason="contains: 'x' is missing", **figures),
        Attempt(model="large", accepted=True, **figures),
    ]
    assert connection.xlen("rq:results:job") == 1


def test_the_last_model_s_answer_is_the_result(connection, queue, plain, join):
    enqueue(plain)
    go_on(queue)
    [job] = claim(join("large", queues="large"))
    finish(job, answer("no", "large"))
    assert [attempt.accepted for attempt in attempts_of(connection)] == [False, False]
    assert Job.fetch("job", connection, JSONSerializer).return_value()["text"] == "no"
    enqueue(plain, "dear", max_cost_s=1e-9)
    [dear] = claim(queue)
    finish(dear, REJECTED)
    assert [attempt.accepted for attempt in attempts_of(connection, "dear")] == [False]  # the next one costs too much


def test_a_job_that_is_too_long_for_one_model_goes_on_and_other_errors_fail_it(connection, queue, plain, join):
    enqueue(plain)
    enqueue(plain, "other")
    [job, other] = claim(queue, 2)
    fail(job, ContextLimitExceeded("too long"))
    fail(other, EngineFailed("broken"))
    assert_moved_once(connection)
    [job] = claim(join("large", queues="large"))
    fail(job, ContextLimitExceeded("too long"))
    assert [Job.fetch(job_id, connection).get_status() for job_id in ("job", "other")] == ["failed"] * 2


@pytest.mark.parametrize("task", [None, "t"])
def test_a_result_without_a_check_has_no_attempts(connection, queue, plain, task):
    enqueue(plain, check=None, route=[], task=task)
    [job] = claim(queue)
    finish(job, REJECTED)
    result = Job.fetch("job", connection, JSONSerializer).return_value()
    assert (result.get("attempts"), result.get("task")) == (None, task)
    assert verdicts(connection) == {}


def test_a_schema_that_cannot_be_read_rejects_the_answer_and_does_not_fail_a_job_whose_turn_is_saved(
    connection, queue, plain
):
    enqueue(plain, check={"json_schema": {"type": "objekt"}}, route=[])
    [job] = claim(queue)
    finish(job, ACCEPTED)
    assert Job.fetch("job", connection, JSONSerializer).get_status() == "finished"
    [attempt] = attempts_of(connection)
    assert not attempt.accepted
    assert attempt.reason.startswith("json_schema: the schema cannot be applied (")


def losing(job, monkeypatch, what):
    """Once, the connection is lost before the script, or before its reply."""
    ownership, losses = job.ends.ownership, [what]
    script = ownership._end

    def flaky(**arguments):
        lost = losses.pop() if losses else None
        if lost == "request":
            raise Lost
        reply = script(**arguments)
        if lost == "reply":
            raise Lost
        return reply

    monkeypatch.setattr(ownership, "_end", flaky)


@pytest.mark.parametrize("lost", ["request", "reply"])
def test_a_lost_connection_moves_the_job_once(connection, queue, plain, monkeypatch, lost):
    enqueue(plain)
    [job] = claim(queue)
    losing(job, monkeypatch, lost)
    with pytest.raises(RedisUnavailable):
        job.finish(REJECTED)
    assert not job.finish(REJECTED)
    job.release()
    assert_moved_once(connection)


@pytest.mark.parametrize("answered", [REJECTED, ACCEPTED])
def test_a_reply_is_lost_and_other_models_have_answered_meanwhile(
    connection, queue, plain, join, monkeypatch, answered
):
    enqueue(plain, route=[*ROUTE, {"model": "huge", "queue": "huge"}])
    [job] = claim(queue)
    losing(job, monkeypatch, "reply")
    with pytest.raises(RedisUnavailable):
        job.finish(REJECTED)
    [later] = claim(join("large", queues="large"))
    finish(later, {**answered, "model": "large"})
    with pytest.raises(OwnershipLost):
        job.finish(REJECTED)
    assert waiting(connection) == []
    assert waiting(connection, "huge") == (["job"] if answered is REJECTED else [])
    accepted = answered is ACCEPTED
    assert verdicts(connection) == BOTH | {"t large": f"{accepted:.4f} {not accepted:.4f}"}


@pytest.mark.parametrize("how", ["canceled", "taken over"])
def test_a_job_that_is_not_ours_any_more_is_left_alone(connection, queue, plain, how):
    enqueue(plain)
    [job] = claim(queue)
    if how == "canceled":
        Job.fetch("job", connection, JSONSerializer).cancel()
    else:
        taken_over(connection)
    with pytest.raises(OwnershipLost):
        job.finish(REJECTED)
    assert waiting(connection) == []
    assert verdicts(connection) == {}
    assert connection.hget("rq:job:job", FIELD_TRIED) is None


def test_verdicts_decay_as_the_pure_counts_do(connection, queue, plain):
    counts = Counts()
    for n in range(12):
        accepted = n % 3 > 0
        enqueue(plain, f"job-{n}", route=[])
        [job] = claim(queue)
        finish(job, answer("x" if accepted else "no", "a model"))
        counts = counts.after(accepted=accepted)
    found = Counts.parsed(connection.hget(TRUST_KEY, "t a model"))
    assert found.accepted == pytest.approx(counts.accepted, abs=0.01)
    assert found.rejected == pytest.approx(counts.rejected, abs=0.01)


@pytest.mark.parametrize("found", ["nan nan", "inf 0", "-5 3", "1e308 1e308", "5000 0", "rubbish", "1 2 3"])
def test_whatever_is_in_the_counts_verdicts_count_from_there(connection, queue, plain, found):
    connection.hset(TRUST_KEY, "t small", found)
    enqueue(plain)
    go_on(queue)
    counts, expected = Counts.parsed(connection.hget(TRUST_KEY, "t small")), Counts.parsed(found.encode())
    expected = expected.after(accepted=False)
    assert (counts.accepted, counts.rejected) == pytest.approx((expected.accepted, expected.rejected), abs=0.01)


def test_classes_beyond_the_most_are_not_counted(connection, queue, plain, monkeypatch):
    monkeypatch.setattr("stoker_worker.queue.cascade.MOST_PAIRS", 1)
    for n, task in enumerate(["t", "u", "t"]):
        enqueue(plain, f"job-{n}", route=[], task=task)
        [job] = claim(queue)
        finish(job, answer("x"))
    assert set(verdicts(connection)) == {"t small"}
    assert Counts.parsed(connection.hget(TRUST_KEY, "t small")).accepted > 1


def test_a_job_whose_stop_was_asked_for_does_not_go_on(connection, queue, plain):
    enqueue(plain)
    [job] = claim(queue)
    assert isinstance(job, RqClaimedJob)
    job.in_flight.ask_to_stop("job")
    assert job.finish(REJECTED)
    job.release()
    assert connection.hget("rq:job:job", "status") == b"finished"
    assert waiting(connection) == []


@pytest.mark.parametrize(("ttl", "left_s"), [(1000, range(900, 1001)), (-1, [-1])])
def test_a_job_may_wait_as_long_in_the_next_queue(connection, queue, plain, join, ttl, left_s):
    """For ever, if the number is negative, as RQ's `Job.create` allows."""
    enqueue(plain)
    connection.hset("rq:job:job", "ttl", ttl)
    go_on(queue)
    assert_moved_once(connection)
    assert connection.ttl("rq:job:job") in left_s
    assert ids(claim(join("large", queues="large"))) == ["job"]
    assert connection.ttl("rq:job:job") == -1


@pytest.mark.parametrize("created_at", ["as RQ writes it", "2026-11-23T14:00:00Z", None])
def test_a_job_that_failed_at_the_next_model_is_requeued_there(connection, queue, plain, join, created_at):
    enqueue(plain)
    if created_at is None:
        connection.hdel("rq:job:job", "created_at")
    elif created_at != "as RQ writes it":
        connection.hset("rq:job:job", "created_at", created_at)
    go_on(queue)
    large = join("large", queues="large")
    [job] = claim(large)
    fail(job, EngineFailed("broken"))
    Job.fetch("job", connection, JSONSerializer).requeue()
    [job] = claim_within(large)
    assert job.model == "large"
    finish(job, ACCEPTED)
    assert [attempt.model for attempt in attempts_of(connection)] == ["small", "large"]
    assert verdicts(connection) == BOTH


def test_a_reader_holds_nobody_back(queue, plain):
    enqueue(plain, "first", agent_id="a", cache="read")
    enqueue(plain, "second", agent_id="a", cache="read")
    [first, second] = claim(queue)
    finish(first, REJECTED)
    finish(second, answer("x"))
    plain.enqueue(TASK_PATH, request={"prompt": "p", "agent_id": "a"}, job_id="third")
    assert ids(claim(queue)) == ["third"]


@pytest.mark.parametrize("noted", ["2020-01-01T00:00:00Z {}", "{} [1]", "{} {{", "{}"])
def test_attempts_that_are_not_this_job_s_do_not_count(connection, queue, plain, noted):
    enqueue(plain)
    created_at = connection.hget("rq:job:job", "created_at").decode()
    attempts = f"[{Attempt(model='small', accepted=False).model_dump_json()}]"
    connection.hset("rq:job:job", FIELD_TRIED, noted.replace("{}", attempts if noted.startswith("2") else created_at))
    [job] = claim(queue)
    assert job.model == "small"


def test_a_job_with_a_route_that_would_write_an_agents_memory_is_refused(connection, queue, plain):
    enqueue(plain, agent_id="a")
    assert claim(queue) == []
    result = Job.fetch("job", connection, JSONSerializer).latest_result()
    assert result is not None
    assert "only for jobs that write no agent's memory" in (result.exc_string or "")
