"""A job in flight at two worker losses then runs alone, soon, whatever other queues do; only losses while it runs alone
count against it."""

from contextlib import ExitStack

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from rq.job import Job
from rq.serializers import JSONSerializer
from tests.worker.queue.ends import fail, finish
from tests.worker.queue.looking import FENCE, LEASE, taken_over
from tests.worker.queue.members import claim, ids, run

from stoker_shared.errors import RedisUnavailable
from stoker_shared.wire import FIELD_AGENT, FIELD_ATTEMPTS, FIELD_LOST_ALONE
from stoker_worker.ports import Busy
from stoker_worker.queue.rq_queue import open_queue
from stoker_worker.settings import read_settings

pytestmark = pytest.mark.server

WAIT = "stoker_worker.queue.claim._QUARANTINED_WAITS_S"


@pytest.fixture
def opened(redis_url):
    """Opens a worker's queues, `high` before `generate`; the next call opens them for the next worker."""
    with ExitStack() as at_the_end:
        workers = []

        def open_next():
            for earlier in workers:
                earlier.close()
            workers.append(ExitStack())
            at_the_end.callback(workers[-1].close)
            settings = read_settings({"redis_url": redis_url, "queues": "high,generate"})
            return workers[-1].enter_context(open_queue(settings, redis_url)).rq_queue

        yield open_next


def lose(opened, *, n_jobs):
    """A worker claims this many jobs and is lost; the next one has queued them again."""
    assert len(claim(opened(), n_jobs)) == n_jobs
    queue = opened()
    assert queue.recover() == n_jobs
    return queue


def counted(connection, job_id):
    return [int(field or 0) for field in connection.hmget(f"rq:job:{job_id}", FIELD_ATTEMPTS, FIELD_LOST_ALONE)]


def test_after_a_first_crash_jobs_run_beside_others_as_before(submit, opened):
    lost = submit("a", "b")
    queue = lose(opened, n_jobs=2)
    new = submit("c")
    running = claim(queue)
    assert ids(running) == [*lost, *new]
    assert [job.attempt for job in running] == [2, 2, 1]
    assert ids(claim(queue)) == []
    more = submit("d")
    assert ids(claim(queue)) == more


def test_after_a_second_crash_the_quarantined_jobs_of_every_queue_run_first_one_after_another(submit, opened):
    lost = submit("a", "b")
    lose(opened, n_jobs=2)
    queue = lose(opened, n_jobs=2)
    urgent = submit("u", "v", queue="high")
    for quarantined in lost:
        (job,) = claim(queue)
        assert job.job_id == quarantined
        assert claim(queue) == []
        finish(job, {})
    assert ids(claim(queue)) == urgent


def test_an_id_in_two_queues_runs_once_at_a_time(submit, opened):
    queue = opened()
    [job_id] = submit(None)
    queue._connection.rpush("rq:queue:high", job_id)
    (job,) = claim(queue)
    assert claim(queue) == []
    finish(job, {})
    assert claim(queue) == []


def test_a_quarantined_job_runs_alone_soon_though_a_higher_queue_never_runs_empty(
    connection, submit, opened, monkeypatch
):
    queue = opened()
    submit("u0", queue="high")
    running = claim(queue)
    quarantined, *beside = submit("a", "b", "c", "d")
    connection.hset(f"rq:job:{quarantined}", FIELD_ATTEMPTS, 2)

    monkeypatch.setattr(WAIT, 3600)
    for n in range(1, 4):  # while it waits, other jobs with room go on
        submit(f"u{n}", queue="high")
        running += claim(queue, limit=2)
    assert set(beside) < set(ids(running))
    assert len(running) == 7

    monkeypatch.setattr(WAIT, 0)
    while running:
        submit(f"more {len(running)}", queue="high")
        assert claim(queue) == []
        finish(running.pop(), {})
    (job,) = claim(queue)
    assert job.job_id == quarantined
    assert claim(queue) == []
    finish(job, {})
    assert len(claim(queue)) == 7


def test_no_job_waits_for_a_quarantined_job_that_was_canceled_meanwhile(connection, submit, opened, monkeypatch):
    queue = opened()
    submit("u0", queue="high")
    claim(queue)
    quarantined, other = submit("a", "b")
    connection.hset(f"rq:job:{quarantined}", FIELD_ATTEMPTS, 2)
    assert ids(claim(queue)) == [other]
    Job.fetch(quarantined, connection, JSONSerializer).cancel()
    monkeypatch.setattr(WAIT, 0)
    urgent = submit("u1", queue="high")
    assert ids(claim(queue)) == urgent


def test_a_job_found_quarantined_at_its_start_goes_back_and_waits_for_the_others(connection, submit, opened):
    queue = opened()
    quarantined, other = submit("a", "b")
    queue.claim(0, Busy())  # the jobs are read
    connection.hset(f"rq:job:{quarantined}", FIELD_ATTEMPTS, 2)
    running = claim(queue)
    assert ids(running) == [other]
    assert claim(queue) == []
    run(running)
    assert ids(claim(queue)) == [quarantined]
    assert counted(connection, quarantined) == [2, 0]


