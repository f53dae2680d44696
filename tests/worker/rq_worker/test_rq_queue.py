"""The queue adapter: one end for each job, and none that is not ours to write."""

from contextlib import suppress

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from rq import Retry
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.worker import Worker as WorkerOfRq
from tests.worker.rq_worker.looking import places, taken_over

from stoker_shared.errors import GenerationTimedOut, OwnershipLost, RedisUnavailable
from stoker_shared.wire import ENDED_KEY, FIELD_ATTEMPTS, LEASE_KEY, TASK_PATH
from stoker_worker.ports import Busy
from stoker_worker.rq_worker.connect import open_queue
from stoker_worker.rq_worker.ended_note import EndedNote
from stoker_worker.rq_worker.requeue import InFlight
from stoker_worker.settings import read_settings

pytestmark = pytest.mark.server

RESULT = {"text": "done"}


def submit(producer, *agents):
    return [producer.submit(agent_id=agent, prompt="x").job_id for agent in agents]


def claim(queue, limit=8):
    return queue.claim(limit, Busy())


def test_a_claimed_job_is_started_in_rqs_terms_and_finished_once(connection, producer, queue):
    (job_id,) = submit(producer, "a")
    (job,) = claim(queue)
    assert (job.job_id, job.attempt, job.request.agent_id) == (job_id, 1, "a")
    assert places(connection, job_id) == ["wip"]
    assert queue.owns(job)
    queue.finish(job, RESULT)
    assert places(connection, job_id) == ["finished"]
    assert Job.fetch(job_id, connection, JSONSerializer).return_value() == RESULT
    assert not list(connection.scan_iter("rq:execution*"))


def test_finishing_twice_as_after_a_lost_reply_leaves_one_result(connection, producer, queue):
    (job_id,) = submit(producer, "a")
    (job,) = claim(queue)
    queue.finish(job, RESULT)
    with pytest.raises(OwnershipLost):
        queue.finish(job, RESULT)
    assert connection.xlen(f"rq:results:{job_id}") == 1


def test_a_take_over_between_looking_and_writing_undoes_the_write(connection, producer, queue, monkeypatch):
    """What a process does that slept exactly there."""
    (job_id,) = submit(producer, "a")
    (job,) = claim(queue)
    real = queue._ownership.of

    def look_then_sleep(handle):
        found = real(handle)
        taken_over(connection)
        return found

    monkeypatch.setattr(queue._ownership, "of", look_then_sleep)
    with pytest.raises(OwnershipLost):
        queue.finish(job, RESULT)
    assert connection.xlen(f"rq:results:{job_id}") == 0
    assert places(connection, job_id) == ["wip"]


@pytest.mark.parametrize("successor_left", [False, True])
def test_a_deposed_worker_ends_nothing_puts_nothing_back_and_leaves_what_the_next_must_find(
    connection, producer, queue, successor_left
):
    (job_id,) = submit(producer, "a")
    (job,) = claim(queue)
    taken_over(connection, and_left=successor_left)
    assert not queue.owns(job)
    assert not queue.beat()
    for end in (lambda: queue.finish(job, RESULT), lambda: queue.fail(job, ValueError("x"))):
        with pytest.raises(OwnershipLost):
            end()
    queue.give_back([job], counts_as_attempt=False)
    queue.drop(job)
    assert queue.recover() == 0
    assert claim(queue) == []
    assert places(connection, job_id) == ["wip"]
    assert connection.hget(f"rq:job:{job_id}", "status") == b"started"


