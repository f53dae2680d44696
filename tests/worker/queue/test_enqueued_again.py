"""An id is enqueued again while its job runs: a repeated delivery changes nothing, a new one waits for its turn."""

import json
from datetime import timedelta

import pytest
from rq.job import Dependency, Job, JobStatus
from rq.queue import Queue
from rq.serializers import JSONSerializer
from rq.utils import now
from tests.worker.queue.ends import drop, fail, finish, stop
from tests.worker.queue.looking import LEASE, places

from stoker_shared.errors import OwnershipLost
from stoker_shared.wire import FIELD_ATTEMPTS, TASK_PATH
from stoker_worker.ports import Busy
from stoker_worker.queue.rq_queue import open_queue
from stoker_worker.settings import read_settings

pytestmark = pytest.mark.server

RESULT = {"text": "done"}


@pytest.fixture
def send_again(connection):
    """Push the id once more with the producer's own keys, as in a transaction that a client sent twice."""

    def send(job_id, **changed):
        key = f"rq:job:{job_id}"
        fields = dict.fromkeys(("worker_name", "started_at", "ended_at"), "") | {"status": "queued"} | changed
        connection.hset(key, mapping=fields)
        connection.rpush("rq:queue:generate", job_id)

    return send


def claim(queue, busy=()):
    return queue.claim(8, Busy(writing=frozenset(busy)))


def claims_nothing(queue):
    """Whether a claim finds nothing, nor any id that was pushed more than once."""
    for _ in range(5):
        queue._claim_order.claimers["generate"].view._may_start_over.make_due()
        assert claim(queue) == []
    return queue.is_empty()


def nothing_is_left(connection, job_id):
    left = [*connection.scan_iter(f"rq:execution*:{job_id}*"), *connection.scan_iter("rq:worker:*:executions")]
    return left == [] and places(connection, job_id) == ["finished"]


def results(connection, job_id):
    return [result.return_value for result in Job.fetch(job_id, connection, JSONSerializer).results()]


def resend(connection, plain, send_again, how):
    if how == "raw":
        send_again("job")
    elif how == "save":  # an enqueuer that adds a field of its own
        job = Job.fetch("job", connection, JSONSerializer)
        job._status = JobStatus.QUEUED
        job.save()
    else:
        plain.enqueue_job(Job.fetch("job", connection, JSONSerializer))


@pytest.mark.parametrize("how", ["raw", "enqueue_job", "save"])
@pytest.mark.parametrize("seen_by", ["watch", "end"])
def test_a_delivery_sent_twice_runs_once_and_shows_as_running(
    connection, plain, queue, enqueue, send_again, how, seen_by
):
    enqueue("job")
    enqueue("next")
    (job,) = claim(queue)
    for _ in range(3):
        resend(connection, plain, send_again, how)
        if seen_by == "watch":
            assert queue.withdrawn({}) == []
            assert connection.hget("rq:job:job", "status") == b"started"
            assert places(connection, "job") == ["wip"]
            assert claim(queue, {"a"}) == []
    finish(job, RESULT)
    assert results(connection, "job") == [RESULT]
    assert [job.job_id for job in claim(queue)] == ["next"]
    assert places(connection, "next") == ["wip"]
    queue.recover()
    assert places(connection, "job") == ["finished"]


@pytest.mark.parametrize("status", [JobStatus.SCHEDULED, JobStatus.DEFERRED])
@pytest.mark.parametrize("seen_by", ["watch", "end", "recovery"])
def test_a_run_goes_on_when_its_enqueuer_saves_a_copy_from_before_the_job_was_queued(
    redis_url, connection, queue, enqueue, status, seen_by
):
    """As after `enqueue_in` or `depends_on`: the status of the enqueuer's own object is that of its enqueueing."""
    copy = enqueue("job")
    copy._status = status
    enqueue("next")
    (job,) = claim(queue)
    copy.save()
    if seen_by == "watch":
        assert queue.withdrawn({}) == []
        assert connection.hget("rq:job:job", "status") == b"started"
    if seen_by == "recovery":
        connection.delete(LEASE)  # its worker is lost
        with open_queue(read_settings({"redis_url": redis_url}), redis_url) as alive:
            assert alive.rq_queue.recover() == 1
            (job,) = claim(alive.rq_queue)
            assert (job.job_id, job.attempt) == ("job", 2)
            finish(job, RESULT)
    else:
        assert claim(queue, {"a"}) == []
        finish(job, RESULT)
    assert results(connection, "job") == [RESULT]
    assert nothing_is_left(connection, "job")


