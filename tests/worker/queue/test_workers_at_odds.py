"""Several workers that see different queues, look late, stop early or lose replies: no job is stuck, no turn lost."""

import pytest
from redis.exceptions import ConnectionError as NoConnection
from tests.worker.queue.ends import give_back
from tests.worker.queue.members import claim, claim_within, ids, impatient, recovered, run

from stoker_shared.errors import RedisUnavailable
from stoker_shared.wire import TASK_PATH
from stoker_worker.ports import Busy

pytestmark = pytest.mark.server


def view_of(queue):
    return queue._claim_order.claimers["generate"].view


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


def test_a_connection_that_is_lost_after_a_claim_leaves_no_job_in_flight_that_nobody_runs(join, submit, monkeypatch):
    a, b = join("a"), join("b")
    assert claim(a) == claim(b) == []
    (job_id,) = submit("x")

    def lost(*args):
        raise NoConnection

    monkeypatch.setattr(a._claim_order, "look_around", lost)
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
