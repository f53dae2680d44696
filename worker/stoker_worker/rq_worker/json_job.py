"""An RQ job whose payload is only ever read as JSON. Owns what is read off a job's hash; any thread."""

import hashlib
import json
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from typing import Any, Final

from redis import Redis
from redis.client import Pipeline
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from stoker_shared.agent_request import AgentRequest, build_agent_request
from stoker_shared.errors import PayloadRefused, RequestTooLarge
from stoker_shared.job_data import MAX_DATA_BYTES, unpacked
from stoker_shared.request import Access, GenerationRequest, build_request, request_digest
from stoker_shared.wire import (
    AGENT_TASK_PATH,
    FIELD_ATTEMPTS,
    FIELD_LOST_ALONE,
    FIELD_PACKED,
    FIELD_STREAM,
    MAX_REQUEST_BYTES,
    META_PROGRESS,
    PACKED_WITH_ZLIB,
    REQUEST_KWARG,
    TASK_PATH,
)
from stoker_worker.ports import UNUSED, MemoryUse

_UNREADABLE = "<unreadable>"
_WAITING: Final = (JobStatus.DEFERRED, JobStatus.READY_TO_ENQUEUE)


class JsonJob(Job):
    """A job read without unpickling and without importing anything it names.

    What cannot be read does not raise where RQ's bookkeeping would trip over it: the job then looks like a call of
    nothing with no arguments, and `read_request` raises what is wrong. The stored bytes stay as they are.
    """

    payload_error: Exception | None = None
    deaths: int = 0
    """Workers that died with this job in flight."""
    lost_alone: int = 0
    """Those of them that ran nothing else."""
    check: Callable[[Pipeline], None] | None = None
    """Called once, with the transaction in which RQ ends the job, before anything stands in it."""
    write_note: Callable[[Pipeline], None] | None = None
    """Called with that transaction once more, when it is nearly whole."""
    is_listened_to: bool = False
    """Somebody wants to read its text as it is generated."""
    has_progress: bool = False
    """Its `meta` tells how far it is."""
    raw_created_at: str = ""  # RQ fills a missing one with the time of reading, which no delivery could be known by
    raw_repeats_left: bytes = b""
    packs_result: bool = False
    """Whether its producer asked for a compressed result."""
    stamp: str = ""
    """`delivery_stamp` of the hash as it was read."""

    def restore(self, raw_data: Any) -> Any:
        # Before anything is read: RQ restores `meta` and old results with it, and its default is pickle.
        self.serializer = JSONSerializer
        data = raw_data.get(b"data", b"")
        self.raw_repeats_left = raw_data.get(b"repeats_left", b"")
        self.stamp = delivery_stamp(raw_data.get(b"created_at", b""), self.raw_repeats_left, data)
        text = unpacked(data)
        if len(text) > MAX_DATA_BYTES:
            self.payload_error = RequestTooLarge(f"the request is over the limit of {MAX_REQUEST_BYTES} bytes")
            raw_data = {**raw_data, b"data": b"[]"}
        super().restore(raw_data)
        self.deaths = as_count(raw_data.get(FIELD_ATTEMPTS.encode()))
        self.lost_alone = as_count(raw_data.get(FIELD_LOST_ALONE.encode()))
        self.is_listened_to = FIELD_STREAM.encode() in raw_data
        # Of a run before, whose worker died.
        self.has_progress = isinstance(self.meta, dict) and META_PROGRESS in self.meta
        self.packs_result = raw_data.get(FIELD_PACKED.encode()) == PACKED_WITH_ZLIB.encode()
        self.raw_created_at = raw_data.get(b"created_at", b"").decode(errors="replace")

    def to_dict(self, include_meta: bool = True, include_result: bool = True) -> dict[str, Any]:
        """What RQ writes back, without the payload: that is megabytes at times, and never ours to change."""
        fields: dict[str, Any] = super().to_dict(include_meta, include_result)
        del fields["data"]
        return fields

    def set_status(self, status: JobStatus, pipeline: Pipeline | None = None) -> None:
        """RQ's retry says `scheduled` before its transaction puts the job into the registry; a worker that dies in
        between would leave it nowhere. The transaction says it again, and that is the one that counts."""
        if pipeline is not None:
            self.check_once(pipeline)
        if pipeline is None and status == JobStatus.SCHEDULED:
            self._status = status
        else:
            super().set_status(status, pipeline)

    @classmethod
    def fetch_many(cls, job_ids: Iterable[str], connection: Redis, serializer: Any = None) -> list[Job | None]:
        """``None`` also for one that cannot be read: it must not keep the others from being enqueued, nor fail the job
        they wait for."""
        ids = list(job_ids)
        with connection.pipeline(transaction=False) as pipeline:
            for job_id in ids:
                pipeline.hgetall(cls.key_for(job_id))
            replies = pipeline.execute(raise_on_error=False)
        found: list[Job | None] = []
        for job_id, fields in zip(ids, replies, strict=True):
            job = None
            if fields and not isinstance(fields, Exception):
                with suppress(Exception):  # any field may hold anything
                    read = cls(job_id, connection=connection, serializer=serializer)
                    read.restore(fields)
                    job = read
            found.append(job)
        return found

    def dependencies_are_met(self, parent_job: Job | None = None, *args: Any, **options: Any) -> bool:
        """RQ leaves an id that is used again among those that wait for a parent, and would enqueue it once more when
        that one ends; or not end the parent, when the new job waits for none."""
        if self.get_status(refresh=False) not in _WAITING or (
            parent_job is not None and parent_job.id not in self._dependency_ids
        ):
            return False
        return bool(super().dependencies_are_met(parent_job, *args, **options))

    def check_once(self, pipeline: Pipeline) -> None:
        check, self.check = self.check, None
        if check is not None:
            check(pipeline)

    def send_webhooks(self, status: str | JobStatus, *, exc_string: str | None = None) -> None:
        """Nothing: jobs with webhooks are refused, and a refusal must not send one to an address the job names."""

    def _deserialize_data(self) -> None:
        try:
            self._func_name, self._instance, self._args, self._kwargs = json.loads(self.data)
        except (ValueError, TypeError, RecursionError):
            what = "a pickle" if self.data[:1] == b"\x80" else "not RQ's JSON form"
            self.payload_error = self.payload_error or PayloadRefused(
                f"the job's data is {what}: enqueue with serializer=JSONSerializer"
            )
            self._func_name, self._instance, self._args, self._kwargs = _UNREADABLE, None, [], {}

    def read_request(self, *, callbacks: Container[str] = ()) -> GenerationRequest | AgentRequest:
        """The request this job carries.

        Args:
            callbacks: paths of the functions it may name.

        Raises:
            PayloadRefused: it is not a JSON job of ours, or has webhooks, or callbacks that are not allowed.
            RequestError: its request is not valid.
        """
        func_name, args, kwargs = self.func_name, self.args, self.kwargs
        if self.payload_error is not None:
            raise self.payload_error
        if func_name not in (TASK_PATH, AGENT_TASK_PATH):
            ours = f"{TASK_PATH} and {AGENT_TASK_PATH}"
            raise PayloadRefused(f"this worker runs only {ours}, not {str(func_name)[:200]!r}")
        for name, path in (
            ("on_success", self._success_callback_name),
            ("on_failure", self._failure_callback_name),
            ("on_stopped", self._stopped_callback_name),
        ):
            if path and path not in callbacks:
                raise PayloadRefused(
                    f"the job's {name}, {path[:200]!r}, is no function of a module in --allow-callbacks"
                )
        if self.webhooks:
            raise PayloadRefused("this worker sends no webhooks, and the job has webhooks")
        request = kwargs.get(REQUEST_KWARG) if isinstance(kwargs, dict) else None
        if args or not isinstance(request, dict) or len(kwargs) != 1:
            raise PayloadRefused(f"{func_name} takes exactly one argument, {REQUEST_KWARG}={{...}}")
        return build_request(request) if func_name == TASK_PATH else build_agent_request(request)

    def digest(self) -> str:
        """Of the request, which `read_request` has found to be valid; the same for every delivery of it.

        Raises:
            PayloadRefused: it is nested too deeply.
        """
        try:
            return request_digest(self.kwargs[REQUEST_KWARG])
        except (ValueError, RecursionError):
            raise PayloadRefused("the request is nested too deeply") from None


