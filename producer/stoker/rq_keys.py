"""RQ's names for its keys, from RQ's own classes: so they follow its `RQ_KEY_PREFIX`. No I/O."""

from redis import Redis
from rq.queue import Queue
from rq.registry import BaseRegistry

NO_CONNECTION = Redis()
"""For classes of RQ's that ask for a connection and are only used to compute something. Never connects."""


def queue_key(queue: str) -> str:
    """List of the ids that wait."""
    return str(Queue(queue, connection=NO_CONNECTION).key)


def registry_key(registry: type[BaseRegistry], queue: str) -> str:
    """Sorted set of the ids in that state."""
    return str(registry(queue, connection=NO_CONNECTION).key)
