"""The names of RQ's keys, from RQ's own classes, so that they follow its `RQ_KEY_PREFIX`. No I/O."""

from redis import Redis
from rq.queue import Queue
from rq.registry import BaseRegistry

NO_CONNECTION = Redis()
"""For classes of RQ that need a connection but are only used to compute something. Never connects."""


def queue_key(queue: str) -> str:
    """Key of the list of waiting jobs' ids."""
    return str(Queue(queue, connection=NO_CONNECTION).key)


def registry_key(registry: type[BaseRegistry], queue: str) -> str:
    """Key of the sorted set of a registry's ids."""
    return str(registry(queue, connection=NO_CONNECTION).key)
