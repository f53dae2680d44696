"""How many jobs wait in each queue, for how long, and in which of them for no worker. Any thread; reads only.

Owns a connection of its own with a short time limit: a request for metrics delays neither the fetcher nor the
heartbeat, and a server that hangs is not waited for.
"""

from contextlib import suppress
from datetime import UTC, datetime
from typing import Final, cast

from redis import Redis
from redis.exceptions import ResponseError
from rq.job import Job
from rq.queue import Queue
from rq.utils import utcparse
from rq.worker_registration import REDIS_WORKER_KEYS

from stoker_worker.ports import QueueDepth
from stoker_worker.queue.client import as_redis_unavailable
from stoker_worker.queue.json_job import raw, text

_LOOKED_AT: Final = 100
"""The oldest job is searched among this many at the front: newer ones may have been put before it."""

_MOST_QUEUES: Final = 100
"""Without a worker: whoever may enqueue can make queues, and each is a series in Prometheus."""

_QUEUE: Final = Queue.redis_queue_namespace_prefix.encode()
_WORKERS: Final = f"{REDIS_WORKER_KEYS}:".encode()


class QueueDepths:
    def __init__(self, connection: Redis, queues: list[str]) -> None:
        """
        Args:
            connection: used by nothing else.
        """
        self._connection = connection
        self._queues = [Queue(name, connection=connection) for name in queues]

    @as_redis_unavailable()
    def read(self) -> list[QueueDepth]:
        """In the order of the queues' priority, in two round trips.

        Raises:
            RedisUnavailable: the server is away.
        """
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

    @as_redis_unavailable()
    def without_worker(self) -> dict[str, int]:
        """The jobs by queue that no live worker will take, in three round trips: the 100 queues with most, of the whole
        server.

        Raises:
            RedisUnavailable: the server is away.
        """
        keys: set[bytes] = set()
        with suppress(ResponseError):  # anybody may have put another type there
            keys = cast(set[bytes], self._connection.smembers(Queue.redis_queues_keys))
        queues = [key.removeprefix(_QUEUE) for key in keys]
        with self._connection.pipeline(transaction=False) as pipeline:
            for queue in queues:
                pipeline.llen(_QUEUE + queue)
                pipeline.smembers(_WORKERS + queue)
            replies = pipeline.execute(raise_on_error=False)
            waiting = [
                (n_jobs, queue.decode(errors="replace"), workers)
                for queue, n_jobs, workers in zip(queues, replies[::2], replies[1::2], strict=True)
                if isinstance(n_jobs, int) and n_jobs and isinstance(workers, set)
            ]
            for _, _, workers in waiting:
                pipeline.exists(_WORKERS, *workers)  # a killed worker is still in the set, but its own key has expired
            alive = pipeline.execute(raise_on_error=False)
        unheard = sorted((n_jobs, queue) for (n_jobs, queue, _), n in zip(waiting, alive, strict=True) if n == 0)
        return {queue: n_jobs for n_jobs, queue in unheard[-_MOST_QUEUES:]}

    def close(self) -> None:
        self._connection.close()


def _wait_s(enqueued_at: object, now: datetime) -> float:
    if not isinstance(enqueued_at, bytes):  # the job is gone, or its key is another client's
        return 0.0
    with suppress(ValueError):
        return max(0.0, (now - utcparse(enqueued_at.decode())).total_seconds())
    return 0.0
