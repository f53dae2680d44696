"""Several workers on one queue: an agent's jobs stay in order, and a dead worker's jobs go on."""

import time

import pytest
from rq.job import Job
from rq.serializers import JSONSerializer
from tests.worker.queue.ends import finish, give_back
from tests.worker.queue.looking import is_ours, places
from tests.worker.queue.members import TTL_S, claim, claim_within, die, ids, impatient, recovered, run

from stoker_shared.errors import OwnershipLost
from stoker_shared.wire import FENCE_KEY, FIELD_ATTEMPTS, LEASE_KEY, MEMBERS_KEY, TASK_PATH

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_an_agent_in_flight_is_claimed_by_nobody_else_whichever_queue_its_next_job_is_in(producer, join):
    a, b = join("a", queues="high,generate"), join("b")
    producer.submit(agent_id="x", prompt="x")
    assert len(claim(b)) == 1
    later = producer.submit(agent_id="x", prompt="x", queue="high").job_id
    assert claim(a) == []
    run(b.in_flight())
    assert ids(claim_within(a)) == [later]
    last = producer.submit(agent_id="x", prompt="x").job_id
    assert claim(b) == []
    run(a.in_flight())
    assert ids(claim_within(b)) == [last]


def test_a_dead_workers_jobs_go_on_elsewhere_in_order_and_before_its_agents_later_jobs(connection, join, submit):
    a, b = join("a"), impatient(join("b"))
    first, other = submit("x", "y")
    claim(a)
    later = submit("x", "y")
    assert claim(b) == []
    die(a)
    assert recovered(b) == 2
    assert ids(claim_within(b)) == [first, other]
    run(b.in_flight())
    assert ids(claim_within(b)) == later
    assert set(connection.hgetall(MEMBERS_KEY)) == {b"b"}


def test_a_worker_that_dies_is_noticed_also_while_a_model_loads(join, submit):
    a, b = join("a"), impatient(join("b"))
    submit("x")
    claim(a)
    die(a)
    end = time.monotonic() + 20
    while not b.has_dead():  # as the fetcher does before it claims
        assert time.monotonic() < end, "not noticed"
        b.next_agents(1)
        time.sleep(0.02)
    assert b.recover() == 1


@pytest.mark.parametrize("for_longer_than_its_number_is_kept", [False, True])
def test_a_worker_that_slept_is_deposed_by_whoever_puts_its_jobs_back(
    connection, join, submit, for_longer_than_its_number_is_kept
):
    a, b = join("a"), impatient(join("b"))
    (job_id,) = submit("x")
    (slept,) = claim(a)
    die(a)
    assert recovered(b) == 1
    if for_longer_than_its_number_is_kept:
        connection.delete(FENCE_KEY.format(member="a"))
    else:
        assert not a.beat()
        assert not is_ours(slept)
        assert claim(a) == []
    with pytest.raises(OwnershipLost):
        finish(slept, {})
    give_back([slept], counts_as_attempt=False)
    (again,) = claim_within(b)
    assert (again.job_id, again.attempt) == (job_id, 2)
    finish(again, {})
    with pytest.raises(OwnershipLost):
        slept.finish({})
    assert a.recover() == 0
    assert places(connection, job_id) == ["finished"]
    assert connection.xlen(f"rq:results:{job_id}") == 1


def test_leases_that_ran_out_while_redis_was_away_cost_no_worker_its_name(connection, join, submit):
    a, b = join("a"), impatient(join("b"))
    submit("x")
    (job,) = claim(a)
    claim(b)
    time.sleep(2 * TTL_S)
    connection.delete(*connection.keys("stoker:holder:*"))  # Redis was away for so long, and nobody could beat
    assert b.recover() == 0
    assert a.beat()
    time.sleep(2 * TTL_S)
    assert b.recover() == 0
    assert b.beat()
    assert is_ours(job)


def test_an_id_that_runs_elsewhere_is_not_started_a_second_time(connection, plain, join):
    a, b = join("a"), join("b")
    plain.enqueue(TASK_PATH, request={"prompt": "one"}, job_id="same")
    [first] = claim(a)
    connection.rpush("rq:queue:generate", "same")  # the same delivery
    assert claim(b) == []
    assert connection.llen("rq:queue:generate") == 0
    plain.enqueue(TASK_PATH, request={"prompt": "two"}, job_id="same")
    assert claim(b) == []
    assert places(connection, "same") == ["generate", "wip"]
    assert not is_ours(first)
    first.drop()
    first.release()
    [second] = claim_within(b)
    assert second.request.prompt == "two"
    finish(second, {})
    assert Job.fetch("same", connection, JSONSerializer).get_status() == "finished"


def test_no_job_waits_for_a_quarantined_one_whose_id_runs_elsewhere(connection, plain, join, submit, monkeypatch):
    monkeypatch.setattr("stoker_worker.queue.claim._QUARANTINED_WAITS_S", 0)
    a, b = join("a"), join("b")  # of the two, `a` stops for quarantined jobs
    plain.enqueue(TASK_PATH, request={"prompt": "one"}, job_id="same")
    connection.hset("rq:job:same", FIELD_ATTEMPTS, 2)
    claim_within(b)
    plain.enqueue(TASK_PATH, request={"prompt": "two"}, job_id="same")
    waits = submit("x")
    assert ids(claim(a)) == waits


def test_a_worker_whose_lease_had_run_out_for_a_moment_is_seen_to_drain_all_the_same(connection, join):
    a, b = join("a"), join("b")
    connection.delete(LEASE_KEY.format(member="a"))
    a.leave()
    assert a.beat()
    a.leave()
    b._members.look()
    assert b._members.others["a"].is_leaving


def test_jobs_in_a_queue_that_their_worker_serves_no_more_go_on_elsewhere(producer, join, submit):
    a, b = join("a", queues="low,generate"), join("b", queues="low")
    [running] = [producer.submit(agent_id="x", prompt="x", queue="low").job_id]
    assert ids(claim(a)) == [running]
    later = producer.submit(agent_id="x", prompt="x", queue="low").job_id
    a._lease.release()  # as if it had been killed
    again = join("a", queues="generate")
    assert claim(b) == []  # not before its jobs are back
    assert again.recover() == 1
    assert ids(claim_within(b)) == [running]
    run(b.in_flight())
    assert ids(claim_within(b)) == [later]


def test_jobs_that_a_dead_worker_of_rqs_own_made_ready_are_enqueued_whichever_worker_schedules(connection, plain, join):
    z = join("z")
    z.tidy()  # takes the scheduler's lock, and is not the first by name
    a = join("a")
    job = plain.enqueue(TASK_PATH, request={"prompt": "x"})
    connection.delete("rq:queue:generate")
    connection.hset(job.key, "status", "ready_to_enqueue")
    connection.zadd("rq:ready:generate", {job.id: 1})
    for worker in (a, z):
        claim(worker)  # sees the other one
        worker._housekeeping._clean.make_due()
        worker.tidy()
    assert connection.lrange("rq:queue:generate", 0, -1) == [job.id.encode()]
