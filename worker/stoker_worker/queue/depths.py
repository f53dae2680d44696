"""How many jobs wait in each queue, and for how long. Any thread; reads only.

Owns a connection of its own with a short time limit: a request for metrics delays neither the fetcher nor the
heartbeat, and a server that hangs is not waited for.
"""

from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

from redis import Redis
from rq.job import Job
from rq.queue import Queue
from rq.utils import utcparse

from stoker_worker.ports import QueueDepth
from stoker_worker.queue.client import as_redis_unavailable
from stoker_worker.queue.json_job import raw, text

_LOOKED_AT: Final = 100
"""The oldest job is looked for among this many at the front: newer ones may have been put before it."""


class QueueDepths:
    def __init__(self, connection: Redis, queues: list[str]) -> None:
        """`connection`: used by nothing else."""
        self._connection = connection
        self._queues = [Queue(name, connection=connection) for name in queues]

    @as_redis_unavailable()
    def read(self) -> list[QueueDepth]:
        """In the order of the queues' priority; two round trips. Raises `RedisUnavailable` if the server is away."""
        with self._connection.pipeline(transaction=False) as pipeline:
            for queue in self._queues:
                pipeline.llen(queue.key)
                pipeline.lrange(queue.key, 0, _LOOKED_AT - 1)
            replies = pipeline.execute()
            heads = replies[1::2]
            for job_id in (job_id for head in heads for job_id in head):
                pipeline.hget(raw(Job.key_for(text(job_id))), "enqueued_at")
            stamps = iter(pipeline.execute(raise_on_error=False))
        now = datetime.now(UTC)
        waits = [max((_wait_s(next(stamps), now) for _ in head), default=0.0) for head in heads]
        return [
            QueueDepth(queue.name, waiting, wait_s)
            for queue, waiting, wait_s in zip(self._queues, replies[::2], waits, strict=True)
        ]

    def close(self) -> None:
        self._connection.close()


def _wait_s(enqueued_at: object, now: datetime) -> float:
    if not isinstance(enqueued_at, bytes):  # the job is gone, or its key is another client's
        return 0.0
    with suppress(ValueError):
        return max(0.0, (now - utcparse(enqueued_at.decode())).total_seconds())
    return 0.0
