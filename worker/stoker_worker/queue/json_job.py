"""An RQ job whose payload is read as JSON only. Owns which fields of a job's hash are read, and how; any thread."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rq.executions import Execution, ExecutionRegistry
from rq.job import Job, JobStatus
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer
from rq.utils import str_to_date

from stoker_shared.agents import AgentRequest, build_agent_request
from stoker_shared.errors import PayloadRefused, RequestTooLarge
from stoker_shared.job_data import MAX_DATA_BYTES, read_json, unpacked
from stoker_shared.request import GenerationRequest, build_request, request_digest
from stoker_shared.wire import (
    AGENT_TASK_PATH,
    FIELD_ATTEMPTS,
    FIELD_BATCH,
    FIELD_LOST_ALONE,
    FIELD_PACKED,
    FIELD_SAVING,
    FIELD_STREAM,
    FIELD_TRIED,
    MAX_REQUEST_BYTES,
    PACKED_WITH_ZLIB,
    REQUEST_KWARG,
    TASK_PATH,
)
from stoker_worker.placement.placement import Writes


def text(job_id: bytes) -> str:
    """The id as text. Bytes that are no UTF-8 come back unchanged from `raw`."""
    return job_id.decode(errors="surrogateescape")


def raw(job_id: str) -> bytes:
    """The bytes of an id, or of a whole key that contains one."""
    return job_id.encode(errors="surrogateescape")


_UNREADABLE = "<unreadable>"
_RQS_TIME: Final = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
_OF_RQ: Final = re.compile(r"[A-Za-z0-9_-]+")
_MOST: Final = 10**15
"""The largest number in a field, a count or seconds. Servers can add so many seconds to the time."""
_MOST_WAITED_S: Final = 9_000_000_000
"""285 years, which Python can add to a date."""

OF_THE_RUN: Final = (FIELD_ATTEMPTS, FIELD_LOST_ALONE, FIELD_SAVING)
"""Fields that a job's hash loses when a run of it ends, unless the job is put back."""

MOST_BYTES: Final = 2 * MAX_DATA_BYTES
"""Limit for the stored bytes of all fields that are read."""


class _Json(JSONSerializer):
    """RQ's JSON serializer, within the limits of `read_json`."""

    @staticmethod
    def loads(s: bytes, *args: Any, **options: Any) -> Any:
        return read_json(s, MAX_DATA_BYTES)


