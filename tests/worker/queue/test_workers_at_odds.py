"""Several workers that see different queues, look late, stop early or lose replies: no job is stuck, no turn lost."""

import json
import time

import pytest
from redis.exceptions import ConnectionError as NoConnection
from tests.worker.queue.ends import fail, finish, give_back
from tests.worker.queue.looking import places
from tests.worker.queue.members import claim, claim_within, die, home_of, ids, impatient, recovered, run

from stoker_shared.errors import JobFailed, QueueHeld, RedisUnavailable
from stoker_shared.wire import AGENT_TASK_PATH, CLAIMED_KEY, HOMES_KEY, MEMBERS_KEY, SERVED_KEY, TASK_PATH
from stoker_worker.ports import Busy

pytestmark = pytest.mark.server


def view_of(queue):
    return queue._claim_order.claimers["generate"]._view


def until(found, *queues, within_s=20.0):
    """Lets the workers claim as their fetchers do, until it is so."""
    end = time.monotonic() + within_s
    while not found():
        assert time.monotonic() < end, "it never came to that"
        for queue in queues:
            claim(queue)
        time.sleep(0.02)


def status(connection, job_id):
    return (connection.hget(f"rq:job:{job_id}", "status") or b"").decode()


# --- queues that not all of them serve ---


def test_an_agents_job_in_a_queue_that_its_home_does_not_serve_goes_to_a_worker_that_does(
    connection, producer, join, submit
):
    a, b = join("a", queues="high,generate"), join("b")
    submit("x")
    run(claim(b))
    (job_id,) = submit("x", queue="high")
    until(lambda: job_id in ids(a.in_flight()), a, b)
    assert home_of(connection, "x") == "a b"


def test_a_busy_agent_is_given_up_for_such_a_queue_only_once_its_job_has_ended(join, submit):
    a, b = join("a", queues="high,generate"), join("b")
    submit("x")
    (running,) = claim(b)
    (job_id,) = submit("x", queue="high")
    end = time.monotonic() + 1.5  # longer than a asks twice
    while time.monotonic() < end:
        assert claim(a) == []
        claim(b)
    finish(running, {})
    until(lambda: job_id in ids(a.in_flight()), a, b)


def test_a_job_that_continues_what_no_worker_of_its_queue_has_fails_and_names_the_home(
    connection, producer, join, submit
):
    a, b = join("a", queues="high,generate", home_wait_s=600), join("b", home_wait_s=600)
    submit("x", context="append")
    run(claim(b))
    (job_id,) = submit("x", queue="high", context="append")
    until(lambda: status(connection, job_id) == "failed", a, b)
    with pytest.raises(JobFailed, match=r"AgentElsewhere: .*'x' is in store 'b' of worker 'b', which .* serve"):
        producer.result(job_id, timeout_s=1)
    assert home_of(connection, "x") == "b ="


def test_a_worker_of_several_queues_does_not_continue_an_older_turn_of_its_own(connection, producer, join, submit):
    a, b = join("a", queues="generate,low"), join("b")
    submit("x")
    run(claim(a))
    a._moving._homes.give_up({"x": True})
    submit("x")
    run(claim_within(b))  # the newer turn, which only the entry of this queue tells
    b.sign_off()
    (job_id,) = submit("x", queue="low", context="append")
    until(lambda: status(connection, job_id) == "failed", a)
    with pytest.raises(JobFailed, match=r"AgentElsewhere: .*'x' is in store 'b'"):
        producer.result(job_id, timeout_s=1)


# --- agents that are being made ---


def test_an_agent_that_a_fork_is_making_is_given_up_to_nobody(connection, plain, join, submit):
    a, b = join("a"), join("b")
    submit("x")
    run(claim(a))
    plain.enqueue(AGENT_TASK_PATH, request={"agent_id": "x", "action": "fork", "target": "y"})
    (fork,) = claim(a)
    (job_id,) = submit("y")
    a.leave()
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        assert claim(b) == []
        a.leave()
    finish(fork, {})
    assert home_of(connection, "y") == "a ="
    found = []
    end = time.monotonic() + 20
    while not found:
        assert time.monotonic() < end
        a.leave()
        found = ids(claim(b))
    assert found == [job_id]