def test_a_lease_that_ran_out_while_redis_was_away_is_still_ours(connection, producer, queue):
    (job_id,) = submit(producer, "a")
    (job,) = claim(queue)
    connection.delete(LEASE_KEY.format(queue="generate"))
    assert queue.owns(job)
    queue.finish(job, RESULT)
    assert places(connection, job_id) == ["finished"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_claim_broken_off_half_way_is_found_again_and_costs_no_attempt(
    connection, producer, queue, monkeypatch, when
):
    ids = submit(producer, "a", "b", "c")
    real, calls = queue._identity.begin, []

    def breaking(*args, **options):
        calls.append(args)
        if len(calls) == 2 and when == "before":
            raise RedisConnectionError("gone")
        done = real(*args, **options)
        if len(calls) == 2:
            raise RedisConnectionError("gone")
        return done

    monkeypatch.setattr(queue._identity, "begin", breaking)
    (first,) = claim(queue)
    monkeypatch.undo()
    assert first.job_id == ids[0]
    queue.recover()
    queue.recover()
    assert places(connection, ids[0]) == ["wip"]
    assert [places(connection, job_id) for job_id in ids[1:]] == [["generate"]] * 2
    assert [job.job_id for job in claim(queue)] == ids[1:]
    assert not connection.hexists(f"rq:job:{ids[1]}", FIELD_ATTEMPTS)


def test_a_dead_workers_jobs_are_put_back_in_their_order_and_counted(redis_url, connection, producer):
    ids = submit(producer, "a", "b", "c")
    with open_queue(read_settings({"redis_url": redis_url}), redis_url) as dead:
        assert len(claim(dead.rq_queue, limit=2)) == 2
    with open_queue(read_settings({"redis_url": redis_url}), redis_url) as alive:
        assert alive.rq_queue.recover() == 2
        assert [job_id.decode() for job_id in connection.lrange("rq:queue:generate", 0, -1)] == ids
        for job_id, attempt in zip(ids, (2, 2, 1), strict=True):  # what was in flight runs alone now
            (job,) = claim(alive.rq_queue)
            assert (job.job_id, job.attempt) == (job_id, attempt)
            assert claim(alive.rq_queue) == []
            alive.rq_queue.finish(job, {})
        assert connection.smembers("rq:workers:generate") == {f"rq:worker:{alive.identity.name}".encode()}


def test_the_agents_of_waiting_jobs_are_read_while_every_place_is_taken(producer, queue):
    """Or what waits far behind would have its turn only when all before it was looked at, a few at each claim."""
    submit(producer, *["heavy"] * 300)
    assert len(claim(queue)) == 1
    submit(producer, "other")
    for _ in range(50):
        assert queue.claim(0, Busy(writing=frozenset({"heavy"}))) == []
    assert queue.waiting_agents() == {"heavy", "other"}


def test_a_dead_workers_job_whose_key_somebody_has_overwritten_holds_up_no_other(redis_url, connection, producer):
    odd, job_id = submit(producer, "a", "b")
    with open_queue(read_settings({"redis_url": redis_url}), redis_url) as dead:
        assert len(claim(dead.rq_queue)) == 2
    connection.set(f"rq:job:{odd}", "no hash")
    with open_queue(read_settings({"redis_url": redis_url}), redis_url) as alive:
        assert alive.rq_queue.recover() == 1
        assert [job.job_id for job in claim(alive.rq_queue)] == [job_id]
    assert places(connection, odd) == []


def test_a_withdrawal_is_seen_beside_a_job_whose_key_somebody_has_overwritten(connection, producer, queue):
    odd, job_id, _ = submit(producer, "a", "b", "c")
    jobs = claim(queue)
    connection.set(f"rq:job:{odd}", "no hash")
    Job.fetch(job_id, connection, JSONSerializer).cancel()
    assert [job.job_id for job in queue.withdrawn(jobs, {})] == [odd, job_id]


def test_a_job_that_could_not_be_given_back_is_recovered(connection, producer, queue, monkeypatch):
    (job_id,) = submit(producer, "a")
    (job,) = claim(queue)

    def refuse(*args, **options):
        raise ResponseError("no")

    monkeypatch.setattr(queue, "_requeue", refuse)
    with pytest.raises(ResponseError):
        queue.give_back([job], counts_as_attempt=True)
    monkeypatch.undo()
    assert queue.recover() == 1
    assert places(connection, job_id) == ["generate"]


def test_jobs_given_back_stand_in_front_in_their_order_and_cost_no_attempt(connection, producer, queue):
    ids = submit(producer, "a", "b", "c")
    jobs = claim(queue, limit=2)
    queue.give_back(jobs, counts_as_attempt=False)
    assert [job_id.decode() for job_id in connection.lrange("rq:queue:generate", 0, -1)] == ids
    assert [job.attempt for job in claim(queue)] == [1, 1, 1]


def test_jobs_are_numbered_as_they_are_claimed_whatever_the_clock_does(producer, queue, monkeypatch):
    ids = submit(producer, "a", "b", "c")
    times = iter(range(10**6, 0, -1))
    monkeypatch.setattr("time.time", lambda: float(next(times)))
    jobs = claim(queue, limit=2) + claim(queue)
    assert [job.job_id for job in sorted(jobs, key=lambda job: job.claim_number)] == ids


def test_what_was_given_back_is_counted(connection, producer, queue):
    submit(producer, "a", "b")
    jobs = claim(queue)
    assert queue.give_back(jobs[:1], counts_as_attempt=False) == 1
    taken_over(connection)
    assert queue.give_back(jobs[1:], counts_as_attempt=False) == 0


def test_a_failed_job_that_an_operator_requeues_begins_anew(connection, producer, queue):
    (job_id,) = submit(producer, "a")
    connection.hset(f"rq:job:{job_id}", FIELD_ATTEMPTS, 3)
    (job,) = claim(queue)
    assert job.attempt == 4
    queue.fail(job, ValueError("lost too often"), may_retry=False)
    Job.fetch(job_id, connection, JSONSerializer).requeue()
    (job,) = claim(queue)
    assert job.attempt == 1


def test_a_stop_that_comes_while_its_job_is_being_started_is_not_lost(producer, queue, monkeypatch):
    (job_id,) = submit(producer, "a")
    real = queue._identity.begin

    def start_and_stop(job, check):
        execution = real(job, check)
        queue._ask_stop(job_id)
        return execution

    monkeypatch.setattr(queue._identity, "begin", start_and_stop)
    (job,) = claim(queue)
    assert queue.withdrawn([job], {}) == [job]


def test_a_stop_of_a_job_that_is_not_ours_is_not_kept_for_later(producer, queue):
    (job_id,) = submit(producer, "a")
    queue._ask_stop(job_id)
    (job,) = claim(queue)
    assert queue.withdrawn([job], {}) == []


def test_a_job_that_was_canceled_between_claim_and_start_is_not_started(connection, producer, queue, monkeypatch):
    (job_id,) = submit(producer, "a")
    backlog = queue._claiming.backlogs["generate"]
    real = backlog.claim

    def claim_then_cancel(*args, **options):
        claimed = real(*args, **options)
        Job.fetch(job_id, connection, JSONSerializer).cancel()
        return claimed

    monkeypatch.setattr(backlog, "claim", claim_then_cancel)
    assert claim(queue) == []
    assert places(connection, job_id) == ["canceled"]


@pytest.mark.parametrize("when", ["_read", "_may_start"])
@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_job_that_was_withdrawn_while_it_was_being_started_is_not_started(
    connection, producer, queue, monkeypatch, how, when
):
    withdrawn, job_id = submit(producer, "a", "b")
    real = getattr(queue._starter, when)

    def look_then_sleep(*args, **words):
        found = real(*args, **words)
        with suppress(NoSuchJobError):
            job = Job.fetch(withdrawn, connection, JSONSerializer)
            if job.get_status() == "queued":
                getattr(job, how)()
        return found

    monkeypatch.setattr(queue._starter, when, look_then_sleep)
    assert [job.job_id for job in claim(queue)] == [job_id]
    assert places(connection, withdrawn) == (["canceled"] if how == "cancel" else [])
    assert connection.hget(f"rq:job:{withdrawn}", "status") == (b"canceled" if how == "cancel" else None)
    assert not list(connection.scan_iter(f"rq:execution*:{withdrawn}*"))


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_job_that_is_withdrawn_while_it_is_being_refused_holds_up_no_claim(
    connection, producer, plain, queue, monkeypatch, how
):
    plain.enqueue("os.getcwd", job_id="odd")
    (job_id,) = submit(producer, "a")
    real = queue._ender.fail

    def withdrawn_first(handle, error):
        getattr(Job.fetch("odd", connection, JSONSerializer), how)()
        real(handle, error)

    monkeypatch.setattr(queue._ender, "fail", withdrawn_first)
    assert [job.job_id for job in claim(queue)] == [job_id]
    assert places(connection, "odd") == (["canceled"] if how == "cancel" else [])
    assert not list(connection.scan_iter("rq:execution*:odd*"))
    assert [execution.job_id for execution in queue._identity.executions.values()] == [job_id]


def test_an_id_that_stands_in_the_queue_twice_runs_once(connection, producer, queue):
    (job_id,) = submit(producer, "a")
    connection.rpush("rq:queue:generate", job_id)
    (job,) = claim(queue)
    assert claim(queue) == []
    queue.finish(job, RESULT)
    assert claim(queue) == []
    assert places(connection, job_id) == ["finished"]
    assert connection.xlen(f"rq:results:{job_id}") == 1


@pytest.mark.parametrize("junk", [b"\xff\xfe", b"a b", b"x:y", b"new\nline", b"", "é".encode()])
def test_ids_that_rq_does_not_allow_are_dropped_and_hold_up_nothing(connection, producer, queue, junk):
    connection.rpush("rq:queue:generate", junk)
    connection.rpush("rq:queue:generate:intermediate", junk)
    connection.zadd("rq:wip:generate", {junk: 1, junk + b":" + junk: 2})
    (job_id,) = submit(producer, "a")
    queue.recover()
    assert [job.job_id for job in claim(queue)] == [job_id]


def test_a_timed_out_jobs_text_is_kept_and_rq_retries_it_if_it_may(connection, plain, queue):
    request = {"agent_id": "a", "prompt": "x"}
    job_id = plain.enqueue(TASK_PATH, request=request, retry=Retry(max=1)).id
    (job,) = claim(queue)
    queue.fail(job, GenerationTimedOut("late"), "so far")
    assert places(connection, job_id) == ["generate"]
    (job,) = claim(queue)
    queue.fail(job, GenerationTimedOut("late"), "so far")
    assert places(connection, job_id) == ["failed"]
    failed = Job.fetch(job_id, connection, JSONSerializer)
    assert failed.meta["partial"] == "so far"
    assert failed.latest_result().exc_string == "GenerationTimedOut: late"


def test_a_partial_text_is_not_written_into_the_record_of_a_job_deleted_meanwhile(
    connection, producer, queue, monkeypatch
):
    (job_id,) = submit(producer, "a")
    (job,) = claim(queue)
    real = queue._ownership.of

    def look_then_sleep(handle):
        found = real(handle)
        connection.delete(f"rq:job:{job_id}")
        return found

    monkeypatch.setattr(queue._ownership, "of", look_then_sleep)
    with suppress(OwnershipLost, RedisUnavailable):
        queue.fail(job, GenerationTimedOut("late"), "so far")
    assert not connection.exists(f"rq:job:{job_id}")


def test_the_agents_of_waiting_jobs_of_all_queues_are_known(redis_url, producer):
    settings = read_settings({"redis_url": redis_url, "queues": "high,generate"})
    with open_queue(settings, redis_url) as opened:
        queue = opened.rq_queue
        submit(producer, "a", "b", "a")
        producer.submit(agent_id="c", prompt="x", queue="high")
        assert queue.waiting_agents() == frozenset()
        assert [job.request.agent_id for job in claim(queue)] == ["c", "a", "b"]
        assert queue.waiting_agents() == {"a"}
        assert queue.waiting_agents() is queue.waiting_agents()
        producer.submit(agent_id="d", prompt="x", queue="high")
        queue.claim(8, Busy(writing=frozenset({"a", "d"})))
        assert queue.waiting_agents() == {"a", "d"}


def test_queues_are_served_in_the_order_the_worker_lists_them(redis_url, producer):
    def enqueue(agent_id, queue):
        return producer.submit(agent_id=agent_id, prompt="x", queue=queue).job_id

    low, high, low_too, high_too = (
        enqueue(agent_id, queue) for agent_id, queue in zip("abcd", ("generate", "high") * 2, strict=True)
    )
    settings = read_settings({"redis_url": redis_url, "queues": "high,generate"})
    with open_queue(settings, redis_url) as opened:
        assert [job.job_id for job in claim(opened.rq_queue, limit=3)] == [high, high_too, low]
        late = enqueue("e", "high")
        assert [job.job_id for job in claim(opened.rq_queue)] == [late, low_too]


def test_an_agents_job_in_a_higher_queue_goes_first_and_its_other_one_waits(redis_url, producer):
    producer.submit(agent_id="a", prompt="x")
    urgent = producer.submit(agent_id="a", prompt="x", queue="high")
    settings = read_settings({"redis_url": redis_url, "queues": "high,generate"})
    with open_queue(settings, redis_url) as opened:
        assert [job.job_id for job in claim(opened.rq_queue)] == [urgent.job_id]


def test_a_job_that_is_retried_at_once_comes_before_its_agents_next_one(plain, queue):
    request = {"agent_id": "a", "prompt": "x"}
    first, second = (plain.enqueue(TASK_PATH, request=request, retry=Retry(max=1)).id for _ in range(2))
    for job_id in (first, first, second):
        (job,) = claim(queue)
        assert job.job_id == job_id
        queue.fail(job, GenerationTimedOut("late"))


def test_a_failed_turn_does_not_keep_the_next_one_waiting(plain, queue):
    request = {"agent_id": "a", "prompt": "x", "context": "append"}
    first, second = (plain.enqueue(TASK_PATH, request=request, retry=Retry(max=1, interval=60)).id for _ in range(2))
    (job,) = claim(queue)
    assert job.job_id == first
    queue.fail(job, GenerationTimedOut("late"))
    assert [job.job_id for job in claim(queue)] == [second]


def test_a_job_that_was_canceled_just_before_its_end_stays_canceled(connection, producer, queue):
    (job_id,) = submit(producer, "a")
    (job,) = claim(queue)
    Job.fetch(job_id, connection, JSONSerializer).cancel()
    with pytest.raises(OwnershipLost):
        queue.finish(job, RESULT)
    assert connection.hget(f"rq:job:{job_id}", "status") == b"canceled"
    assert "finished" not in places(connection, job_id)


def test_a_claim_in_doubt_is_put_back_also_when_the_lease_ran_out_meanwhile(connection, producer, queue):
    """Redis was away for longer than the lease: nobody else has the queue, and the next claim must not come first."""
    (job_id,) = submit(producer, "a")
    connection.lmove("rq:queue:generate", "rq:queue:generate:intermediate")
    connection.delete(LEASE_KEY.format(queue="generate"))
    assert queue.recover() == 1
    assert places(connection, job_id) == ["generate"]


def test_what_a_claim_left_that_broke_off_goes_back_before_anything_else_is_claimed(
    connection, producer, queue, monkeypatch
):
    first, second, third = submit(producer, "a", "b", "b")
    real = queue._starter.start

    def start(name, job_id):
        if job_id == second:
            raise RedisConnectionError("gone")
        return real(name, job_id)

    monkeypatch.setattr(queue._starter, "start", start)
    assert [job.job_id for job in claim(queue)] == [first]
    monkeypatch.undo()
    assert [job.job_id for job in queue.claim(8, Busy(writing=frozenset({"a"})))] == [second]
    assert places(connection, third) == ["generate"]


def test_a_heartbeat_does_not_bring_back_the_execution_of_a_run_before(connection, plain, queue, monkeypatch):
    """A job that failed and was claimed again while the heartbeat was on its way through the list."""
    request = {"agent_id": "a", "prompt": "x"}
    for name, agent in (("other", "b"), ("retried", "a")):
        plain.enqueue(TASK_PATH, request=request | {"agent_id": agent}, job_id=name, retry=Retry(max=1))
    jobs = {job.job_id: job for job in claim(queue)}
    real = queue._pulse.beat_execution

    def beat_then_look_away(handle):
        real(handle)
        if handle.job.id == "other":
            queue.fail(jobs["retried"], GenerationTimedOut("late"))
            assert [job.job_id for job in claim(queue)] == ["retried"]

    monkeypatch.setattr(queue._pulse, "beat_execution", beat_then_look_away)
    queue.beat()
    assert len(list(connection.scan_iter("rq:execution:retried:*"))) == 1


@pytest.mark.parametrize("fell_asleep_after", ["lease", "worker"])
def test_a_heartbeat_that_slept_half_way_brings_back_nothing_the_next_worker_has_tidied_up(
    redis_url, connection, producer, queue, monkeypatch, fell_asleep_after
):
    (job_id,) = submit(producer, "a")
    claim(queue)

    def then_sleep(act):
        def acting(*args):
            done = act(*args)
            connection.delete(LEASE_KEY.format(queue="generate"))  # it ran out
            with open_queue(read_settings({"redis_url": redis_url}), redis_url) as successor:
                assert successor.rq_queue.recover() == 1
                (job,) = claim(successor.rq_queue)
                successor.rq_queue.finish(job, RESULT)
            connection.delete(f"rq:job:{job_id}")  # the result's time to live has passed
            return done

        return acting

    asleep = {"lease": (queue._lease, "renew"), "worker": (queue._identity, "beat")}[fell_asleep_after]
    monkeypatch.setattr(*asleep, then_sleep(getattr(*asleep)))
    queue.beat()
    assert not list(connection.scan_iter("rq:execution*"))
    assert not connection.exists(f"rq:job:{job_id}")
    assert all(connection.ttl(key) > 0 for key in connection.scan_iter("rq:worker:*"))


def test_a_heartbeat_does_not_bring_back_the_record_of_a_running_job_that_was_deleted(connection, producer, queue):
    (job_id,) = submit(producer, "a")
    claim(queue)
    connection.delete(f"rq:job:{job_id}")
    queue.beat()
    assert not connection.exists(f"rq:job:{job_id}")


def test_the_worker_record_tells_what_it_serves_also_after_the_server_has_lost_it(connection, queue):
    (key,) = connection.keys("rq:worker:stoker-*[^s]")
    queue.announce("model m, rows batched")
    for _ in range(2):
        assert queue.beat()
        assert connection.hget(key, "stoker_serves") == b"model m, rows batched"
        connection.delete(key)


def test_a_heartbeat_shows_the_worker_again_after_the_server_has_lost_it(connection, queue):
    connection.delete(queue._identity.key, "rq:workers", "rq:workers:generate")
    connection.hincrby(queue._identity.key, "successful_job_count", 1)
    queue.beat()
    (shown,) = WorkerOfRq.all(connection)
    assert shown.name == queue._identity.name
    assert shown.birth_date is not None
    assert connection.smembers("rq:workers:generate") == {queue._identity.key.encode()}
    assert connection.ttl(queue._identity.key) > 0


@pytest.mark.parametrize("last", ["beat", "settle", "start", "finish", "fail"])
def test_what_a_worker_writes_into_its_record_after_that_has_expired_does_not_stay_for_ever(
    connection, producer, queue, monkeypatch, last
):
    """Whatever it does last before it is killed."""
    submit(producer, "a")
    jobs = [] if last == "start" else claim(queue)
    queue._identity.set_state("idle")
    connection.delete(queue._identity.key)

    def gone(*args):
        raise RedisConnectionError("gone")

    monkeypatch.setattr(queue._connection, "expire", gone)
    acts = {
        "beat": queue.beat,
        "settle": queue._identity.settle_state,
        "start": lambda: claim(queue),
        "finish": lambda: queue.finish(jobs[0], RESULT),
        "fail": lambda: queue.fail(jobs[0], ValueError("x")),
    }
    with suppress(RedisConnectionError):
        acts[last]()
    assert connection.ttl(queue._identity.key) != -1


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_giving_back_a_job_that_was_withdrawn_leaves_nothing_of_its_execution(connection, producer, queue, how):
    (job_id,) = submit(producer, "a")
    (job,) = claim(queue)
    getattr(Job.fetch(job_id, connection, JSONSerializer), how)()
    queue.give_back([job], counts_as_attempt=False)
    assert places(connection, job_id) == (["canceled"] if how == "cancel" else [])
    assert not list(connection.scan_iter("rq:execution*"))


@pytest.mark.parametrize("let_go", ["drop", "give_back"])
def test_a_deposed_worker_does_not_touch_what_the_next_one_has_counted(connection, producer, queue, let_go):
    (job_id,) = submit(producer, "a")
    (job,) = claim(queue)
    queue._requeue(InFlight(job_id, "generate", job.handle.execution), counts_as_attempt=True)  # the next one's
    taken_over(connection)
    queue.drop(job) if let_go == "drop" else queue.give_back([job], counts_as_attempt=False)
    assert connection.hget(f"rq:job:{job_id}", FIELD_ATTEMPTS) == b"1"
    assert places(connection, job_id) == ["generate"]


@pytest.mark.parametrize("then", ["runs it", "has left again"])
def test_a_worker_that_slept_between_claim_and_start_does_not_start_what_another_has_taken_over(
    connection, producer, queue, monkeypatch, then
):
    (job_id,) = submit(producer, "a")
    real = queue._starter._read

    def read_then_sleep(job_id):
        found = real(job_id)
        connection.lmove("rq:queue:generate:intermediate", "rq:queue:generate")
        taken_over(connection, and_left=then == "has left again")
        return found

    monkeypatch.setattr(queue._starter, "_read", read_then_sleep)
    assert claim(queue) == []
    assert places(connection, job_id) == ["generate"]
    assert connection.hget(f"rq:job:{job_id}", "status") == b"queued"
    assert not list(connection.scan_iter("rq:execution*"))
    assert not queue._identity.executions
    monkeypatch.undo()
    assert claim(queue) == []


def test_a_job_starts_also_when_the_lease_is_renewed_in_between(connection, producer, queue, monkeypatch):
    (job_id,) = submit(producer, "a")
    real = queue._starter._may_start
    renewals = iter((True, False))

    def look_then_renew(**words):
        may = real(**words)
        if next(renewals):
            queue._lease.renew()
        return may

    monkeypatch.setattr(queue._starter, "_may_start", look_then_renew)
    assert [job.job_id for job in claim(queue)] == [job_id]
    assert places(connection, job_id) == ["wip"]
    assert len(queue._identity.executions) == len(list(connection.scan_iter("rq:execution:*"))) == 1
    assert connection.hget(queue._identity.key, "state") == b"busy"


def test_progress_of_a_job_that_has_just_ended_is_not_written_into_its_record(connection, producer, queue):
    submit(producer, "a")
    (job,) = claim(queue)
    queue.withdrawn([job], {job.job_id: 3})
    assert connection.hget(f"rq:job:{job.job_id}", "stoker_tokens") == b"3"
    queue.finish(job, RESULT)
    queue.withdrawn([job], {job.job_id: 4})
    assert not connection.hexists(f"rq:job:{job.job_id}", "stoker_tokens")


@pytest.mark.parametrize("retry", [None, Retry(max=1), Retry(max=1, interval=1)])
@pytest.mark.parametrize("where", ["of", "watch"])
@pytest.mark.parametrize("end", ["fail", "stopped"])
def test_a_take_over_between_looking_and_writing_undoes_a_failure_too(
    connection, plain, queue, monkeypatch, retry, where, end
):
    plain.enqueue(TASK_PATH, request={"agent_id": "a", "prompt": "x"}, job_id="job", retry=retry)
    (job,) = claim(queue)
    real = getattr(queue._ownership, where)

    def look_then_sleep(*arguments):
        found = real(*arguments)
        taken_over(connection)
        return found

    monkeypatch.setattr(queue._ownership, where, look_then_sleep)
    with pytest.raises((OwnershipLost, RedisUnavailable)):  # for the second the finaliser tries again, and looks
        queue.fail(job, ValueError("late")) if end == "fail" else queue.stopped(job)
    assert places(connection, "job") == ["wip"]
    assert connection.hget("rq:job:job", "status") == b"started"
    assert not connection.exists("rq:results:job")


@pytest.mark.parametrize(
    ("note", "refusing"),
    [
        (EndedNote("failed", ["child"]), "rq:job:parent:dependents"),
        (EndedNote("finished", rate_limit="limited"), "rq:rl:limited"),
    ],
)
def test_what_cannot_follow_an_end_does_not_keep_the_worker_from_claiming(connection, queue, producer, note, refusing):
    connection.hset("rq:job:parent", "status", note.end)
    connection.set(refusing, "of another type than RQ's")
    connection.hset(ENDED_KEY.format(queue="generate"), "parent:execution", note.to_json())
    (job_id,) = submit(producer, "a")

    queue.recover()

    assert not connection.exists(ENDED_KEY.format(queue="generate"))
    assert [job.job_id for job in claim(queue)] == [job_id]
