"""A rejected answer: its job goes on to the next model's queue, once."""

import pytest
from redis.exceptions import ConnectionError as Lost
from rq import Repeat
from rq.job import Job
from rq.serializers import JSONSerializer
from tests.worker.queue.ends import fail, finish, stop
from tests.worker.queue.looking import taken_over
from tests.worker.queue.members import claim, claim_within, ids

from stoker_shared.errors import EngineFailed, OwnershipLost, RedisUnavailable
from stoker_shared.result import Attempt
from stoker_shared.route import Step
from stoker_shared.trust import Counts
from stoker_shared.wire import ENDED_KEY, FIELD_TRIED, TASK_PATH, TRUST_KEY
from stoker_worker.queue.claimed_job import RqClaimedJob
from stoker_worker.queue.escalation import Escalation

pytestmark = pytest.mark.server

ROUTE = ({"model": "small", "queue": "generate"}, {"model": "large", "queue": "large"})
LARGE = Step.model_validate(ROUTE[1])
REJECTED = Attempt(model="small", accepted=False, reason="regex: not found", completion_tokens=3, seconds=0.5)
ACCEPTED = Attempt(model="large", accepted=True)


def enqueue(plain, job_id="job", **fields):
    request = {"v": 4, "prompt": "p", "check": {"contains": ["x"]}, "route": ROUTE, "task": "t", **fields}
    plain.enqueue(TASK_PATH, request=request, job_id=job_id)


def escalated(queue):
    [job] = claim(queue)
    job.escalate(REJECTED, LARGE)
    job.release()
    return job


def result_of(*attempts, task="t"):
    return {"text": "done", "task": task, "attempts": [attempt.model_dump() for attempt in attempts]}


def verdicts(connection):
    return {field.decode(): value.decode() for field, value in connection.hgetall(TRUST_KEY).items()}


def waiting(connection, queue="large"):
    return [job_id.decode() for job_id in connection.lrange(f"rq:queue:{queue}", 0, -1)]


def assert_moved_once(connection):
    assert waiting(connection) == ["job"]
    assert waiting(connection, "generate") == []
    assert connection.hmget("rq:job:job", "status", "origin") == [b"queued", b"large"]
    assert verdicts(connection) == {"t small": "0.0000 1.0000"}
    assert not connection.exists("rq:wip:generate", ENDED_KEY.format(queue="generate"), "rq:executions:job")
    assert not connection.keys("rq:execution:*")


def test_the_job_goes_on_under_its_id_and_ends_with_all_attempts_known(connection, queue, plain, join):
    enqueue(plain)
    [job] = claim(queue)
    assert (job.model, job.tried) == ("small", ())
    job.escalate(REJECTED, LARGE)
    job.release()
    assert_moved_once(connection)
    assert claim(queue) == []
    [job] = claim(join("large", queues="large"))
    assert (job.model, job.tried, job.attempt, job.job_id) == ("large", (REJECTED,), 1, "job")
    finish(job, result_of(REJECTED, ACCEPTED))
    assert verdicts(connection) == {"t small": "0.0000 1.0000", "t large": "1.0000 0.0000"}
    ended = Job.fetch("job", connection, JSONSerializer)
    assert ended.get_status() == "finished"
    assert [attempt["model"] for attempt in ended.return_value()["attempts"]] == ["small", "large"]
    assert connection.xlen("rq:results:job") == 1


@pytest.mark.parametrize("lost", ["request", "reply"])
def test_a_lost_connection_moves_the_job_once(connection, queue, plain, monkeypatch, lost):
    enqueue(plain)
    [job] = claim(queue)
    write, losses = Escalation._write, [lost]

    def flaky(*args, **kwargs):
        what = losses.pop() if losses else None
        if what == "request":
            raise Lost
        write(*args, **kwargs)
        if what == "reply":
            raise Lost

    monkeypatch.setattr(Escalation, "_write", flaky)
    with pytest.raises(RedisUnavailable):
        job.escalate(REJECTED, LARGE)
    job.escalate(REJECTED, LARGE)
    job.release()
    assert_moved_once(connection)


def test_a_reply_is_lost_and_another_worker_has_finished_the_job_meanwhile(
    connection,
    queue,
    plain,
    join,
    monkeypatch,
):
    enqueue(plain)
    [job] = claim(queue)
    write = Escalation._write

    def lost(*args, **kwargs):
        write(*args, **kwargs)
        raise Lost

    monkeypatch.setattr(Escalation, "_write", lost)
    with pytest.raises(RedisUnavailable):
        job.escalate(REJECTED, LARGE)
    [later] = claim(join("large", queues="large"))
    finish(later, result_of(REJECTED, ACCEPTED))
    job.escalate(REJECTED, LARGE)
    assert waiting(connection) == []
    assert verdicts(connection) == {"t small": "0.0000 1.0000", "t large": "1.0000 0.0000"}


@pytest.mark.parametrize("how", ["canceled", "taken over"])
def test_a_job_that_is_not_ours_any_more_is_left_alone(connection, queue, plain, how):
    enqueue(plain)
    [job] = claim(queue)
    if how == "canceled":
        Job.fetch("job", connection, JSONSerializer).cancel()
    else:
        taken_over(connection)
    with pytest.raises(OwnershipLost):
        job.escalate(REJECTED, LARGE)
    assert waiting(connection) == []
    assert verdicts(connection) == {}
    assert connection.hget("rq:job:job", FIELD_TRIED) is None