def test_jobs_that_go_back_at_their_start_keep_their_order(connection, submit, opened):
    """Both write, and their producer has noted that they read."""
    queue = opened()
    wrong = submit("a", "a")
    (reads,) = submit("a", cache="read")
    for job_id in wrong:
        note = connection.hget(f"rq:job:{job_id}", FIELD_AGENT)
        assert note.endswith(b" write a")
        connection.hset(f"rq:job:{job_id}", FIELD_AGENT, note.replace(b" write ", b" read "))
    assert claim(queue) == []
    for job_id in [*wrong, reads]:
        (job,) = claim(queue)
        assert job.job_id == job_id
        finish(job, {})


def test_the_first_losses_count_against_a_job_only_if_it_ran_alone(connection, submit, opened):
    (first,), (second, alone) = submit("a", queue="high"), submit("b", "c")  # jobs of two queues run together
    for n in (1, 2):
        queue = lose(opened, n_jobs=2)
        assert [counted(connection, job_id) for job_id in (first, second)] == [[n, 0], [n, 0]]
    for job_id in (first, second):
        (job,) = claim(queue)
        assert (job.job_id, job.attempt, job.losses_alone) == (job_id, 3, 0)
        finish(job, {})
    (job,) = claim(queue)
    opened().recover()
    assert job.job_id == alone
    assert counted(connection, alone) == [1, 1]


def test_a_claim_in_doubt_holds_up_all_queues_when_the_lease_is_lost(connection, submit, opened):
    first, _ = submit("a", "a", queue="high")
    queue = opened()
    [job] = claim(queue)
    job.release()  # as if the reply had been lost
    queue._in_doubt = True
    taken_over(connection)  # this worker learns it only at the next heartbeat
    assert claim(queue) == []  # and not the agent's second job
    connection.delete(LEASE, FENCE)
    assert [job.job_id for job in claim(queue)] == [first]


def test_every_later_loss_counts_and_an_end_resets_the_count(connection, submit, opened):
    job_id, _ = submit("a", "b")
    lose(opened, n_jobs=2)
    lose(opened, n_jobs=2)
    queue = lose(opened, n_jobs=1)
    assert counted(connection, job_id) == [3, 1]
    assert len(claim(queue)) == 1
    connection.delete(*connection.scan_iter(f"rq:execution:{job_id}:*"))
    queue = opened()
    assert queue.recover() == 1  # though nobody knows any more in which worker it was
    assert counted(connection, job_id) == [4, 2]
    (job,) = claim(queue)
    assert (job.job_id, job.attempt, job.losses_alone) == (job_id, 5, 2)
    fail(job, ValueError("lost too often"), may_retry=False)
    assert counted(connection, job_id) == [0, 0]
    Job.fetch(job_id, connection, JSONSerializer).requeue()
    run(claim(queue))  # the other one, alone
    assert [(again.job_id, again.attempt) for again in claim(queue)] == [(job_id, 1)]


def test_a_recovery_whose_reply_is_lost_counts_no_job_as_alone_that_was_not(connection, submit, opened, monkeypatch):
    ids = submit("a", "b", "c")
    assert len(claim(opened())) == 3
    queue = opened()
    real = type(queue._job_finish.requeue).all

    def lost(*args):
        real(*args)
        raise RedisConnectionError("gone")

    monkeypatch.setattr(type(queue._job_finish.requeue), "all", lost)
    with pytest.raises(RedisUnavailable):
        queue.recover()
    monkeypatch.undo()
    assert queue.recover() == 0
    assert [counted(connection, job_id) for job_id in ids] == [[1, 0]] * 3


def test_jobs_that_ran_together_go_back_in_one_transaction(connection, submit, opened):
    """If only some were back, the next recovery would count the rest as jobs that ran alone."""
    job_ids = submit("a", "b", "c")
    assert len(claim(opened())) == 3
    queue = opened()
    with connection.monitor() as monitor:
        assert queue.recover() == 3
        connection.ping()
        seen = []
        while "PING" not in seen:
            seen.append(monitor.next_command()["command"].split(" ")[0].upper())
    calls = " ".join(name for name in seen if name in {"MULTI", "EVALSHA", "EXEC"})
    assert "MULTI EVALSHA EVALSHA EVALSHA EXEC" in calls
    assert [job_id.decode() for job_id in connection.lrange("rq:queue:generate", 0, -1)] == job_ids


def test_a_producers_note_of_another_agent_is_corrected_when_the_job_is_claimed(connection, submit, opened):
    """Otherwise it would be claimed and given back forever, and block the jobs behind it."""
    queue = opened()
    submit("a")
    running = claim(queue)
    wrong, behind = submit("a", "b")
    note = connection.hget(f"rq:job:{wrong}", FIELD_AGENT)
    assert note.endswith(b" a")
    connection.hset(f"rq:job:{wrong}", FIELD_AGENT, note[:-1] + b"somebody else")
    assert ids(claim(queue)) == [behind]
    for _ in range(3):
        assert claim(queue) == []
    assert queue.waiting_agents() == {"a"}
    assert counted(connection, wrong) == [0, 0]
    finish(running[0], {})
    assert ids(claim(queue)) == [wrong]