class JsonJob(Job):
    """A job read without unpickling, and without importing anything that it names.

    An unreadable payload raises nothing, because RQ's bookkeeping would break off: the job then looks like a call of an
    unknown function without arguments, and `read_request` raises the reason. The stored bytes stay as they are.
    """

    payload_error: Exception | None = None
    worker_losses: int = 0  # how many workers were lost with this job in flight
    losses_alone: int = 0  # how many of those had no other job in flight
    is_listened_to: bool = False  # a reader wants the text as it is generated
    raw_meta: bytes = b""  # as far as this worker knows
    has_ended: bool = False  # this run of it has
    has_dependencies: bool = False
    has_webhooks: bool = False
    has_run_fields: bool = False  # its hash may have one of `OF_THE_RUN`
    raw_created_at: str = ""  # RQ replaces a missing value by the time of reading, which would identify no delivery
    packs_result: bool = False  # its producer wants a compressed result
    tried: str = ""  # its `FIELD_TRIED`
    was_saving: bool = False  # an earlier run of this delivery had begun to save its turn
    data_hash: bytes = b""  # the `hash_of` the data, unpacked

    def restore(self, raw_data: Any) -> Any:
        # First of all: RQ restores `meta` and old results with the serializer, which is pickle by default.
        self.serializer = _Json
        too_long = {name for name, value in raw_data.items() if isinstance(value, int)}
        raw_data = {name: value for name, value in raw_data.items() if name not in too_long}
        data = b"" if b"data" in too_long else raw_data.get(b"data", b"")
        malformed = _malformed(raw_data) | too_long - {b"data"}
        if malformed:
            names = ", ".join(sorted(name.decode() for name in malformed))
            self.payload_error = PayloadRefused(f"the job's hash is malformed: {names}")
        if b"data" in too_long or len(unpacked(data)) > MAX_DATA_BYTES:
            self.payload_error = RequestTooLarge(f"the request is over the limit of {MAX_REQUEST_BYTES} bytes")
            data = b"[]"
        known = (name for name in (b"meta", *_FORMS) if raw_data.get(name) and name not in malformed)
        fields = {name: raw_data[name] for name in known}
        times = {name: fields.pop(name.encode()) for name in _TIMES if name.encode() in fields}
        super().restore(fields | {b"data": data})
        for name, value in times.items():
            setattr(self, name, _time_in(value))
        self.data_hash = hash_of(self.data)
        self.worker_losses = as_count(raw_data.get(FIELD_ATTEMPTS.encode()))
        self.losses_alone = as_count(raw_data.get(FIELD_LOST_ALONE.encode()))
        self.is_listened_to = FIELD_STREAM.encode() in raw_data
        self.has_run_fields = any(name.encode() in raw_data for name in OF_THE_RUN)
        self.has_dependencies, self.has_webhooks = (bool(raw_data.get(name)) for name in _SEEN)
        self.raw_meta = raw_data.get(b"meta", b"")
        self.packs_result = raw_data.get(FIELD_PACKED.encode()) == PACKED_WITH_ZLIB.encode()
        self.raw_created_at = raw_data.get(b"created_at", b"").decode(errors="replace")
        saving = raw_data.get(FIELD_SAVING.encode(), b"").decode(errors="replace")
        self.was_saving = saving == (self.raw_created_at or "-")
        self.tried = raw_data.get(FIELD_TRIED.encode(), b"").decode(errors="replace")

    def to_dict(self, include_meta: bool = True, include_result: bool = True) -> dict[str, Any]:
        """The fields RQ writes back, without the payload, which may have megabytes and is never changed."""
        fields: dict[str, Any] = super().to_dict(include_meta, include_result)
        del fields["data"]
        return fields

    def _deserialize_data(self) -> None:
        try:
            self._func_name, self._instance, self._args, self._kwargs = read_json(self.data, MAX_DATA_BYTES)
        except RequestTooLarge as error:
            self.payload_error = self.payload_error or error
            self._func_name, self._instance, self._args, self._kwargs = _UNREADABLE, None, [], {}
        except (ValueError, TypeError, RecursionError):
            what = "a pickle" if self.data[:1] == b"\x80" else "not RQ's JSON form"
            self.payload_error = self.payload_error or PayloadRefused(
                f"the job's data is {what}: enqueue with serializer=JSONSerializer"
            )
            self._func_name, self._instance, self._args, self._kwargs = _UNREADABLE, None, [], {}

    def read_request(self) -> GenerationRequest | AgentRequest:
        """The request of this job.

        Raises:
            PayloadRefused: the job is no JSON job for this worker, or has callbacks, webhooks, repeats or a rate limit.
            RequestError: the request is not valid.
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
            if path:
                raise PayloadRefused(
                    f"this worker runs no callbacks, and the job has {name}, {path[:200]!r}: enqueue a job that "
                    "depends on this one"
                )
        if self.has_webhooks:
            raise PayloadRefused("this worker sends no webhooks, and the job has webhooks")
        if self.repeats_left:
            raise PayloadRefused("this worker repeats no jobs, and the job has repeats: submit one job for each run")
        if self.rate_limit_key:
            raise PayloadRefused(f"this worker keeps no rate limits, and the job has {self.rate_limit_key[:200]!r}")
        request = kwargs.get(REQUEST_KWARG) if isinstance(kwargs, dict) else None
        if args or not isinstance(request, dict) or len(kwargs) != 1:
            raise PayloadRefused(f"{func_name} takes exactly one argument, {REQUEST_KWARG}={{...}}")
        return build_request(request) if func_name == TASK_PATH else build_agent_request(request)

    def drop_data(self) -> None:
        """Keep only the arguments, so that a job in flight holds its megabytes once. Call `read_request` first."""
        self._data = b""

    def digest(self) -> str:
        """The digest of the request, the same for every delivery of it. Call `read_request` first.

        Raises:
            PayloadRefused: the request is nested too deeply.
        """
        try:
            return request_digest(self.kwargs[REQUEST_KWARG])
        except (ValueError, RecursionError):
            raise PayloadRefused("the request is nested too deeply") from None


def fields_in(values: Sequence[bytes | int | None]) -> dict[bytes, bytes | int]:
    """The fields for `JsonJob.restore`, from the values of `READ_FIELDS`; an ``int`` is the length of one too long."""
    named = zip(READ_FIELDS, values, strict=True)
    return {name: value for name, value in named if value is not None}


def hash_of(data: bytes) -> bytes:
    """The SHA-1 of a job's unpacked data."""
    return hashlib.sha1(data, usedforsecurity=False).digest()


