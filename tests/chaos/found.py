"""The state of each job after a chaos run, read from Redis, with the deliveries that were sent. Judges nothing."""

import json
import zlib
from base64 import b64decode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis
from tests.chaos.deliveries import Delivery
from tests.chaos.plan import QUEUES, PlannedJob
from tests.chaos.redis_view import claimed_keys

REGISTRIES = ("wip", "finished", "failed", "canceled", "scheduled", "deferred", "ready")
SUCCESSFUL = b"1"
_KEY = "rq:job:"


@dataclass
class Found:
    """A job id as found after the run; `state` is ``None`` where its hash is gone.

    Attributes:
        current: the delivery that the hash belongs to; of several sends, the last to arrive.
        superseded: the deliveries that had the id before.
        places: every list and registry with the id, once for each occurrence.
        entries: the result stream, oldest first.
    """

    job_id: str
    current: Delivery
    superseded: list[Delivery]
    state: str | None
    places: list[str]
    entries: list[dict[bytes, bytes]]
    reason: str

    @property
    def plan(self) -> PlannedJob:
        return self.current.job

    @property
    def came_once(self) -> bool:
        """Whether only its first sender has sent it."""
        return not (self.superseded or self.plan.again)

    @property
    def results(self) -> list[dict[str, Any]]:
        return [json.loads(b64decode(entry[b"return_value"])) for entry in self.entries if entry[b"type"] == SUCCESSFUL]

    def results_of(self, plan: PlannedJob) -> list[dict[str, Any]]:
        return [result for result in self.results if result["metadata"]["job"] == plan.name]

    @property
    def result(self) -> dict[str, Any]:
        """The newest result."""
        assert self.entries[-1][b"type"] == SUCCESSFUL, self
        return self.results[-1]


@dataclass(frozen=True)
class Record:
    """A job's hash: its state, its creation time, and the name in its request."""

    state: str
    created_at: str
    name: str


def find_jobs(connection: Redis, sent: Sequence[Delivery]) -> list[Found]:
    """Every id that arrived. A delivery in doubt arrived completely or not at all."""
    records, places = _records(connection), places_of_all(connection)
    by_id: dict[str, list[Delivery]] = {}
    for delivery in sent:
        by_id.setdefault(delivery.job_id, []).append(delivery)
    found = [_find(connection, job_id, of, records.get(job_id), places) for job_id, of in by_id.items()]
    return [job for job in found if job.state is not None or job.current.is_acknowledged]


def _find(
    connection: Redis, job_id: str, sent: list[Delivery], record: Record | None, places: dict[str, list[str]]
) -> Found:
    with connection.pipeline(transaction=False) as pipeline:
        pipeline.xrange(f"rq:results:{job_id}")
        [stream] = pipeline.execute()
    entries = [entry for _, entry in stream]
    failures = [entry[b"exc_string"] for entry in entries if b"exc_string" in entry]
    reason = zlib.decompress(b64decode(failures[-1])).decode() if failures else ""
    current = next((delivery for delivery in reversed(sent) if record and _is_of(delivery, record)), sent[-1])
    before = sent[: next(at for at, delivery in enumerate(sent) if delivery is current)]
    return Found(job_id, current, before, record.state if record else None, places.get(job_id, []), entries, reason)


def _is_of(delivery: Delivery, record: Record) -> bool:
    return delivery.job.name == record.name and delivery.created_at in {None, record.created_at}


def _records(connection: Redis) -> dict[str, Record]:
    keys = list(connection.scan_iter(match=f"{_KEY}*", count=1000))
    with connection.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.hmget(key, "status", "created_at", "data")
        replies = pipeline.execute(raise_on_error=False)
    return {
        key.decode().removeprefix(_KEY): Record(status.decode(), created_at.decode(), _name_in(data))
        for key, reply in zip(keys, replies, strict=True)
        if not isinstance(reply, Exception)  # the sets of dependents and dependencies
        for status, created_at, data in [reply]
    }


def _name_in(data: bytes) -> str:
    name: str = json.loads(zlib.decompress(data))[3]["request"]["metadata"]["job"]
    return name


def places_of_all(connection: Redis) -> dict[str, list[str]]:
    """Every list and registry that has an id, once for each occurrence."""
    found: dict[str, list[str]] = {}
    for place, entries in _places(connection):
        for entry in entries:
            found.setdefault(entry.decode().split(":")[0], []).append(place)
    return found


def _places(connection: Redis) -> Iterable[tuple[str, list[Any]]]:
    for key in (*(f"rq:queue:{queue}" for queue in QUEUES), *claimed_keys(connection)):
        yield f"list:{key}", connection.lrange(key, 0, -1)
    for queue in QUEUES:
        for kind in REGISTRIES:
            yield f"{kind}:{queue}", connection.zrange(f"rq:{kind}:{queue}", 0, -1)