def test_verdicts_decay_as_the_pure_counts_do(connection, queue, plain):
    counts = Counts()
    for n in range(12):
        accepted = n % 3 > 0
        enqueue(plain, f"job-{n}")
        [job] = claim(queue)
        finish(job, result_of(Attempt(model="a model", accepted=accepted)))
        counts = counts.after(accepted=accepted)
    found = Counts.parsed(connection.hget(TRUST_KEY, "t a model"))
    assert found.accepted == pytest.approx(counts.accepted, abs=0.01)
    assert found.rejected == pytest.approx(counts.rejected, abs=0.01)


@pytest.mark.parametrize("found", ["nan nan", "inf 0", "-5 3", "1e308 1e308", "5000 0", "rubbish", "1 2 3"])
def test_whatever_is_in_the_counts_verdicts_count_from_there(connection, queue, plain, found):
    connection.hset(TRUST_KEY, "t m", found)
    enqueue(plain)
    [job] = claim(queue)
    finish(job, result_of(Attempt(model="m", accepted=False)))
    counts, expected = Counts.parsed(connection.hget(TRUST_KEY, "t m")), Counts.parsed(found.encode())
    expected = expected.after(accepted=False)
    assert (counts.accepted, counts.rejected) == pytest.approx((expected.accepted, expected.rejected), abs=0.01)


def test_classes_beyond_the_most_are_not_counted(connection, queue, plain, monkeypatch):
    monkeypatch.setattr("stoker_worker.queue.verdicts.MOST_PAIRS", 1)
    for n, task in enumerate(["t", "u", "t"]):
        enqueue(plain, job_id=f"j{n}")
        [job] = claim(queue)
        finish(job, result_of(Attempt(model="m", accepted=True), task=task))
    assert set(verdicts(connection)) == {"t m"}
    assert Counts.parsed(connection.hget(TRUST_KEY, "t m")).accepted > 1


def test_a_stop_that_was_asked_for_is_not_lost_with_the_move(connection, queue, plain):
    enqueue(plain)
    [job] = claim(queue)
    assert isinstance(job, RqClaimedJob)
    job.parts.stop_requests.ask("job")
    assert not job.escalate(REJECTED, LARGE)
    stop(job)
    assert connection.hget("rq:job:job", "status") == b"stopped"
    assert (waiting(connection), verdicts(connection)) == ([], {})


def test_a_job_may_wait_as_long_in_the_next_queue(connection, queue, plain, join):
    request = {"v": 4, "prompt": "p", "check": {"contains": ["x"]}, "route": ROUTE}
    plain.enqueue(TASK_PATH, request=request, job_id="job", ttl=1000)
    escalated(queue)
    assert 900 < connection.ttl("rq:job:job") <= 1000
    assert ids(claim(join("large", queues="large"))) == ["job"]
    assert connection.ttl("rq:job:job") == -1


@pytest.mark.parametrize("created_at", ["as RQ writes it", "2026-11-23T14:00:00Z", None])
def test_a_job_that_failed_at_the_next_model_is_requeued_there(connection, queue, plain, join, created_at):
    enqueue(plain)
    if created_at is None:
        connection.hdel("rq:job:job", "created_at")
    elif created_at != "as RQ writes it":
        connection.hset("rq:job:job", "created_at", created_at)
    escalated(queue)
    large = join("large", queues="large")
    [job] = claim(large)
    fail(job, EngineFailed("broken"))
    Job.fetch("job", connection, JSONSerializer).requeue()
    [job] = claim_within(large)
    assert (job.model, job.tried) == ("large", (REJECTED,))
    finish(job, result_of(REJECTED, ACCEPTED))
    assert verdicts(connection) == {"t small": "0.0000 1.0000", "t large": "1.0000 0.0000"}


def test_a_reader_holds_nobody_back(queue, plain):
    enqueue(plain, "first", agent_id="a", cache="read")
    enqueue(plain, "second", agent_id="a", cache="read")
    [first, second] = claim(queue)
    first.escalate(REJECTED, LARGE)
    first.release()
    finish(second, {})
    plain.enqueue(TASK_PATH, request={"prompt": "p", "agent_id": "a"}, job_id="third")
    assert ids(claim(queue)) == ["third"]


def test_attempts_of_an_earlier_job_with_this_id_do_not_count(connection, queue, plain):
    connection.hset("rq:job:job", FIELD_TRIED, f"2020-01-01T00:00:00Z [{REJECTED.model_dump_json()}]")
    enqueue(plain)
    [job] = claim(queue)
    assert (job.tried, job.model) == ((), "small")


def test_a_job_with_a_route_is_not_repeated(connection, queue, plain):
    request = {"v": 4, "prompt": "p", "check": {"contains": ["x"]}, "route": ROUTE}
    plain.enqueue(TASK_PATH, request=request, job_id="job", repeat=Repeat(times=2, interval=1))
    assert claim(queue) == []
    failed = Job.fetch("job", connection, JSONSerializer)
    assert failed.get_status() == "failed"
    result = failed.latest_result()
    assert result is not None
    assert "PayloadRefused: a job with a route" in (result.exc_string or "")


def test_a_job_with_a_route_that_would_write_an_agents_memory_is_refused(connection, queue, plain):
    enqueue(plain, agent_id="a")
    assert claim(queue) == []
    result = Job.fetch("job", connection, JSONSerializer).latest_result()
    assert result is not None
    assert "only for jobs that write no agent's memory" in (result.exc_string or "")
