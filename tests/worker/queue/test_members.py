"""Which other workers there are, and which of them count as dead."""

import json

import pytest

from stoker_shared.wire import LEASE_KEY
from stoker_worker.queue.lease import Lease, Members

pytestmark = pytest.mark.server

TTL_S = 4.0


@pytest.fixture
def join(connection):
    def join(name, *queues, store=None):
        which = {"worker_name": f"stoker-{name}-00000000", "store": store, "shared": "s1", "model": "m"}
        lease = Lease(connection, name, queues or ("q",), ttl_s=60, **which)
        lease.acquire()
        return lease

    return join


@pytest.fixture
def members(connection, join, clock):
    return Members(connection, join("me", "q", "r"), ttl_s=TTL_S, clock=clock)


def look(members, clock, *, after_s=1.0):
    clock.now += after_s
    members.look()
    return [member.name for member in members.dead]


def gone(connection, name):
    """Its lease ran out, and its process is on another machine."""
    connection.delete(LEASE_KEY.format(member=name))
    record = json.loads(connection.hget("stoker:members", name))
    connection.hset("stoker:members", name, json.dumps({**record, "host": "elsewhere"}))


def test_those_that_share_a_queue_are_seen(members, join, clock):
    join("a", "q")
    join("b", "other")
    join("c", "other", "r", store="disk")
    look(members, clock)
    assert sorted(members.others) == ["a", "c"]
    assert members.others["c"].store == "disk"
    assert members.everybody == {"me", "a", "b", "c"}


def test_a_member_whose_lease_is_missing_for_as_long_as_a_lease_lasts_is_dead(members, connection, join, clock):
    lease = join("a")
    gone(connection, "a")
    assert [look(members, clock) for _ in range(4)] == [[]] * 4
    assert lease.renew()  # the time begins anew
    assert look(members, clock) == []
    gone(connection, "a")
    assert [look(members, clock) for _ in range(6)] == [[], [], [], [], ["a"], ["a"]]


def test_time_in_which_this_worker_did_not_reach_redis_does_not_count(members, connection, join, clock):
    join("a")
    gone(connection, "a")
    assert look(members, clock) == []
    assert look(members, clock, after_s=3.0) == []  # Redis was away, or this worker slept
    assert look(members, clock, after_s=100.0) == []
    assert [look(members, clock) for _ in range(4)] == [[], [], [], ["a"]]


def test_a_member_whose_process_is_gone_on_this_machine_is_dead_at_once(members, connection, join, clock):
    join("a")
    record = json.loads(connection.hget("stoker:members", "a"))
    died = json.dumps({**record, "started": "an earlier start"})
    connection.set(LEASE_KEY.format(member="a"), died)
    connection.hset("stoker:members", "a", died)
    assert look(members, clock) == []  # processes are not asked each second
    members.look(asks_processes=True)
    assert [member.name for member in members.dead] == ["a"]
    connection.delete(LEASE_KEY.format(member="a"))
    assert look(members, clock) == ["a"]


def test_the_first_by_name_that_is_ready_and_stays_has_the_duties_of_a_queue(members, join, clock):
    lease = join("a", "q")
    look(members, clock)
    assert members.duties() == ["q", "r"]  # the other one still loads its model, which may take an hour
    assert lease.announce({"loading": False})
    look(members, clock)
    assert members.duties() == ["r"]
    assert lease.announce({"leaving": True})
    look(members, clock)
    assert list(members.of("q")) == ["a"]
    assert members.duties() == ["q", "r"]


@pytest.mark.parametrize("garbage", ["", "[", "7", '{"queues": 7}', '{"queues": ["q"], "pid": "x"}'])
def test_a_record_that_is_garbage_breaks_nothing(members, connection, clock, garbage):
    connection.hset("stoker:members", "a", garbage)
    look(members, clock)
    members.look(asks_processes=True)


def test_a_process_of_another_container_is_not_looked_for_among_ones_own(members, connection, join):
    join("a")
    record = json.loads(connection.hget("stoker:members", "a"))
    unseen = json.dumps({**record, "started": "unseen from here", "pids": "pid:[1]"})
    connection.set(LEASE_KEY.format(member="a"), unseen)
    connection.hset("stoker:members", "a", unseen)
    members.look(asks_processes=True)
    assert members.dead == ()
