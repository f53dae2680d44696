"""Several workers on one queue: each agent has one home, its jobs stay in order, and a dead worker's jobs go on."""

import time

import pytest
from rq.job import Job
from rq.serializers import JSONSerializer
from tests.worker.queue.ends import fail, finish, give_back
from tests.worker.queue.looking import places
from tests.worker.queue.members import TTL_S, claim, claim_within, die, home_of, ids, impatient, recovered, run

from stoker_shared.errors import JobFailed, OwnershipLost, QueueHeld
from stoker_shared.wire import AGENT_TASK_PATH, CLAIMED_KEY, FENCE_KEY, HOMES_KEY, LEASE_KEY, MEMBERS_KEY, TASK_PATH
from stoker_worker.ports import Busy

pytestmark = pytest.mark.server

HOMES = HOMES_KEY.format(queue="generate")


def agent_job(plain, job_id=None, **request):
    plain.enqueue(AGENT_TASK_PATH, request=request, job_id=job_id)


def test_each_agent_is_at_home_with_the_worker_that_claims_its_first_job(connection, join, submit):
    a, b = join("a"), join("b")
    first, second, third = submit("x", "y", "x")
    assert ids(claim(a, limit=1)) == [first]
    assert ids(claim(b)) == [second]
    assert (home_of(connection, "x"), home_of(connection, "y")) == ("a -", "b -")
    run(a.in_flight())
    assert claim(b) == []
    assert ids(claim(a)) == [third]
    assert home_of(connection, "x") == "a ="


def test_jobs_without_an_agent_are_anybodys(join, submit):
    a, b = join("a"), join("b")
    one, two = submit(None, None)
    assert ids(claim(a, limit=1)) == [one]
    assert ids(claim(b, limit=1)) == [two]


def test_jobs_that_others_took_are_not_looked_for_and_the_queue_is_not_read_anew(join, submit, monkeypatch):
    a, b = join("a"), join("b")
    submit(*(f"agent {n}" for n in range(300)))
    assert b.claim(0, Busy()) == []
    view = b._claim_order.claimers["generate"]._view
    while view.has_unread:
        b.claim(0, Busy())
    monkeypatch.setattr(view, "_start_over", lambda: pytest.fail("read anew"))
    for _ in range(6):
        run(claim(a))
        run(claim(b))
    (new,) = submit("new")
    while new not in (found := ids(claim(b))):
        assert found
        run(b.in_flight())


def test_an_agent_in_flight_is_not_claimed_by_another_though_it_waits_in_another_queue(connection, producer, join):
    a, b = join("a", queues="high,generate"), join("b")
    producer.submit(agent_id="x", prompt="x")
    later = producer.submit(agent_id="x", prompt="x", queue="high").job_id
    assert len(claim(b)) == 1
    assert claim(a) == []
    run(b.in_flight())
    b.sign_off()
    assert ids(claim_within(a)) == [later]
    assert connection.hgetall(HOMES) == connection.hgetall(HOMES_KEY.format(queue="high")) == {b"x": b"a b"}


def test_a_second_worker_of_the_same_name_is_refused_and_names_the_first(join):
    join("a")
    with pytest.raises(QueueHeld, match=r"the name 'a' is held by worker stoker-a-"):
        join("a")


def test_a_dead_workers_jobs_go_on_elsewhere_in_order_and_before_its_agents_later_jobs(connection, join, submit):
    a, b = join("a"), impatient(join("b"))
    first, other = submit("x", "y")
    claim(a)
    later = submit("x", "y")
    assert claim(b) == []
    die(a)
    assert recovered(b) == 2
    assert ids(claim_within(b)) == [first]  # one after another: they were lost
    run(b.in_flight())
    assert ids(claim_within(b)) == [other]
    run(b.in_flight())
    assert ids(claim_within(b)) == later
    assert set(connection.hgetall(MEMBERS_KEY)) == {b"b"}
    assert home_of(connection, "x") == "b ="


def test_a_worker_that_slept_is_deposed_by_whoever_puts_its_jobs_back(connection, join, submit):
    a, b = join("a"), impatient(join("b"))
    (job_id,) = submit("x")
    (slept,) = claim(a)
    die(a)
    assert recovered(b) == 1
    assert not a.beat()
    assert not slept.is_ours()
    with pytest.raises(OwnershipLost):
        finish(slept, {})
    give_back([slept], counts_as_attempt=False)
    assert claim(a) == []
    (again,) = claim_within(b)
    assert (again.job_id, again.attempt) == (job_id, 2)
    finish(again, {})
    assert places(connection, job_id) == ["finished"]


