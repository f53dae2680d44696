"""The queue adapter: each job ends once, and only by its own worker."""

import gc
import weakref

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from rq import Retry
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.suspension import resume, suspend
from tests.worker.queue.ends import drop, fail, finish, give_back, stop
from tests.worker.queue.looking import LEASE, is_ours, places, taken_over

from stoker_shared.errors import EngineFailed, GenerationTimedOut, JobFailed, OwnershipLost
from stoker_shared.wire import FIELD_ATTEMPTS, TASK_PATH
from stoker_worker.ports import Busy
from stoker_worker.queue.rq_queue import open_queue
from stoker_worker.settings import read_settings

pytestmark = pytest.mark.server

RESULT = {"text": "done"}


def claim(queue, limit=8):
    return queue.claim(limit, Busy())


DAY_S, YEAR_S = 86_400, 366 * 86_400


@pytest.mark.parametrize(
    ("result_ttl", "at_least_s"),
    [(None, DAY_S), (600, 600), (0, 0), (3 * DAY_S, 3 * DAY_S), (-1, YEAR_S), (10**12, YEAR_S)],
)
def test_a_job_lives_as_long_as_its_result_and_some_time_more(plain, queue, result_ttl, at_least_s):
    """The margin is for a worker that still has it, and for clocks that differ."""
    plain.enqueue(TASK_PATH, request={"agent_id": "a", "prompt": "x"}, result_ttl=result_ttl)
    (job,) = claim(queue)
    assert at_least_s + 1800 <= job.lives_s <= at_least_s + 2 * 3600


def test_a_deposed_worker_ends_nothing_and_leaves_its_jobs_to_the_next_worker(connection, submit, queue):
    (job_id,) = submit("a")
    (job,) = claim(queue)
    taken_over(connection, and_left=True)
    assert not is_ours(job)
    assert not queue.beat()
    for end in (lambda: finish(job, RESULT), lambda: fail(job, ValueError("x"))):
        with pytest.raises(OwnershipLost):
            end()
    give_back([job], counts_as_attempt=False)
    drop(job)
    assert queue.recover() == 0
    assert claim(queue) == []
    assert places(connection, job_id) == ["wip"]
    assert connection.hget(f"rq:job:{job_id}", "status") == b"started"


