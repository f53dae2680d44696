"""A queue adapter that holds the queue `generate`, on a server of the session's own."""

import pytest
from rq import Queue
from rq.serializers import JSONSerializer
from tests.server_fixture import connection, producer  # noqa: F401

from stoker_worker.queue.connect import open_queue
from stoker_worker.settings import read_settings


@pytest.fixture
def plain(connection):  # noqa: F811
    """The queue as any RQ producer uses it."""
    return Queue("generate", connection=connection, serializer=JSONSerializer)


@pytest.fixture
def queue(redis_url):
    with open_queue(read_settings({"redis_url": redis_url}), redis_url) as opened:
        yield opened.rq_queue
