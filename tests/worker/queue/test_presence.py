"""A worker as RQ's tools and producers see it, with and without heartbeats."""

import json
import os
import socket
import time
from queue import SimpleQueue

import pytest
from rq.command import send_shutdown_command
from rq.queue import Queue
from rq.worker import Worker
from rq.worker_registration import clean_worker_registry
from tests.worker.queue.looking import LEASE, MEMBER

from stoker_worker.ports import Busy, Serving

pytestmark = pytest.mark.server


def test_a_worker_publishes_its_models_and_queues_also_after_the_server_lost_them(connection, queue):
    (key,) = connection.keys("stoker:worker:*")
    assert json.loads(connection.get(key))["model"] is None
    queue.announce(Serving("m", 4096, "batched", 32, "the default"))
    for _ in range(2):
        assert queue.beat()
        shown = json.loads(connection.get(key))
        assert shown.pop("started_at") == pytest.approx(time.time(), abs=60)
        assert shown == {
            "member": MEMBER,
            "leaving": False,
            "queues": ["generate"],
            "model": "m",
            "context_tokens": 4096,
            "mode": "batched",
            "max_batch": 32,
            "max_batch_why": "the default",
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "now": {},
        }
        connection.delete(key)


def test_rqs_tools_see_a_worker_no_longer_than_its_lease_lasts(connection, queue, producer):
    producer.submit(agent_id="a", prompt="x")
    queue.claim(8, Busy())
    queue.beat()
    name = queue._registration.name
    left_ms = [connection.pttl(key) for key in (f"rq:worker:{name}", f"stoker:worker:{name}", LEASE)]
    assert max(left_ms) - min(left_ms) < 1000
    connection.delete(f"rq:worker:{name}")  # like after its expiry
    assert Worker.all(connection=connection) == []


def test_a_heartbeat_registers_a_paused_worker_again_after_rqs_tools_removed_it(connection, queue, producer):
    producer.submit(agent_id="a", prompt="x")
    (job,) = queue.claim(8, Busy())
    name = queue._registration.name
    connection.delete(f"rq:worker:{name}", f"rq:worker:{name}:executions")
    clean_worker_registry(Queue("generate", connection=connection))
    assert queue.beat()
    assert connection.ttl(f"rq:worker:{name}") > 0
    connection.srem("rq:workers", f"rq:worker:{name}")  # by tools that checked before, and remove it only now
    connection.srem("rq:workers:generate", f"rq:worker:{name}")
    assert queue.beat()
    [worker] = Worker.all(queue=Queue("generate", connection=connection))
    assert worker.get_state() == "busy"
    assert [execution.job_id for execution in worker.get_current_executions()] == [job.job_id]
    assert Worker.count(connection=connection) == 1


def test_commands_arrive_on_a_connection_that_is_tried_now_and_then(connection, queue):
    """One that died while the machine slept would be waited on for hours, and all commands lost."""
    registration, heard = queue._registration, SimpleQueue[None]()
    tried = registration.pubsub_thread.pubsub.connection
    assert 0 < tried.health_check_interval < 60  # less than between two looks of RQ's thread
    tried.health_check_interval = 1e-6  # from now on it is tried all the time
    registration.on_shutdown = lambda: heard.put(None)
    for _ in range(3):
        send_shutdown_command(connection, registration.name)
        heard.get(timeout=10)
