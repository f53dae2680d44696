"""One worker has a member's name: the holder, the takeover, and the errors of the others."""

import dataclasses
import json
import os
import re
import signal
import threading
import time

import pytest
from tests.support.private_server import free_port, private_server
from tests.support.server_fixture import require_server_program
from tests.worker.queue.processes import a_dead_process

from stoker_shared.errors import QueueHeld
from stoker_shared.wire import FENCE_KEY, LEASE_KEY, MEMBERS_KEY
from stoker_worker.process_identity import ProcessIdentity
from stoker_worker.queue.lease import FENCE_KEPT_S, Lease
from stoker_worker.queue.rq_queue import open_queue
from stoker_worker.settings import read_settings

pytestmark = pytest.mark.server


LEASE, FENCE = LEASE_KEY.format(member="m"), FENCE_KEY.format(member="m")


def lease(connection, name, queues=("q",), ttl_s=30.0, member="m", store=None):
    return Lease(connection, member, queues, worker_name=name, ttl_s=ttl_s, store=store, shared="s1")


def hold_as(connection, identity, **more):
    value = json.dumps({"worker": "other", "fence": 1, **dataclasses.asdict(identity), **more})
    connection.set(LEASE, value, px=30_000)


def test_a_second_worker_gets_the_name_of_the_holder_and_the_remaining_time_of_its_lease(connection):
    first = lease(connection, "first", ttl_s=300)
    first.acquire()
    connection.pexpire(LEASE, 200_900)
    with pytest.raises(QueueHeld, match=r"its lease runs out in 200\.\d s") as held:
        lease(connection, "second", ttl_s=4).acquire()
    assert re.search(rf"the name '.*' is held by worker first on host .*, pid {os.getpid()}", str(held.value))
    connection.delete(LEASE)  # it ran out while Redis was away
    assert first.renew()  # whoever was refused has deposed nobody


def test_a_holder_that_is_certainly_dead_is_replaced_at_once_with_a_higher_fence(connection):
    hold_as(connection, a_dead_process())
    connection.set(FENCE, 1)
    mine = lease(connection, "second")
    mine.acquire()
    assert mine.renew()
    assert json.loads(mine.value)["fence"] == 2


def test_a_new_process_with_a_dead_holders_pid_does_not_keep_its_lease(connection):
    me = ProcessIdentity.of_this_process()
    hold_as(connection, dataclasses.replace(me, started="an earlier start"))
    lease(connection, "second").acquire()


@pytest.mark.parametrize("has_left_again", [False, True])
def test_a_holder_learns_that_another_had_its_lease_after_it_expired(connection, has_left_again):
    first, second = lease(connection, "first", ttl_s=0.05), lease(connection, "second")
    first.acquire()
    time.sleep(0.1)
    second.acquire()
    if has_left_again:
        second.release()
    assert not first.renew()
    assert not first.renew()
    first.release()
    assert connection.exists(LEASE) == (not has_left_again)
    assert second.renew() == (not has_left_again)


def test_a_lease_is_renewed_on_a_server_that_is_full(connection):
    """Else a standby could take it in the moment in which the server has memory again."""
    first = lease(connection, "first")
    first.acquire()
    assert first.renew()  # the script is loaded
    connection.pexpire(LEASE, 5000)
    connection.config_set("maxmemory", 1)
    try:
        assert first.renew()
    finally:
        connection.config_set("maxmemory", 0)
    assert connection.pttl(LEASE) > 5000


def test_after_a_loss_of_all_data_the_holder_goes_on_and_the_next_one_gets_a_higher_number(connection):
    first, second, third = (lease(connection, name) for name in ("first", "second", "third"))
    first.acquire()
    first.release()
    second.acquire()
    connection.delete(LEASE, FENCE)
    assert second.renew()
    second.release()
    third.acquire()
    assert json.loads(third.value)["fence"] == 3


def test_a_member_whose_lease_was_only_released_stays_one_and_its_successor_knows_its_queues(connection):
    first, second = lease(connection, "first", ["a", "b"]), lease(connection, "second", ["b"])
    first.acquire()
    first.release()
    assert set(connection.hgetall(MEMBERS_KEY)) == {b"m"}
    second.acquire()
    assert second.former_queues == ("a", "b")
    assert json.loads(connection.hget(MEMBERS_KEY, "m"))["worker"] == "first"  # until its jobs are put back
    second.settle()
    assert json.loads(connection.hget(MEMBERS_KEY, "m"))["worker"] == "second"


def test_a_worker_that_was_deposed_does_not_become_a_member_again_by_draining(connection):
    first = lease(connection, "first")
    first.acquire()
    first.announce({"leaving": True})
    assert json.loads(connection.hget(MEMBERS_KEY, "m"))["leaving"] is True
    connection.delete(LEASE)
    taker = lease(connection, "taker")
    taker.acquire(recovers=True)
    taker.leave()
    first.announce({"leaving": True})
    assert not connection.exists(MEMBERS_KEY)


def test_the_number_of_a_name_expires_only_when_nobody_has_that_name(connection):
    first, second = lease(connection, "first"), lease(connection, "second")
    first.acquire()
    assert connection.ttl(FENCE) == -1
    first.leave()
    assert 0 < connection.ttl(FENCE) <= FENCE_KEPT_S
    second.acquire()
    assert connection.ttl(FENCE) == -1
    assert json.loads(second.value)["fence"] == 2
    second.release()  # it stays a member
    assert connection.ttl(FENCE) == -1


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_holder_whose_lease_had_run_out_for_a_moment_is_seen_all_the_same(connection, is_taken):
    first, second = lease(connection, "first"), lease(connection, "second")
    first.acquire()
    first.release()
    second.acquire()
    connection.delete(LEASE)
    if is_taken:
        lease(connection, "third").acquire(recovers=True)
    second.settle()
    assert bool(second.former_queues) == is_taken
    assert json.loads(connection.hget(MEMBERS_KEY, "m"))["worker"] == ("first" if is_taken else "second")


def test_a_worker_waits_for_another_that_puts_its_jobs_back(connection):
    recovering = lease(connection, "other member's")
    recovering.acquire(recovers=True)
    assert not connection.exists(MEMBERS_KEY)
    threading.Timer(0.3, recovering.leave).start()
    mine = lease(connection, "mine")
    mine.acquire()
    assert mine.renew()


@pytest.mark.parametrize("trouble", [None, signal.SIGSTOP, signal.SIGKILL])
def test_signing_off_ends_soon_with_the_thread_that_listens_to_commands_whatever_the_server_does(tmp_path, trouble):
    """As when a worker is stopped while its model loads."""
    require_server_program()
    with private_server(tmp_path / "redis", port=(port := free_port())) as admin:
        url, pid = f"redis://127.0.0.1:{port}", admin.info("server")["process_id"]
        try:
            with open_queue(read_settings({"redis_url": url}), url) as opened:
                thread: threading.Thread = opened.registration.pubsub_thread
                if trouble is not None:
                    os.kill(pid, trouble)
                began = time.monotonic()
            assert time.monotonic() - began < 15  # 1; the time limit of a worker that serves is 25
            assert not thread.is_alive()
        finally:
            if trouble == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
