"""A queue adapter that holds the queue `generate`, on a server of the session's own; or several."""

from contextlib import ExitStack

import pytest
from rq import Queue
from rq.serializers import JSONSerializer
from tests.support.server_fixture import connection, producer  # noqa: F401
from tests.worker.queue.members import claim, registration

from stoker_worker.placement.placement import Placement
from stoker_worker.ports import Serving
from stoker_worker.queue.claim import Claimer
from stoker_worker.queue.lease import NO_STORE, Lease, OwnStore
from stoker_worker.queue.rq_queue import open_queue
from stoker_worker.settings import read_settings


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
    placement = Placement(connection, [], worker_name="stoker-me-00000000")
    about = ("generate", lease, placement, registration(connection))
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
def serve(join):
    """Joins, is ready, and lets all the others see it."""
    workers = []

    def serve_with(name, **settings):
        queue = join(name, **{"patience_s": 600, **settings})
        queue.announce(Serving("m", 4096, "batched", 8, "given"))
        workers.append(queue)
        claim(queue, limit=0)
        for other in workers:
            other._members.look()
        return queue

    return serve_with


@pytest.fixture
def submit(producer):  # noqa: F811
    """Submits a job for each agent; returns the ids."""

    def submit(*agents, **fields):
        return [producer.submit(agent_id=agent, prompt="x", **fields).job_id for agent in agents]

    return submit