def test_a_worker_that_slept_for_longer_than_its_number_is_kept_ends_nothing(connection, join, submit):
    a, b = join("a"), impatient(join("b"))
    submit("x")
    (slept,) = claim(a)
    die(a)
    assert recovered(b) == 1
    run(claim_within(b))
    connection.delete(FENCE_KEY.format(member="a"))
    with pytest.raises(OwnershipLost):
        slept.finish({})
    assert Job.fetch(slept.job_id, connection, JSONSerializer).return_value() == {}
    assert connection.xlen(f"rq:results:{slept.job_id}") == 1
    assert a.recover() == 0


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
    assert job.is_ours()


def test_ids_that_a_dead_worker_had_claimed_and_not_started_go_back_without_an_attempt(connection, join, submit):
    a, b = join("a"), impatient(join("b"))
    (job_id,) = submit("x")
    connection.lmove("rq:queue:generate", CLAIMED_KEY.format(queue="generate", member="a"))
    connection.hset(HOMES, "x", "a -")
    assert claim(b) == []
    die(a)
    assert recovered(b) == 1
    [job] = claim_within(b)
    assert (job.job_id, job.attempt) == (job_id, 1)


def test_the_same_name_finds_its_own_jobs_and_agents_again(join, submit):
    a = join("a")
    (job_id,) = submit("x")
    claim(a)
    a._lease.release()  # as if it had been killed: nothing else is cleared up
    again, other = join("a"), join("b")
    submit("x")
    assert again.recover() == 1
    assert claim(other) == []
    assert ids(claim(again)) == [job_id]


def test_a_job_with_the_whole_conversation_goes_to_another_worker_at_once_when_its_home_has_left(
    connection, join, submit
):
    a, b = join("a"), join("b", home_wait_s=600)
    submit("x")
    run(claim(a))
    (job_id,) = submit("x")
    assert claim(b) == []
    a.sign_off()
    [job] = claim_within(b)
    assert (job.job_id, job.former_home) == (job_id, "a")
    assert home_of(connection, "x") == "b a"
    finish(job, {})
    assert home_of(connection, "x") == "b ="


def test_a_job_that_continues_what_a_worker_has_stored_waits_for_that_worker(join, submit):
    a, b = join("a"), join("b", home_wait_s=600)
    submit("x", context="append")
    run(claim(a))
    (job_id,) = submit("x", context="append")
    claim(b)
    a.sign_off()
    time.sleep(1.2)  # longer than b waits between two looks
    assert claim(b) == []
    assert ids(claim_within(join("a"))) == [job_id]


def test_a_job_that_continues_what_is_away_for_too_long_fails_and_names_the_worker(connection, producer, join, submit):
    a, b = join("a"), join("b", home_wait_s=0.5)
    submit("x", context="append")
    run(claim(a))
    (lost,) = submit("x", context="append")
    (beside,) = submit("y", context="append")
    a.sign_off()
    assert ids(claim_within(b)) == [beside]
    run(b.in_flight())
    end = time.monotonic() + 20
    while connection.hget(f"rq:job:{lost}", "status") != b"failed":
        assert claim(b) == []
        assert time.monotonic() < end
    with pytest.raises(JobFailed, match=r"AgentElsewhere: .*'x' is in store 'a' of worker 'a', which is away"):
        producer.result(lost, timeout_s=1)
    assert home_of(connection, "x") == "a ="  # it is found again when that worker is back
    (full,) = submit("x")
    assert ids(claim_within(b)) == [full]


def test_a_failed_job_leaves_the_memory_where_it_was(connection, join, submit):
    a, b = join("a"), join("b", home_wait_s=600)
    submit("x")
    run(claim(a))
    a.sign_off()
    submit("x")
    [job] = claim_within(b)
    fail(job, ValueError("x"), may_retry=False)
    assert home_of(connection, "x") == "b a"
    (continues,) = submit("x", context="append")
    assert claim(b) == []
    assert home_of(connection, "x") == "- a"
    assert ids(claim_within(join("a"))) == [continues]


def test_an_agent_that_a_fork_would_make_exists_only_once(connection, producer, plain, join, submit):
    a, b = join("a"), join("b")
    submit("x", "y")
    run(claim(a, limit=1) + claim(b))
    assert (home_of(connection, "x"), home_of(connection, "y")) == ("a =", "b =")
    agent_job(plain, agent_id="x", action="fork", target="y", job_id="taken")
    assert claim(a) == []
    with pytest.raises(JobFailed, match="AgentElsewhere: agent 'y' exists already, at worker 'b'"):
        producer.result("taken", timeout_s=1)
    agent_job(plain, agent_id="x", action="fork", target="new")
    [job] = claim_within(a)
    finish(job, {})
    assert home_of(connection, "new") == "a ="