def test_a_run_ends_without_a_result_when_its_job_is_scheduled_for_later(connection, plain, queue, enqueue):
    copy = enqueue("job")
    (job,) = claim(queue)
    plain.schedule_job(copy, now() + timedelta(hours=1))
    assert queue.withdrawn({}) == [job]
    stop(job)
    assert places(connection, "job") == ["scheduled"]


@pytest.mark.parametrize("how", ["enqueue", "raw"])
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("seen_by", ["watch", "end", "recovery"])
def test_a_new_delivery_replaces_the_run_and_runs_once_in_its_agents_order(
    connection, queue, enqueue, send_again, how, times, seen_by
):
    enqueue("job", prompt="old")
    enqueue("next")
    (old,) = claim(queue)
    connection.hset("rq:job:job", FIELD_ATTEMPTS, 2)
    for n in range(times):
        if how == "raw":
            other = enqueue("other", prompt=f"new {n}")
            send_again("job", data=connection.hget("rq:job:other", "data"), created_at="2026-01-01T00:00:00Z")
            other.delete()
        else:
            enqueue("job", prompt=f"new {n}")
    if seen_by == "watch":
        assert queue.withdrawn({}) == [old]
        stop(old)
    elif seen_by == "end":
        with pytest.raises(OwnershipLost):
            finish(old, RESULT)
        drop(old)
    else:
        queue.recover()
        assert claim(queue, {"a"}) == []
        stop(old)
    queue.recover()
    assert not connection.exists("rq:results:job")
    assert connection.hget("rq:job:job", "status") == b"queued"
    ran = []
    for _ in range(2):
        (job,) = claim(queue)
        ran.append((job.job_id, job.request.prompt, job.attempt))
        finish(job, RESULT)
    assert ran == [("next", "x", 1), ("job", f"new {times - 1}", 1)]
    assert claims_nothing(queue)
    assert results(connection, "job") == [RESULT]
    assert nothing_is_left(connection, "job")


@pytest.mark.parametrize("how", ["overwritten", "deleted first"])
def test_an_id_enqueued_for_another_agent_starts_when_the_old_run_has_left(connection, queue, enqueue, how):
    enqueue("job", prompt="old")
    (old,) = claim(queue)
    if how == "deleted first":
        Job.fetch("job", connection, JSONSerializer).delete()
    enqueue("job", agent="b", prompt="new")
    enqueue("later", agent="b")
    enqueue("beside", agent="c")
    assert [job.job_id for job in claim(queue, {"a"})] == ["beside"]
    assert claim(queue, {"a", "c"}) == []
    assert queue.withdrawn({}) == [old]
    stop(old)
    (new,) = claim(queue, {"a", "c"})
    assert (new.job_id, new.request.prompt) == ("job", "new")
    assert claim(queue, {"a", "b", "c"}) == []
    finish(new, RESULT)
    assert places(connection, "job") == ["finished"]
    assert [job.job_id for job in claim(queue, {"a", "c"})] == ["later"]


def test_an_id_enqueued_again_right_after_its_end_is_not_dropped(connection, queue, enqueue):
    """While the thread that wrote the end has not released the job yet."""
    enqueue("job")
    (old,) = claim(queue)
    old.finish(RESULT)
    enqueue("job", agent="b", prompt="new")
    assert claim(queue) == []
    old.release()
    (new,) = claim(queue)
    assert new.request.prompt == "new"
    finish(new, RESULT)
    assert results(connection, "job") == [RESULT, RESULT]


@pytest.mark.parametrize("created_at", [None, "2026-01-01T00:00:00.000000Z"])
def test_an_id_that_is_used_again_for_another_request_is_another_delivery(connection, queue, created_at):
    """Else the agent's history would answer it. As the README's commands enqueue: without a time, or with one time."""
    found = []
    for prompt in ("one", "two", "two"):
        data = json.dumps([TASK_PATH, None, [], {"request": {"agent_id": "a", "prompt": prompt}}])
        times = {"created_at": created_at} if created_at else {}
        connection.delete("rq:job:job")
        connection.hset("rq:job:job", mapping={"status": "queued", "origin": "generate", "data": data, **times})
        connection.rpush("rq:queue:generate", "job")
        (job,) = claim(queue)
        found.append(job.delivery)
        finish(job, RESULT)
    assert found[0] != found[1] == found[2]


