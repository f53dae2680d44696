"""The state in Redis during a chaos run, read through a connection of its own that loses nothing."""

from collections import Counter
from collections.abc import Iterable

from redis import Redis
from tests.chaos.plan import QUEUES

from stoker_shared.wire import FIELD_LOST_ALONE


class RedisView:
    def __init__(self, connection: Redis) -> None:
        self.connection = connection

    def left(self) -> list[str]:
        """The jobs that have not ended, at one instant, without deferred jobs that can never run."""
        zsets = [f"rq:{kind}:{queue}" for queue in QUEUES for kind in ("wip", "scheduled", "ready")]
        lists = [f"rq:queue:{queue}" for queue in QUEUES]
        with self.connection.pipeline(transaction=True) as pipeline:
            for key in zsets:
                pipeline.zrange(key, 0, -1)
            for key in lists:
                pipeline.lrange(key, 0, -1)
            replies = pipeline.execute()
        return [
            f"{entry.decode()} in {key}" for key, found in zip(zsets + lists, replies, strict=True) for entry in found
        ]

    def started(self) -> list[tuple[str, str]]:
        """Job ids with their workers' names."""
        keys = [key for queue in QUEUES for key in self.connection.zrange(f"rq:wip:{queue}", 0, -1)]
        owners = [self.connection.hget(f"rq:execution:{key.decode()}", "worker_name") or b"" for key in keys]
        return [(key.decode().split(":")[0], owner.decode()) for key, owner in zip(keys, owners, strict=True)]

    def in_flight(self, worker_name: str | None) -> list[str]:
        return [job_id for job_id, owner in self.started() if owner == worker_name]

    def workers(self) -> list[str]:
        """The keys of the workers that RQ's tools know of."""
        return [key.decode() for key in self.connection.smembers("rq:workers")]

    def lost_alone(self, job_id: str) -> int:
        """How many workers were lost while the job ran alone, by the count in its hash."""
        return int(self.connection.hget(f"rq:job:{job_id}", FIELD_LOST_ALONE) or 0)

    def states(self, job_ids: Iterable[str]) -> list[str | None]:
        found = [self.connection.hget(f"rq:job:{job_id}", "status") for job_id in job_ids]
        return [state.decode() if state else None for state in found]

    def results_of(self, worker_name: str | None, job_ids: Iterable[str]) -> Counter[str]:
        """How many results of each job came from that worker."""
        job_ids = list(job_ids)
        with self.connection.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                pipeline.xrange(f"rq:results:{job_id}")
            streams = pipeline.execute()
        name = (worker_name or "").encode()
        return Counter(
            job_id
            for job_id, stream in zip(job_ids, streams, strict=True)
            for _, entry in stream
            if entry[b"worker_name"] == name
        )