def test_a_forgotten_agent_has_no_home(connection, plain, join, submit):
    a = join("a")
    submit("x")
    run(claim(a))
    agent_job(plain, agent_id="x", action="forget")
    run(claim(a))
    assert connection.hgetall(HOMES) == {}


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
    assert not first.is_ours()
    first.drop()
    first.release()
    [second] = claim_within(b)
    assert second.request.prompt == "two"
    finish(second, {})
    assert Job.fetch("same", connection, JSONSerializer).get_status() == "finished"


def test_a_full_worker_gives_up_an_agent_that_waits_to_one_that_has_room(connection, join, submit, monkeypatch):
    monkeypatch.setattr("stoker_worker.queue.moving.PREFILL_S", 0.6)
    a, b = join("a"), join("b")
    submit("x", "y")
    run(claim(a))
    a.claim(0, Busy())
    busy, moves = submit("y", "x")
    assert ids(claim(a, limit=1)) == [busy]  # and it goes on for long
    end = time.monotonic() + 20
    found = []
    while not found:
        assert time.monotonic() < end
        a.claim(0, Busy(writing=frozenset({"y"})))
        found = claim(b)
        time.sleep(0.02)
    assert (ids(found), found[0].former_home) == ([moves], "a")
    assert home_of(connection, "x") == "b a"


def test_a_worker_that_drains_gives_up_its_agents_as_their_jobs_end(join, submit):
    a, b = join("a"), join("b")
    submit("x", "y")
    run(claim(a))
    (running,) = submit("x")
    assert ids(claim(a)) == [running]
    later, idle = submit("x", "y")
    a.leave()
    found = []
    end = time.monotonic() + 20
    while idle not in ids(found):
        assert time.monotonic() < end
        found = claim(b)
        a.leave()
    assert later not in ids(found)
    run(a.in_flight())
    while later not in ids(b.in_flight()):
        assert time.monotonic() < end
        claim(b)
        a.leave()


def test_a_worker_whose_lease_had_run_out_for_a_moment_is_seen_to_drain_all_the_same(connection, join):
    a, b = join("a"), join("b")
    connection.delete(LEASE_KEY.format(member="a"))
    a.leave()
    assert a.beat()
    a.leave()
    b._members.look()
    assert b._members.others["a"].is_leaving


def test_one_worker_of_several_has_the_duties_of_a_queue(join):
    b, a = join("b", queues="generate,low"), join("a")
    for queue in (a, b):
        queue.claim(0, Busy())
        queue._members.look()
    assert a._members.duties() == ["generate"]
    assert b._members.duties() == ["low"]
    a.sign_off()
    b._members.look()
    assert b._members.duties() == ["generate", "low"]


def test_the_memory_is_known_by_the_store_not_by_the_workers_name(connection, producer, join, submit):
    a = join("mac", store="disk-1")
    submit("x", context="append")
    run(claim(a))
    assert home_of(connection, "x") == "mac disk-1"
    a.sign_off()
    (lost,) = submit("x", context="append")
    other = join("mac", store="disk-2")
    assert claim(other) == []
    with pytest.raises(JobFailed, match=r"AgentElsewhere: .* in store 'disk-1' of worker 'mac', which is away"):
        producer.result(lost, timeout_s=1)
    (waits,) = submit("x", context="append")
    again = join("mac2", store="disk-1")
    assert claim(other) == []
    assert ids(claim_within(again)) == [waits]


def test_a_new_agent_whose_job_was_given_back_unseen_keeps_its_order(join, submit, monkeypatch):
    a, b = join("a"), join("b")
    first, second = submit("x", "x")
    jobs = claim(a, limit=1)
    assert claim(b) == []
    view = b._claim_order.claimers["generate"]._view
    monkeypatch.setattr(view, "_look", lambda: None)  # b has looked, and sleeps
    give_back(jobs, counts_as_attempt=False)
    a.sign_off()
    b._members.look()
    for claimer in b._claim_order.claimers.values():
        claimer.look_around({}, [])
    assert claim(b) == []
    monkeypatch.undo()
    assert ids(claim_within(b)) == [first]
    run(b.in_flight())
    assert ids(claim_within(b)) == [second]


def test_agents_in_a_queue_that_their_home_serves_no_more_are_free(producer, join, submit):
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
