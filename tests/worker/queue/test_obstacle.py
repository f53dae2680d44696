"""Which workers may serve a queue: one, or several with one shared store and one model; and with which store."""

import dataclasses
import json
import os
import socket
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from redis.exceptions import RedisError
from tests.worker.queue.processes import a_dead_process

from stoker_shared.errors import QueueHeld, StoreUnusable
from stoker_shared.wire import FENCE_KEY, LEASE_KEY, MEMBERS_KEY, SERVED_KEY, STORE_KEY
from stoker_worker.queue.client import lua
from stoker_worker.queue.lease import Lease, OwnStore
from stoker_worker.queue.rq_queue import _take_over, open_queue
from stoker_worker.settings import read_settings

pytestmark = pytest.mark.server

WHERE = f"on host {socket.gethostname()}, pid {os.getpid()}"


@pytest.fixture
def worker(connection):
    """A worker that has not joined yet."""

    def worker_called(name, queues=("q",), *, store="one", ttl_s=30.0, **more):
        return Lease(connection, name, queues, worker_name=f"stoker-{name}", ttl_s=ttl_s, store=store, **more)

    return worker_called


@pytest.fixture
def join(worker):
    def joined(name, *queues, **more):
        lease = worker(name, queues or ("q",), **more)
        lease.acquire()
        return lease

    return joined


@pytest.fixture
def crash(connection):
    """The worker's process is gone; its keys stay until they expire."""

    def crashed(lease, **elsewhere):
        identity = dataclasses.asdict(a_dead_process()) | elsewhere
        for key, field in ((LEASE_KEY.format(member=lease.member), None), (MEMBERS_KEY, lease.member)):
            value = connection.hget(key, field) if field else connection.get(key)
            died = json.dumps({**json.loads(value), **identity})
            connection.hset(key, field, died) if field else connection.set(key, died, keepttl=True)

    return crashed


def served(connection, queue="q"):
    return connection.get(SERVED_KEY.format(queue=queue)).decode()


def kept(connection, queue="q"):
    return connection.get(STORE_KEY.format(queue=queue)).decode()


def refused(lease, error=QueueHeld, **how):
    """The message, and that nothing of the refused worker is left behind."""
    fence = lease._connection.get(FENCE_KEY.format(member=lease.member))
    with pytest.raises(error) as raised:
        lease.acquire(**how)
    assert not lease._connection.exists(LEASE_KEY.format(member=lease.member)) or fence
    assert lease._connection.get(FENCE_KEY.format(member=lease.member)) == fence
    return str(raised.value)


# --- who serves the queue ---


def test_a_second_worker_without_a_shared_store_is_refused_by_name_with_the_ways_on(join, worker):
    join("a")
    assert refused(worker("b")).startswith(
        f"queue 'q' is served by worker stoker-a {WHERE} (no shared store), and this worker has no shared store: all "
        "workers of a queue need one shared store and one model (--shared-store, --model). Or start this one with "
        "--standby, or give it another queue (--queues); if that worker is gone, its lease runs out in "
    )
    join("c", "other")


def test_a_worker_that_is_refused_at_one_of_its_queues_gets_none_of_them(connection, join, worker):
    join("a", "q")
    assert "queue 'q' is served by worker stoker-a" in refused(worker("b", ["p", "q"]))
    assert not connection.exists(SERVED_KEY.format(queue="p"), STORE_KEY.format(queue="p"))
    assert connection.hkeys(MEMBERS_KEY) == [b"a"]
    join("b", "p")


def test_workers_with_one_shared_store_and_model_serve_a_queue_together(connection, join):
    first = join("a", shared="s1", model="m")
    second = join("b", store="two", shared="s1", model="m")
    assert first.renew()
    first.leave()
    assert second.renew()
    assert (served(connection), kept(connection)) == ("shared s1 m", "shared s1")
    second.leave()
    assert not connection.exists(SERVED_KEY.format(queue="q"))


@pytest.mark.parametrize(
    ("first", "second", "theirs", "ours"),
    [
        ({"shared": "s1"}, {"shared": "s2"}, "the shared store s1 and the model ''", "the shared store s2"),
        ({"shared": "s1"}, {}, "the shared store s1 and the model ''", "no shared store"),
        ({}, {"shared": "s1"}, "no shared store", "the shared store s1"),
        (
            {"shared": "s1", "model": "org/m 1"},
            {"shared": "s1", "model": "org/m 2"},
            "the shared store s1 and the model 'org/m 1'",
            "the shared store s1 and the model 'org/m 2'",
        ),
    ],
)
def test_workers_that_may_not_share_a_queue_are_refused_with_the_difference(join, worker, first, second, theirs, ours):
    one = join("a", **first)
    two = worker("b", store="two", new_store=True, **second)
    message = refused(two)
    assert f"queue 'q' is served by worker stoker-a {WHERE} ({theirs}), and this worker has {ours}" in message
    one.leave()
    two.acquire()
    assert two.renew()


