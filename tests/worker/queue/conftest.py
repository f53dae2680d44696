"""A queue adapter that holds the queue `generate`, on a server of the session's own; or several."""

from contextlib import ExitStack

import pytest
from rq import Queue
from rq.serializers import JSONSerializer
from tests.support.server_fixture import connection, producer  # noqa: F401

from stoker_shared.wire import TASK_PATH
from stoker_worker.placement.placement import Placement
from stoker_worker.queue.claim import Claimer
from stoker_worker.queue.in_flight import JobsInFlight
from stoker_worker.queue.lease import NO_STORE, Lease, OwnStore
from stoker_worker.queue.registration import RqRegistration
from stoker_worker.queue.rq_queue import open_queue
from stoker_worker.settings import read_settings

DATA = '["stoker_shared.task.generate", null, [], {"request": {"prompt": "x", "max_tokens": 4}}]'


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def plain(connection):  # noqa: F811
    """The queue as any RQ producer uses it."""
    return Queue("generate", connection=connection, serializer=JSONSerializer)


@pytest.fixture
def queue(redis_url):
    with open_queue(read_settings({"redis_url": redis_url, "lease_ttl_s": 30}), redis_url) as opened:
        yield opened.rq_queue


@pytest.fixture
def make_claimer(connection):  # noqa: F811
    """Makes claimers of the queue for a worker without a shared store, which holds its lease."""
    lease = Lease(connection, "me", ["generate"], worker_name="me", ttl_s=60)
    lease.acquire()
    registration = RqRegistration(
        ["generate"], connection, name="stoker-me-00000000", worker_ttl_s=60, heartbeat_s=1, in_flight=JobsInFlight()
    )
    about = ("generate", lease, Placement(connection, [], worker_name=registration.name), registration)
    return lambda: Claimer(connection, *about, is_at_hand=NO_STORE.is_at_hand)


@pytest.fixture
def join(redis_url):
    """Opens the queue for a worker of this name, with a shared store: without one, a worker is alone."""
    with ExitStack() as workers:

        def open_for(name, *, store=None, shared="b1", loads="", **settings):
            given = {"redis_url": redis_url, "name": name, "lease_ttl_s": 30, "patience_s": 0, **settings}
            own = OwnStore(store, shared)
            return workers.enter_context(open_queue(read_settings(given), redis_url, store=own, model=loads)).rq_queue

        yield open_for


@pytest.fixture
def submit(producer):  # noqa: F811
    """Submits a job for each agent; returns the ids."""

    def submit(*agents, **fields):
        return [producer.submit(agent_id=agent, prompt="x", **fields).job_id for agent in agents]

    return submit


@pytest.fixture
def enqueue(plain):
    """Enqueues a job of an agent, as any RQ producer does."""

    def enqueue(job_id, agent="a", prompt="x", **options):
        request = {"agent_id": agent, "prompt": prompt}
        return plain.enqueue(TASK_PATH, request=request, job_id=job_id, **options)

    return enqueue


@pytest.fixture
def enqueue_by_hand(connection):  # noqa: F811
    """Enqueues a job with the README's commands. A field that is ``None`` is not written."""

    def enqueue(job_id, /, **fields):
        key = b"rq:job:" + (job_id if isinstance(job_id, bytes) else job_id.encode())
        times = dict.fromkeys(("created_at", "enqueued_at"), "2026-01-01T00:00:00.000000Z")
        mapping = {"status": "queued", "origin": "generate", "data": DATA, **times, **fields}
        connection.hset(key, mapping={name: value for name, value in mapping.items() if value is not None})
        connection.rpush("rq:queue:generate", job_id)

    connection.sadd("rq:queues", "rq:queue:generate")
    return enqueue