def test_a_lease_that_expired_while_redis_was_away_is_renewed(connection, submit, queue):
    (job_id,) = submit("a")
    (job,) = claim(queue)
    connection.delete(LEASE)
    assert is_ours(job)
    finish(job, RESULT)
    assert places(connection, job_id) == ["finished"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_claim_is_recovered_and_costs_no_attempt(connection, submit, queue, monkeypatch, when):
    ids = submit("a", "b", "c")
    real, calls = queue._claim_order.read, []

    def breaking(*args, **options):
        calls.append(args)
        if len(calls) == 2 and when == "before":
            raise RedisConnectionError("gone")
        done = real(*args, **options)
        if len(calls) == 2:
            raise RedisConnectionError("gone")
        return done

    monkeypatch.setattr(queue._claim_order, "read", breaking)
    (first,) = claim(queue)
    monkeypatch.undo()
    assert first.job_id == ids[0]
    queue.recover()
    queue.recover()
    assert places(connection, ids[0]) == ["wip"]
    assert [places(connection, job_id) for job_id in ids[1:]] == [["generate"]] * 2
    assert [job.job_id for job in claim(queue)] == ids[1:]
    assert not connection.hexists(f"rq:job:{ids[1]}", FIELD_ATTEMPTS)


def test_no_job_is_claimed_once_the_workers_are_suspended_which_is_known(
    queue, connection, submit, monkeypatch, caplog
):
    """`rq suspend` may come between the worker's own look and its claim."""
    [waits] = submit("a")
    claimer = queue._claim_order.claimers["generate"]
    real = claimer.claim

    def suspend_and_claim(*args):
        suspend(connection)
        return real(*args)

    with monkeypatch.context() as late:
        late.setattr(claimer, "claim", suspend_and_claim)
        assert (claim(queue), queue.is_suspended()) == ([], False)
    for _ in range(2):
        assert (claim(queue), queue.is_suspended()) == ([], True)
    assert connection.lrange("rq:queue:generate", 0, -1) == [waits.encode()]
    resume(connection)
    assert [job.job_id for job in claim(queue)] == [waits]
    assert not queue.is_suspended()
    began, ended = [line for line in caplog.messages if "suspended" in line]
    assert began.startswith("suspended (rq suspend)")
    assert ended.startswith("no longer suspended")


@pytest.mark.parametrize("reason", ["suspended", "a lost job runs alone"])
def test_a_claim_that_does_not_look_does_not_know_all_that_waits(connection, submit, queue, reason):
    if reason == "suspended":
        assert claim(queue) == []
        assert queue.knows_all()
        suspend(connection)
    else:
        submit("lost")
        for _ in range(2):
            give_back(claim(queue), counts_as_attempt=True)
        assert [job.attempt for job in claim(queue)] == [3]
    submit("waits")
    assert claim(queue) == []
    assert not queue.knows_all()


def overwrite(connection, key, job_id):
    """Give a key of a running job another type. A queue's: the job's id seems to be enqueued there once more."""
    if key == "rq:queue:odd":
        connection.hset(f"rq:job:{job_id}", mapping={"status": "queued", "origin": "odd"})
    connection.set(key.format(job_id), "of another type")


@pytest.mark.parametrize("key", ["rq:job:{}", "rq:executions:{}", "rq:queue:odd"])
def test_a_lost_workers_job_with_an_overwritten_key_holds_up_no_other(redis_url, connection, submit, key):
    odd, job_id = submit("a", "b")
    with open_queue(read_settings({"redis_url": redis_url}), redis_url) as dead:
        assert len(claim(dead.rq_queue)) == 2
    overwrite(connection, key, odd)
    with open_queue(read_settings({"redis_url": redis_url}), redis_url) as alive:
        alive.rq_queue.recover()
        back = [] if key == "rq:job:{}" else ["generate"]
        assert (places(connection, odd), places(connection, job_id)) == (back, ["generate"])
        assert claim(alive.rq_queue) or claim(alive.rq_queue)


@pytest.mark.parametrize("key", ["rq:job:{}", "rq:executions:{}", "rq:queue:odd"])
def test_a_withdrawal_is_seen_beside_a_job_with_an_overwritten_key(connection, submit, queue, key):
    odd, job_id, _ = submit("a", "b", "c")
    claim(queue)
    overwrite(connection, key, odd)
    connection.hset(f"rq:job:{job_id}", "status", "canceled")
    if key == "rq:executions:{}":
        connection.hset(f"rq:job:{odd}", "status", "canceled")
    withdrawn = queue.withdrawn({})
    assert [job.job_id for job in withdrawn] == ([job_id] if key == "rq:queue:odd" else [odd, job_id])
    for job in withdrawn:
        stop(job)


def test_a_stop_during_the_start_of_its_job_is_not_lost(submit, queue, monkeypatch):
    (job_id,) = submit("a")
    real = queue._claim_order.read

    def start_and_stop(*args):
        queue._registration.in_flight.ask_to_stop(job_id)
        return real(*args)

    monkeypatch.setattr(queue._claim_order, "read", start_and_stop)
    (job,) = claim(queue)
    assert queue.withdrawn({}) == [job]


def test_a_stop_of_another_workers_job_is_not_kept_for_later(submit, queue):
    (job_id,) = submit("a")
    queue._registration.in_flight.ask_to_stop(job_id)
    (_job,) = claim(queue)
    assert queue.withdrawn({}) == []


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_job_withdrawn_during_its_refusal_holds_up_no_claim(connection, submit, plain, queue, monkeypatch, how):
    plain.enqueue("os.getcwd", job_id="odd")
    (job_id,) = submit("a")
    real = queue._job_finish.fail

    def withdrawn_first(run, error):
        getattr(Job.fetch("odd", connection, JSONSerializer), how)()
        real(run, error)

    monkeypatch.setattr(queue._job_finish, "fail", withdrawn_first)
    assert [job.job_id for job in claim(queue)] == [job_id]
    assert places(connection, "odd") == (["canceled"] if how == "cancel" else [])
    assert not list(connection.scan_iter("rq:execution*:odd*"))
    assert [job.job_id for job in queue.in_flight()] == [job_id]


def test_an_error_of_many_lines_reaches_the_producer_with_its_kind(producer, queue):
    ticket = producer.submit(agent_id="a", prompt="x")
    (job,) = claim(queue)
    job.fail(EngineFailed("RuntimeError: no memory\n  for 3 blocks"))
    with pytest.raises(JobFailed) as caught:
        ticket.result(timeout_s=5)
    assert caught.value.reason == "EngineFailed: RuntimeError: no memory for 3 blocks"
    assert caught.value.retryable


def test_queues_are_served_in_the_order_the_worker_lists_them(redis_url, producer):
    def enqueue(agent_id, queue):
        return producer.submit(agent_id=agent_id, prompt="x", queue=queue).job_id

    low, high, low_too, high_too, waits = map(enqueue, "abcdd", ("generate", "high", "generate", "high", "generate"))
    settings = read_settings({"redis_url": redis_url, "queues": "high,generate"})
    with open_queue(settings, redis_url) as opened:
        queue = opened.rq_queue
        assert [job.job_id for job in claim(queue, limit=3)] == [high, high_too, low]
        assert queue.waiting_agents() == {"c", "d"}
        late = enqueue("e", "high")
        running = Busy(writing=frozenset("abd"))
        assert [job.job_id for job in queue.claim(8, running)] == [late, low_too]
        assert [job.job_id for job in claim(queue)] == [waits]


def test_a_failed_turn_does_not_hold_up_the_next(plain, queue):
    request = {"agent_id": "a", "prompt": "x", "context": "append"}
    first, second = (plain.enqueue(TASK_PATH, request=request, retry=Retry(max=1, interval=60)).id for _ in range(2))
    (job,) = claim(queue)
    assert job.job_id == first
    fail(job, GenerationTimedOut("late"))
    assert [job.job_id for job in claim(queue)] == [second]


def test_a_claim_in_doubt_is_put_back_also_if_the_lease_expired_meanwhile(connection, submit, queue):
    """Redis was away longer than the lease: no other worker has the queue, and the next claim must not come first."""
    (job_id,) = submit("a")
    [job] = claim(queue)
    job.release()  # as if the reply had been lost
    connection.delete(LEASE)
    assert queue.recover() == 1
    assert places(connection, job_id) == ["generate"]


def test_the_jobs_of_an_interrupted_claim_go_back_before_the_next_claim(connection, submit, queue, monkeypatch):
    first, second, third = submit("a", "b", "b")
    real = queue._claim_order.read

    def start(name, granted):
        if granted.job_id == second:
            raise RedisConnectionError("gone")
        return real(name, granted)

    monkeypatch.setattr(queue._claim_order, "read", start)
    assert [job.job_id for job in claim(queue)] == [first]
    monkeypatch.undo()
    assert [job.job_id for job in queue.claim(8, Busy(writing=frozenset({"a"})))] == [second]
    assert places(connection, third) == ["generate"]


@pytest.mark.parametrize("fell_asleep_after", ["lease", "worker"])
def test_a_heartbeat_paused_half_way_restores_nothing_the_next_worker_has_removed(
    redis_url, connection, submit, queue, monkeypatch, fell_asleep_after
):
    (job_id,) = submit("a")
    claim(queue)

    def then_sleep(act):
        def acting(*args):
            done = act(*args)
            connection.delete(LEASE)  # it expired
            with open_queue(read_settings({"redis_url": redis_url}), redis_url) as successor:
                assert successor.rq_queue.recover() == 1
                (job,) = claim(successor.rq_queue)
                finish(job, RESULT)
            connection.delete(f"rq:job:{job_id}")  # the result's time to live is over
            return done

        return acting

    asleep = {"lease": (queue._lease, "renew"), "worker": (queue._registration, "beat")}[fell_asleep_after]
    monkeypatch.setattr(*asleep, then_sleep(getattr(*asleep)))
    queue.beat()
    assert not list(connection.scan_iter("rq:execution*"))
    assert not connection.exists(f"rq:job:{job_id}")
    assert all(connection.ttl(key) > 0 for key in connection.scan_iter("rq:worker:*"))


def test_neither_a_heartbeat_nor_an_end_restores_the_hash_of_a_deleted_running_job(connection, queue, submit):
    (job_id,) = submit("a")
    (job,) = claim(queue)
    connection.delete(f"rq:job:{job_id}")
    queue.beat()
    assert not connection.exists(f"rq:job:{job_id}")
    with pytest.raises(OwnershipLost):
        fail(job, GenerationTimedOut("late"), "so far")
    assert not connection.exists(f"rq:job:{job_id}")


def test_giving_back_a_job_that_was_deleted_leaves_nothing_of_its_execution(connection, submit, queue):
    (job_id,) = submit("a")
    (job,) = claim(queue)
    Job.fetch(job_id, connection, JSONSerializer).delete()
    give_back([job], counts_as_attempt=False)
    assert places(connection, job_id) == []
    assert not list(connection.scan_iter("rq:execution*"))


@pytest.mark.parametrize("end", [lambda job: finish(job, RESULT), lambda job: fail(job, ValueError("x")), stop, drop])
def test_nothing_holds_a_jobs_request_once_it_has_ended(producer, queue, end):
    """Python looks for cycles so rarely that some dozens of large requests would stay in memory until then."""
    producer.submit(prompt="x" * 1000)
    (job,) = claim(queue)
    request, of_rq = weakref.ref(job.request), weakref.ref(job.run.job)
    assert len(job.run.job.data) < 100
    gc.collect()
    gc.disable()
    try:
        end(job)
        del job
        assert request() is None
        assert of_rq() is None
    finally:
        gc.enable()
