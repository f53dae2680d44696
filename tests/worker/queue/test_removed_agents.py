"""Agents that a store has removed because nobody used them: their entries go, unless another store may know them."""

import pytest
from tests.worker.queue.ends import finish
from tests.worker.queue.members import claim, claim_within, home_of, ids

from stoker_shared.wire import HOMES_KEY

pytestmark = pytest.mark.server


@pytest.fixture
def removes(join):
    """Joins the queue; what the store has removed by itself is put into the mapping."""

    def join_removing(name, **settings):
        removed = {}
        queue = join(name, removed=lambda: dict(removed), **settings)
        return queue, removed

    return join_removing


@pytest.fixture
def share():
    return {"shared": "b1", "shared_store": "file:///shared"}


def one_turn(queue, submit, agent_id, version):
    submit(agent_id)
    finish(claim_within(queue)[0], {"cache": {"agent_version": version, "saved": True}})


@pytest.mark.parametrize("is_sharing", [False, True])
def test_an_agent_that_was_removed_needs_no_entry(connection, removes, submit, share, is_sharing):
    a, removed = removes("a", **(share if is_sharing else {}))
    one_turn(a, submit, "x", 3)
    one_turn(a, submit, "stays", 1)
    a.tidy()
    assert connection.hlen(HOMES_KEY.format(queue="generate")) == 2
    removed["x"] = 3
    a.tidy()
    assert connection.hkeys(HOMES_KEY.format(queue="generate")) == [b"stays"]
    submit("x")
    assert ids(claim_within(a)) == [a.in_flight()[0].job_id]
    assert home_of(connection, "x") == ("a - 0 -" if is_sharing else "a -")


def test_an_agent_with_a_job_in_flight_keeps_its_home(connection, removes, submit):
    a, removed = removes("a")
    one_turn(a, submit, "x", 3)
    removed["x"] = 3
    submit("x")
    [running] = claim(a)
    a.tidy()
    assert home_of(connection, "x") == "a ="
    finish(running, {"cache": {"agent_version": 1, "saved": True}})


def test_an_agent_that_went_elsewhere_keeps_its_home(connection, removes, submit, share):
    a, removed = removes("a", **share)
    b, _ = removes("b", **share)
    one_turn(a, submit, "x", 3)
    a._moving.give_up({"x": True})
    one_turn(b, submit, "x", 4)
    removed["x"] = 3
    a.tidy()
    assert home_of(connection, "x") == "b = 4"


def test_a_version_that_is_missed_stays_noted(connection, removes, submit, share):
    a, removed = removes("a", **share)
    one_turn(a, submit, "x", 4)
    removed["x"] = 3
    a.tidy()
    assert home_of(connection, "x") == "a = 4"


@pytest.mark.parametrize("has_left", [False, True])
def test_an_agent_keeps_its_home_where_another_store_without_a_shared_one_may_have_an_older_conversation(
    connection, removes, submit, join, share, has_left
):
    b = join("b")
    a, removed = removes("a", **({} if has_left else share))
    submit("x")
    finish(claim_within(a)[0], {"cache": {"agent_version": 3, "saved": True}})
    if has_left:
        b.sign_off()
    removed["x"] = 3
    a.tidy()
    assert home_of(connection, "x").startswith("a =")