def delivery_stamp(created_at: bytes, repeats_left: bytes, data: bytes) -> str:
    """Tells the deliveries of one id apart: `DELIVERY` in Lua computes the same."""
    return hashlib.sha1(b"\0".join((created_at, repeats_left, data)), usedforsecurity=False).hexdigest()


DELIVERY: Final = """
local function delivery(job)
  local f = redis.call('HMGET', job, 'created_at', 'repeats_left', 'data')
  return redis.sha1hex((f[1] or '') .. '\\0' .. (f[2] or '') .. '\\0' .. (f[3] or ''))
end
"""
"""Lua: the stamp of a job's hash as it is now."""


def memory_use_in(data: bytes | None) -> MemoryUse:
    """Whose memory the job with this stored `data` uses, and how; none where that cannot be read.

    Used to look ahead in the queue: plain RQ producers write it nowhere else.
    """
    try:
        request = json.loads(unpacked(data or b""))[3][REQUEST_KWARG]
        agent_id, cache, action = (request.get(name) for name in ("agent_id", "cache", "action"))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return UNUSED
    access: Access = "none" if cache == "off" else "read" if cache == "read" or action == "info" else "write"
    return MemoryUse.of(access, agent_id if isinstance(agent_id, str) else None)


def as_count(value: bytes | None) -> int:
    """A counter field of a job's hash; 0 when it is missing or holds something else."""
    return int(value) if value is not None and value.isdigit() else 0