@pytest.mark.parametrize("first", ["parent", "child"])
def test_an_id_that_waited_for_a_parent_and_is_used_anew_runs_once_and_does_not_hold_up_its_parent(
    connection, queue, enqueue, first
):
    enqueue("parent")
    waits_for = Dependency(jobs=["parent"], allow_failure=True)
    enqueue("child", "b", "old", depends_on=waits_for)
    enqueue("child", "b", "new")
    jobs = {job.job_id: job for job in claim(queue)}
    assert jobs["child"].request.prompt == "new"
    assert places(connection, "child") == ["wip"]
    for job_id in sorted(jobs, key=lambda job_id: job_id != first):
        finish(jobs[job_id], RESULT)
    assert claims_nothing(queue)
    assert places(connection, "parent") == places(connection, "child") == ["finished"]
    assert results(connection, "child") == [RESULT]


@pytest.mark.parametrize("same", [True, False])
def test_a_lost_workers_job_that_was_enqueued_again_keeps_its_agents_order(
    redis_url, connection, enqueue, send_again, same
):
    """The delivery that ran goes to the front; another delivery keeps its own place."""
    with open_queue(read_settings({"redis_url": redis_url}), redis_url) as dead:
        enqueue("job", prompt="old")
        enqueue("next")
        assert len(claim(dead.rq_queue)) == 1
        send_again("job") if same else enqueue("job", prompt="new")
    with open_queue(read_settings({"redis_url": redis_url}), redis_url) as alive:
        alive.rq_queue.recover()
        ran = []
        for _ in range(2):
            (job,) = claim(alive.rq_queue)
            ran.append((job.job_id, job.request.prompt, job.attempt))
            finish(job, RESULT)
        assert claim(alive.rq_queue) == []
    assert ran == ([("job", "old", 2), ("next", "x", 1)] if same else [("next", "x", 1), ("job", "new", 1)])
    assert nothing_is_left(connection, "job")


def test_the_id_of_a_scheduled_or_deferred_job_in_the_queue_does_not_run_it_twice(connection, plain, queue):
    request = {"agent_id": "a", "prompt": "x"}
    plain.enqueue_in(timedelta(hours=1), TASK_PATH, request=request, job_id="scheduled")
    plain.enqueue(TASK_PATH, request=request, job_id="deferred", depends_on="scheduled")
    for job_id in ("scheduled", "deferred"):
        connection.rpush("rq:queue:generate", job_id)
    assert claims_nothing(queue)
    assert [places(connection, job_id) for job_id in ("scheduled", "deferred")] == [["scheduled"], ["deferred"]]


@pytest.mark.parametrize("first", ["finished", "failed", "canceled", "scheduled"])
@pytest.mark.parametrize("other_queue", [False, True])
def test_an_id_leaves_the_registry_of_its_previous_job(redis_url, connection, plain, enqueue, first, other_queue):
    """Otherwise it would be both finished and failed, perhaps in two queues, and a scheduler would enqueue it again."""
    settings = read_settings({"redis_url": redis_url, "queues": "generate,second"})
    with open_queue(settings, redis_url) as opened:
        queue = opened.rq_queue
        if first == "scheduled":
            plain.enqueue_in(timedelta(hours=1), TASK_PATH, request={"agent_id": "a", "prompt": "x"}, job_id="job")
        else:
            enqueue("job")
        if first == "canceled":
            Job.fetch("job", connection, JSONSerializer).cancel()
        elif first != "scheduled":
            (job,) = claim(queue)
            finish(job, RESULT) if first == "finished" else fail(job, ValueError("so"), may_retry=False)
        assert places(connection, "job") == [first]

        name = "second" if other_queue else "generate"
        again = Queue(name, connection=connection, serializer=JSONSerializer)
        again.enqueue(TASK_PATH, request={"agent_id": "a", "prompt": "y"}, job_id="job")
        (job,) = claim(queue)
        assert places(connection, "job") == ([] if other_queue else ["wip"])
        fail(job, ValueError("so"), may_retry=False) if first == "finished" else finish(job, RESULT)
        end = "failed" if first == "finished" else "finished"
        assert places(connection, "job") == ([] if other_queue else [end])
        assert connection.zrange(f"rq:{end}:{name}", 0, -1) == [b"job"]