@pytest.mark.parametrize("share", [{}, {"shared": "s1"}])
def test_a_crashed_worker_of_this_host_is_passed_over_at_once(connection, join, worker, crash, share):
    crash(join("a", **share))
    second = worker("b", model="another", **share)
    second.acquire()
    assert second.renew()
    assert set(connection.hkeys(MEMBERS_KEY)) == {b"a", b"b"}  # until its jobs are put back


def test_a_queue_of_which_one_worker_crashed_is_still_served_by_the_others(join, worker, crash):
    crash(join("a", shared="s1", model="m"))
    join("b", store="two", shared="s1", model="m")
    assert "served by worker stoker-b" in refused(worker("c", store="three", shared="s1", model="n"))


@pytest.mark.parametrize("elsewhere", [{"host": "elsewhere"}, {"boot": "another"}, {"pids": "pid:[1]"}])
def test_a_crashed_worker_elsewhere_is_passed_over_after_the_time_of_its_lease(
    connection, join, worker, crash, elsewhere
):
    crash(join("a"), **elsewhere)
    second = worker("b")
    assert "its lease runs out in" in refused(second)
    connection.delete(SERVED_KEY.format(queue="q"), LEASE_KEY.format(member="a"))  # they expire together
    second.acquire()


def test_a_worker_that_starts_again_under_its_name_may_have_another_shared_store_or_model(connection, join, crash):
    crash(join("a", shared="s1", model="m"))
    join("a", shared="s1", model="n").release()  # with jobs that the next one puts back
    join("a", shared="s1", model="o")
    assert served(connection) == "shared s1 o"


def test_a_worker_whose_first_try_had_no_reply_tries_again(join, worker):
    join("a")
    worker("a").acquire()


def test_the_keys_expire_with_the_lease(connection, join):
    lease = join("a", ttl_s=20.0)
    for _ in range(2):
        keys = [SERVED_KEY.format(queue="q"), LEASE_KEY.format(member="a")]
        left_ms = [connection.pttl(key) for key in keys]
        assert 15_000 < min(left_ms) <= max(left_ms) <= 20_000
        [connection.pexpire(key, 16_000) for key in keys]
        assert lease.renew()
    assert connection.ttl(STORE_KEY.format(queue="q")) == -1


@pytest.mark.parametrize("value", ["mac", "", "shared", "only", "shared x", '{"queues": 7', "\x00"])
def test_a_value_that_is_not_understood_refuses_until_it_expires(connection, worker, value):
    connection.set(SERVED_KEY.format(queue="q"), value, px=60_000)
    assert "queue 'q' is " in refused(worker("a"))
    connection.delete(SERVED_KEY.format(queue="q"))
    worker("a").acquire()


# --- a standby ---