def test_a_fork_that_fails_leaves_the_memory_of_its_target_known(connection, plain, join, submit):
    a = join("a")
    submit("x", "y")
    run(claim(a))
    a._moving._homes.give_up({"y": True})
    assert home_of(connection, "y") == "- a"
    plain.enqueue(AGENT_TASK_PATH, request={"agent_id": "x", "action": "fork", "target": "y"})
    (fork,) = claim(a)
    fail(fork, ValueError("it exists"), may_retry=False)
    assert home_of(connection, "y") == "a ="


# --- what a look does not see ---


def test_a_job_that_another_worker_took_and_put_back_between_two_looks_keeps_its_place(join, submit):
    a, b = join("a"), join("b")
    first, second = submit("x", "x")
    b.claim(0, Busy())
    view_of(b)._may_start_over.is_due()  # it has just read the queue anew, and will not do so again at once
    give_back(claim(a, limit=1), counts_as_attempt=False)
    a.sign_off()
    b._members.look()
    assert ids(claim_within(b)) == [first]
    run(b.in_flight())
    assert ids(claim_within(b)) == [second]


def test_a_claim_whose_reply_was_lost_costs_no_job_its_place(join, submit, monkeypatch):
    a, _ = join("a"), join("b")
    first, second = submit("x", "x")
    a.claim(0, Busy())
    view_of(a)._may_start_over.is_due()
    claimer = a._claim_order.claimers["generate"]
    do_claim = claimer._claim

    def lost(**options):
        do_claim(**options)
        raise NoConnection("the reply was lost")

    monkeypatch.setattr(claimer, "_claim", lost)
    with pytest.raises(Exception, match="reply was lost"):
        claim(a)
    monkeypatch.undo()
    assert ids(claim(a)) == [first]
    run(a.in_flight())
    assert ids(claim(a)) == [second]


@pytest.mark.parametrize("what", ["_moving", "_passing_on"])
def test_a_connection_that_is_lost_after_a_claim_leaves_no_job_in_flight_that_nobody_runs(
    join, submit, monkeypatch, what
):
    a, b = join("a"), join("b")
    assert claim(a) == claim(b) == []
    (job_id,) = submit("x")

    def lost(*args):
        raise NoConnection

    monkeypatch.setattr(getattr(a, what), "look_around", lost)
    assert ids(claim(a)) == ids(a.in_flight()) == [job_id]
    with pytest.raises(RedisUnavailable):
        claim(a)


def test_a_queue_is_not_read_anew_because_others_took_its_last_jobs(join, submit, monkeypatch):
    a, b = join("a"), join("b")
    submit(*["busy"] * 150, *(f"agent {n}" for n in range(20)))
    while not a.in_flight():
        claim(a, limit=1)
    b.claim(0, Busy())
    while b.has_unread():
        b.claim(0, Busy())
    while len(a.in_flight()) < 21:
        claim(a, limit=20)
    monkeypatch.setattr(view_of(b), "_start_over", lambda: pytest.fail("read anew"))
    (new,) = submit("new")
    assert ids(claim(b)) == [new]


def test_jobs_of_producers_without_notes_do_not_hold_up_those_behind_them(plain, join):
    a, b = join("a"), join("b")
    for n in range(200):
        plain.enqueue(TASK_PATH, request={"prompt": "x", "agent_id": f"agent {n}"})
    while len(a.in_flight()) < 200:
        claim(a, limit=200)
    for n in range(200):
        plain.enqueue(TASK_PATH, request={"prompt": "x", "agent_id": f"agent {n}"})
    behind = plain.enqueue(TASK_PATH, request={"prompt": "x"}).id
    for _ in range(100):
        if found := claim(b, limit=1):
            break
        assert b.has_unread()  # so that the fetcher does not rest
    assert ids(found) == [behind]


# --- a store that is away ---


def leave_memory_of(agents, a, submit):
    """Each agent has a turn in a's store, which is away then, and a job that continues it."""
    submit(*agents, context="append")
    while len(a.in_flight()) < len(agents):
        claim(a, limit=len(agents))
    run(a.in_flight())
    waiting = submit(*agents, context="append")
    a.sign_off()
    return waiting


def test_jobs_that_wait_for_a_store_do_not_hold_up_others_behind_them(join, submit, monkeypatch):
    a, b = join("a"), join("b", home_wait_s=600)
    leave_memory_of([f"agent {n}" for n in range(150)], a, submit)
    (behind,) = submit("new")
    n_looks = 0
    while behind not in ids(claim(b, limit=1)):
        n_looks += 1
        assert n_looks < 200
    # From now on they cost nothing, until their store is back or their time is over.
    claimer = b._claim_order.claimers["generate"]
    monkeypatch.setattr(claimer, "_claim", lambda **_: pytest.fail("it is tried again"))
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        assert claim(b, limit=1) == []
        time.sleep(0.02)