def delivery_stamp(created_at: bytes, data: bytes) -> str:
    """A value that differs between the deliveries of one id, in hex. `delivery` in `lua/` computes the same."""
    return hashlib.sha1(created_at + b"\0" + data, usedforsecurity=False).hexdigest()


def as_count(value: bytes | None) -> int:
    """A counter field of a job's hash; 0 if it is missing or holds something else."""
    return int(value) if value is not None and value.isdigit() and len(value) < 10 else 0


def is_rqs(job_id: object) -> bool:
    """True if RQ can fetch a job of this id, and tell its executions from those of others."""
    return isinstance(job_id, str) and _OF_RQ.fullmatch(job_id) is not None


def _malformed(raw: Mapping[bytes, bytes]) -> set[bytes]:
    """The fields that RQ cannot decode, or would decode to another type than it expects later."""
    return {name for name, has_form in _FORMS.items() if (value := raw.get(name)) and not _passes(has_form, value)}


def _passes(has_form: Callable[[bytes], object], value: bytes) -> bool:
    try:
        return bool(has_form(value))
    except Exception:  # any field may hold anything
        return False


def _is_text(value: bytes) -> bool:
    return _passes(lambda text: text.decode() or True, value)


def _time_in(value: bytes) -> datetime:
    """As RQ's `str_to_date`, in a tenth of the time where the form is RQ's own."""
    if _RQS_TIME.fullmatch(value):
        return datetime.fromisoformat(value.decode())
    return str_to_date(value)


def _is_time(value: bytes) -> bool:
    return abs(_time_in(value).timestamp()) < 1e12


def _is_number(value: bytes) -> bool:
    return abs(int(value)) <= _MOST


def _are_intervals(value: bytes) -> bool:
    found = read_json(value)
    return found is None or (
        isinstance(found, list) and all(type(each) in (int, float) and 0 <= each <= _MOST_WAITED_S for each in found)
    )


_TEXTS: Final = (
    *("origin", "worker_name", "description", "group_id", "rate_limit_key"),
    *("success_callback_name", "failure_callback_name", "stopped_callback_name"),
)
_TIMES: Final = ("created_at", "enqueued_at", "started_at", "ended_at", "last_heartbeat")
_NUMBERS: Final = (
    *("timeout", "result_ttl", "failure_ttl", "ttl", "number_of_retries", "retries_left", "repeats_left"),
    *("enqueue_at_front", "enqueue_at_front_on_retry"),
)
_FORMS: Final[Mapping[bytes, Callable[[bytes], object]]] = {
    **{name.encode(): _is_text for name in _TEXTS},
    **{name.encode(): _is_time for name in _TIMES},
    **{name.encode(): _is_number for name in _NUMBERS},
    b"status": lambda value: JobStatus(value.decode()),
    b"retry_intervals": lambda value: _are_intervals(value) and read_json(value) != [],
}
"""A check of each field that RQ decodes. Nearly everywhere, RQ reads an empty field as a missing one."""

_SEEN: Final = (b"dependency_ids", b"webhooks")
"""Fields of which it only matters whether they are set."""

_OURS: Final = (FIELD_ATTEMPTS, FIELD_LOST_ALONE, FIELD_STREAM, FIELD_PACKED, FIELD_SAVING, FIELD_BATCH, FIELD_TRIED)
READ_FIELDS: Final = (b"data", b"meta", *_FORMS, *_SEEN, *(name.encode() for name in _OURS))
"""The fields that are read. Nothing here needs an old result or failure, which may unpack to gigabytes."""


def keys_of(queue: str, execution: Execution) -> list[bytes]:
    """The keys of a run: the job, the execution, and the registries of its queue, its job and its worker."""
    connection, job_id = execution.connection, execution.job_id
    wip, of_job = StartedJobRegistry(queue, connection=connection), ExecutionRegistry(job_id, connection=connection)
    return [*map(raw, (Job.key_for(job_id), execution.key, wip.key, of_job.key, execution.worker_executions_key))]


@dataclass(frozen=True)
class JobRun:
    """RQ's record of a job, and of this execution of it. `writes`: the agents that the job writes, if it writes any."""

    job: JsonJob
    execution: Execution
    writes: Writes | None = None

    @property
    def keys(self) -> list[bytes]:
        return keys_of(self.job.origin, self.execution)