def stand_by(lease):
    nobody: Any = SimpleNamespace(sign_on=lambda: None, connection=lease._connection)
    thread = threading.Thread(target=_take_over, args=("", lease, nobody), kwargs={"standby": True}, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("end", ["leaves", "dies"])
def test_a_standby_takes_the_queue_when_its_worker_leaves_or_dies(join, worker, crash, monkeypatch, caplog, end):
    monkeypatch.setattr("stoker_worker.queue.rq_queue.STANDBY_POLL_S", 0.02)
    caplog.set_level("INFO")
    first, second = join("a"), worker("b")
    thread = stand_by(second)
    thread.join(0.3)
    assert thread.is_alive()
    assert caplog.text.count("standing by: queue 'q' is served by worker stoker-a") == 1
    first.leave() if end == "leaves" else crash(first)
    thread.join(30)
    assert second.renew()
    assert not first.renew()


def test_a_standby_is_told_at_once_that_it_could_never_take_over(join, worker):
    join("a")
    assert "--standby" in refused(worker("b", store="two"))
    assert "have their conversations in 'store one'" in refused(worker("b", store="two"), StoreUnusable, waits=True)


# --- which store ---


def test_a_worker_with_another_store_is_refused_after_the_first_has_left(connection, join, worker):
    join("a").leave()
    assert refused(worker("b", store="two"), StoreUnusable) == (
        "the agents of queue 'q' have their conversations in 'store one', and this worker has 'store two': "
        "start the worker of that store instead (`stoker-worker memory share` makes a store shared), or give this one "
        "another queue (--queues), or start it with --new-store, and these agents begin anew"
    )
    join("b").leave()  # the same store under another name
    join("b", store="two", new_store=True).leave()
    assert kept(connection) == "store two"
    refused(worker("a"), StoreUnusable)


def test_a_store_without_a_conversation_keeps_no_other_store_out(connection, join, worker, monkeypatch):
    first = join("a", has_agents=False)
    assert first.renew()
    assert not connection.exists(STORE_KEY.format(queue="q"))
    with monkeypatch.context() as patched:
        patched.setattr(first, "renew", MagicMock(side_effect=RedisError))
        with pytest.raises(RedisError):
            first.has_a_turn()
    assert not connection.exists(STORE_KEY.format(queue="q"))
    assert first.has_a_turn()  # tried again, because Redis knows nothing of it yet
    first.leave()  # before its next heartbeat
    refused(worker("b", store="two", has_agents=False), StoreUnusable)
    join("b", store="two", has_agents=False, new_store=True).leave()
    assert kept(connection) == "store one"  # which still has what "two" has not


def test_a_store_that_was_shared_is_accepted_and_from_then_on_the_shared_one_is_asked_for(connection, join, worker):
    join("a").leave()
    message = refused(worker("b", store="two", shared="s1"), StoreUnusable)
    assert "in 'store one', and this worker has 'shared s1': start" in message
    first = join("a", shared="s1")
    assert kept(connection) == "shared s1"
    join("b", store="two", shared="s1").leave()
    first.leave()
    for one in (worker("a"), worker("a", shared="s2")):
        assert "in 'shared s1', and this worker has" in refused(one, StoreUnusable)


def test_the_settings_and_the_store_of_a_worker_decide(connection, redis_url):
    def opened(name, store, model="m", shared="", **settings):
        own = OwnStore(store, shared)
        given = read_settings({"redis_url": redis_url, "name": name, **settings})
        return open_queue(given, redis_url, store=own, model=model)

    with opened("a", "one", shared="s1"), opened("b", "two", shared="s1"):
        assert served(connection, "generate") == "shared s1 m"
        with (
            pytest.raises(QueueHeld, match=r"model 'm'.*, and this worker has .* model 'n'"),
            opened("c", "three", "n", "s1"),
        ):
            pass
    with pytest.raises(StoreUnusable), opened("c", "three"):
        pass
    with opened("c", "three", new_store=True):
        assert (served(connection, "generate"), kept(connection, "generate")) == ("only c", "store three")
    assert not connection.exists(SERVED_KEY.format(queue="generate"))


# --- Redis loses its data ---


def test_after_a_flush_the_worker_that_comes_first_goes_on_and_the_other_one_ends(connection, join, worker, caplog):
    first, second = join("a"), worker("b", store="two")
    connection.flushall()
    assert first.renew()
    assert kept(connection) == "store one"
    refused(second)
    connection.flushall()
    second.acquire()
    assert not first.renew()
    assert f"queue 'q' is served by worker stoker-b {WHERE}" in caplog.text
    assert not first.renew()
    assert second.renew()
    assert connection.hkeys(MEMBERS_KEY) == [b"b"]
    second.leave()
    assert not first.renew()  # its jobs were the other one's to put back


@pytest.fixture
def ends_jobs(connection):
    """Whether the scripts with which a worker starts and ends jobs do so."""
    holds = connection.register_script(
        lua("holds") + "return holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) and 1 or 0"
    )
    return lambda lease: bool(holds(keys=lease.keys, args=lease.args))


@pytest.mark.parametrize("has_noticed", [False, True])
def test_a_worker_whose_queue_another_one_serves_ends_no_jobs(connection, join, ends_jobs, has_noticed):
    """What it had in flight, the other one puts back."""
    first = join("a", "p", "q")
    assert ends_jobs(first)
    connection.delete(LEASE_KEY.format(member="a"), *(SERVED_KEY.format(queue=queue) for queue in "pq"))  # it slept
    join("b", "q")
    assert not (has_noticed and first.renew())
    assert not ends_jobs(first)
    assert not connection.exists(LEASE_KEY.format(member="a"))
    assert not first.renew()


@pytest.mark.parametrize("share", [{}, {"shared": "s1", "model": 'm "é"'}])
def test_a_worker_that_ends_a_job_after_a_flush_has_its_queues_again(connection, join, worker, ends_jobs, share):
    first = join("a", **share)
    connection.flushall()
    assert ends_jobs(first)
    refused(worker("b", store="two", shared="s1", model="n"))
    assert first.renew()


def test_a_lease_that_ran_out_is_taken_up_again_with_its_queues(connection, join):
    lease = join("a", "p", "q")
    connection.delete(LEASE_KEY.format(member="a"), *(SERVED_KEY.format(queue=queue) for queue in "pq"))
    assert lease.renew()
    assert served(connection, "p") == served(connection, "q") == "only a"


def test_putting_a_dead_members_jobs_back_changes_nothing_at_its_queues(connection, join, worker, crash):
    crash(join("a", "q", "other"))
    connection.delete(SERVED_KEY.format(queue="q"), SERVED_KEY.format(queue="other"), LEASE_KEY.format(member="a"))
    mine = join("b")
    burying = worker("a", ["q", "other"])
    burying.acquire(recovers=True)
    assert burying.renew()
    burying.leave()
    assert served(connection) == "only b"
    assert not connection.exists(SERVED_KEY.format(queue="other"))
    assert mine.renew()