def test_a_job_that_waits_for_a_store_waits_no_more_once_another_job_is_first_in_its_line(producer, join, submit):
    a, b = join("a"), join("b", home_wait_s=600)
    (waits,) = leave_memory_of(["x"], a, submit)
    (full,) = submit("x")
    assert claim(b) == []
    assert claim(b) == []
    producer.ticket(waits).cancel()
    until(lambda: full in ids(b.in_flight()), b)


def test_a_lost_job_that_waits_for_a_store_holds_nobody_up(join, submit, monkeypatch):
    monkeypatch.setattr("stoker_worker.queue.claim_order._QUARANTINED_WAITS_S", 0.2)
    b = impatient(join("b", home_wait_s=600))
    a = join("c")
    submit("x", context="append")
    run(claim(a))
    (lost,) = submit("x", context="append")
    assert ids(claim(a)) == [lost]
    die(a)
    assert recovered(b) == 1
    submit("long")
    claim_within(b)
    end = time.monotonic() + 2
    while time.monotonic() < end:  # beside a job that goes on for long
        (other,) = submit(None)
        assert ids(claim_within(b, within_s=0.15)) == [other]
        run(job for job in b.in_flight() if job.job_id == other)


# --- starts and stops at bad moments ---


def test_a_worker_that_stops_before_it_has_put_its_predecessors_jobs_back_stays_a_member(join, submit):
    a = join("a")
    first, second = submit("x", "x")
    assert ids(claim(a)) == [first]
    a._lease.release()  # as if it had been killed
    again, b = join("a"), impatient(join("b"))
    again.leave()
    again.sign_off()  # told to stop while the model loads
    assert claim(b) == []
    assert recovered(b) == 1
    assert ids(claim_within(b)) == [first]
    run(b.in_flight())
    assert ids(claim_within(b)) == [second]


def test_an_id_that_a_dead_worker_had_claimed_while_it_runs_elsewhere_goes_back(connection, plain, join):
    a, b = join("a"), impatient(join("b"))
    plain.enqueue(TASK_PATH, request={"prompt": "one"}, job_id="same")
    (first,) = claim(b)
    plain.enqueue(TASK_PATH, request={"prompt": "two"}, job_id="same")
    connection.lmove("rq:queue:generate", CLAIMED_KEY.format(queue="generate", member="a"))
    die(a)
    assert recovered(b) == 1
    assert places(connection, "same") == ["generate", "wip"]
    assert not first.is_ours()
    first.drop()
    first.release()
    assert claim_within(b)[0].request.prompt == "two"


@pytest.mark.parametrize("name", ["-", "-a", ".", "a b"])
def test_a_name_that_could_be_taken_for_something_else_is_refused(join, name):
    with pytest.raises(ValueError, match="name"):
        join(name)


# --- a worker of the version before, which holds queues, not a name ---


OLD = {"worker": "stoker-mac-0badcafe", "fence": 7, "host": "elsewhere", "boot": "b", "pid": 1, "started": "s"}


def test_a_worker_of_the_version_before_keeps_others_out_until_it_has_stopped(connection, join):
    connection.set("stoker:lease:generate", json.dumps(OLD), px=60_000)
    with pytest.raises(QueueHeld, match="held by worker stoker-mac-0badcafe on host elsewhere"):
        join("a")
    assert connection.hlen(MEMBERS_KEY) == 0
    connection.delete("stoker:lease:generate")
    join("a")


def test_a_worker_of_the_version_before_finds_the_queue_held(connection, join):
    """It would take every job of other workers for lost. It takes a queue whose lease is not there, or is JSON that
    names a process of this host which is gone."""
    join("generate")
    value = connection.get("stoker:lease:generate")
    assert value == b"generate"
    assert SERVED_KEY.format(queue="generate") == "stoker:lease:generate"


def test_what_a_worker_of_the_version_before_left_goes_back(connection, plain, join, submit):
    first, second = submit("x", "y")
    connection.lmove("rq:queue:generate", "rq:queue:generate:intermediate")
    a = join("a")
    assert a.recover() == 1
    assert ids(claim(a)) == [first, second]
    assert set(connection.hgetall(HOMES_KEY.format(queue="generate"))) == {b"x", b"y"}
