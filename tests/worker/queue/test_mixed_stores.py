"""Workers of one queue of which only some have a shared store yet, and workers whose stores do not go together."""

import time

import pytest
from tests.worker.queue.ends import fail, finish
from tests.worker.queue.members import claim, claim_in_turn, claim_within, die, home_of, ids

from stoker_shared.errors import EngineFailed, StoreUnusable
from stoker_shared.wire import AGENT_TASK_PATH, MEMBERS_KEY
from stoker_worker.ports import AgentHome

pytestmark = pytest.mark.server


@pytest.fixture
def share(join):
    """Joins the queue with a shared store, which the queue only has to know of."""

    def join_sharing(name, shared="b1", **settings):
        return join(name, shared=shared, home_wait_s=600, shared_store="file:///shared", **settings)

    return join_sharing


def turn(version):
    return {"cache": {"agent_version": version, "saved": True}}


def one_turn(queue, submit, version):
    submit("x", context="append")
    [job] = claim_within(queue)
    finish(job, turn(version))


def test_what_a_worker_without_a_shared_store_has_waits_for_it_until_it_has_one(connection, join, share, submit):
    a, b = join("a", home_wait_s=600), share("b")
    one_turn(a, submit, 1)
    a.sign_off()
    (second,) = submit("x", context="append")
    assert claim(b) == []
    time.sleep(1.2)  # longer than b waits between two looks
    assert claim(b) == []
    again = share("a")
    assert claim_in_turn(again, b) == [second]
    assert home_of(connection, "x") == "a ="


def test_what_was_not_continued_since_its_worker_has_a_shared_store_is_looked_for_there(join, share, submit):
    a = join("a")
    one_turn(a, submit, 1)
    a.sign_off()
    a, b = share("a"), share("b")
    (second,) = submit("x", context="append")
    assert claim(b) == []
    a.sign_off()
    assert ids(claim_within(b)) == [second]
    assert b.home_of("x") == AgentHome("a", 0, "a")
    assert b.home_of("x").is_unnoted


def test_an_agent_that_moved_without_a_number_still_has_none(connection, join, share, submit):
    a = join("a")
    one_turn(a, submit, 1)
    a.sign_off()
    a, b = share("a"), share("b")
    submit("x", context="append")
    a.sign_off()
    [second] = claim_within(b)
    assert home_of(connection, "x") == "b a 0 a"
    fail(second, EngineFailed("broken"))
    b._moving._homes.give_up({"x": True})
    a = join("a", home_wait_s=600)  # without it again
    (third,) = submit("x", context="append")
    assert claim(b) == []
    assert claim_in_turn(a, b) == [third]


def test_a_worker_that_drains_keeps_its_agents_from_workers_that_could_not_continue_them(
    connection, join, share, submit
):
    a, b = join("a", home_wait_s=600), share("b")
    one_turn(a, submit, 1)
    submit("x", context="append")
    end = time.monotonic() + 1.5  # some looks of b, which asks whoever drains
    while time.monotonic() < end:
        a.leave()
        assert claim(b) == []
        time.sleep(0.02)
    assert home_of(connection, "x").split(" ")[1:] in (["="], ["a"])


def test_a_turn_of_a_worker_without_a_shared_store_is_missed_by_those_that_have_one(connection, join, share, submit):
    a = share("a")
    one_turn(a, submit, 4)
    a.sign_off()
    b = join("b")
    submit("x")
    finish(claim_within(b)[0], turn(1))
    assert home_of(connection, "x") == "b = 5"
    for version in (2, 3):
        one_turn(b, submit, version)
        assert home_of(connection, "x") == "b = 5"


def test_turns_that_follow_those_in_the_shared_store_are_counted(connection, plain, join, share, submit):
    a = share("a")
    one_turn(a, submit, 4)
    a.sign_off()
    a = join("a")
    one_turn(a, submit, 5)
    assert home_of(connection, "x") == "a = 5"
    plain.enqueue(AGENT_TASK_PATH, request={"agent_id": "x", "action": "forget"})
    finish(claim(a)[0], {"version": 5, "existed": True})
    assert home_of(connection, "x") == "a = 6"


def test_a_worker_with_another_shared_store_is_refused_by_name(connection, join, share):
    share("a"), share("b"), join("c")
    with pytest.raises(StoreUnusable, match=r"worker .[ab]. on host .* has another shared store"):
        share("d", shared="b2")
    assert set(connection.hkeys(MEMBERS_KEY)) == {b"a", b"b", b"c"}


def test_a_copy_of_a_store_is_refused_while_the_other_one_is_in_use(connection, join):
    first = join("a", store="mac-1")
    with pytest.raises(StoreUnusable, match=r"worker 'a' on host .* has a store of the same name, 'mac-1'"):
        join("b", store="mac-1")
    assert connection.hkeys(MEMBERS_KEY) == [b"a"]
    first.sign_off()
    join("b", store="mac-1")


def test_a_dead_worker_refuses_nobody(share):
    die(share("a", store="mac-1"))
    share("b", shared="b2", store="mac-1")
