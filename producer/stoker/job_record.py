"""A job as Redis has it, read without unpickling or importing what it names; and RQ's keys. Reads only.

Reading the keys directly, instead of through `rq.job.Job`, takes one round trip, does not transfer the request (up to
megabytes), and works for jobs of any client in any language.
"""

import json
from base64 import b64decode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from pydantic import BaseModel
from redis import Redis
from rq.job import Job, JobStatus
from rq.queue import Queue
from rq.registry import BaseRegistry, CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry
from rq.results import Result

from stoker.operations import Command, Commands, Entries, Operation
from stoker_shared.errors import JobCanceled, JobFailed, JobNotFound
from stoker_shared.job_data import MAX_REASON_BYTES, MAX_RESULT_BYTES, read_json, unpacked
from stoker_shared.result import GenerationResult
from stoker_shared.wire import META_PARTIAL, META_PROGRESS

NO_CONNECTION = Redis()
"""For classes of RQ that need a connection but only compute here. It never connects."""


def queue_key(queue: str) -> str:
    """Key of the list of waiting jobs' ids."""
    return str(Queue(queue, connection=NO_CONNECTION).key)


def registry_key(registry: type[BaseRegistry], queue: str) -> str:
    """Key of a registry's sorted set of ids."""
    return str(registry(queue, connection=NO_CONNECTION).key)


ResultT = TypeVar("ResultT", bound=BaseModel)

ENDED = frozenset(str(s.value) for s in (JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED))
ENDED_REGISTRIES = (FinishedJobRegistry, FailedJobRegistry, CanceledJobRegistry)
NO_ENTRY = "0-0"
_FIELDS = ("status", "origin", "worker_name", "meta", "exc_info")
KEPT_RESULTS = 10  # RQ trims the stream to this many
_MAX_REASON_CHARACTERS = 2000
_SUCCESS = (Result.Type.SUCCESSFUL,)
_FAILURE = (Result.Type.FAILED, Result.Type.MAX_RETRIES_EXCEEDED)
_TYPES_OF_END = {JobStatus.FINISHED.value: _SUCCESS, JobStatus.FAILED.value: _FAILURE}


def is_end(status: bytes) -> bool:
    """True if a job whose hash has this `status` has ended."""
    return status.decode(errors="replace") in ENDED


@dataclass(frozen=True)
class JobProgress:
    """A running job's progress, as its worker wrote it."""

    stage: str
    tokens: int
    tokens_per_s: float


@dataclass(frozen=True)
class JobRecord:
    """A job's hash and the newest entries of its result stream. Also of a job that does not exist (any more).

    Attributes:
        state: empty if there is no such job.
        last_entry_id: the newest entry's id, if any.
    """

    job_id: str
    state: str
    queue: str
    worker: str | None
    progress: JobProgress | None
    partial_text: str | None
    last_entry_id: str | None
    _exc_info: bytes
    _results: tuple[dict[bytes, bytes], ...]

    @classmethod
    def read(cls, job_id: str) -> Operation[Self]:
        # The hash first: a job's end is written to it and to its stream at once, so an ended job has its entry. Not a
        # transaction, because Redis 7.0 refuses one while it is full, even for reading.
        newest_results = ("XREVRANGE", Result.get_key(job_id), "+", "-", "COUNT", KEPT_RESULTS)
        values, entries = yield Commands([cls.hash_command(job_id), newest_results])
        return cls.from_replies(job_id, values, entries)

    @staticmethod
    def hash_command(job_id: str) -> Command:
        """The command whose reply `from_replies` takes."""
        return ("HMGET", Job.key_for(job_id), *_FIELDS)

    @classmethod
    def from_replies(cls, job_id: str, values: Sequence[bytes | None], entries: Entries) -> Self:
        """From the reply to `hash_command`, and entries of the job's result stream, the newest first."""
        status, origin, worker, meta, exc_info = (value or b"" for value in values)
        fields = fields_of(meta)
        return cls(
            job_id=job_id,
            state=status.decode(errors="replace"),
            queue=origin.decode(errors="replace"),
            worker=worker.decode(errors="replace") or None,
            progress=progress_in(fields) if status == b"started" else None,
            partial_text=partial if isinstance(partial := fields.get(META_PARTIAL), str) else None,
            last_entry_id=entries[0][0].decode() if entries else None,
            _exc_info=exc_info,
            _results=tuple(fields for _, fields in entries),
        )

    @classmethod
    def whole(cls, job_id: str, values: Sequence[bytes | None], entries: Entries) -> Operation[Self]:
        """As `from_replies`; reads again if the job has ended and the entry of its end is not among `entries`."""
        record = cls.from_replies(job_id, values, entries)
        if record.state not in _TYPES_OF_END or record._newest(*_TYPES_OF_END[record.state]):
            return record
        return (yield from cls.read(job_id))

    @classmethod
    def finished(cls, job_id: str, entries: Entries) -> Self | None:
        """The record of a finished job, from its entries alone; ``None`` if the newest one is not that of a success.
        The entries must be newer than the beginning of the wait for the job."""
        newest = entries[0][1]
        if newest.get(b"type") != str(Result.Type.SUCCESSFUL.value).encode():
            return None
        known = {"status": b"finished", "worker_name": newest.get(b"worker_name")}
        return cls.from_replies(job_id, [known.get(name) for name in _FIELDS], entries)

    @property
    def has_ended(self) -> bool:
        """Also true if there is no such job."""
        # The hash decides: retries, requeues and stops leave entries in the stream that are not the job's end.
        return not self.state or self.state in ENDED

    def outcome(self) -> GenerationResult:
        """The result of the job, which has ended.

        Raises:
            JobFailed: the job failed, or its return value is not a generation result.
            JobCanceled: it was canceled, or stopped by RQ's command.
            JobNotFound: there is no such job, or it finished, but its result has expired.
        """
        return self._returned(GenerationResult, "a generation result")

    def agent_outcome(self, kind: type[ResultT]) -> ResultT:
        """As `outcome`, for a job about an agent's memory whose result is of this kind."""
        return self._returned(kind, "a result of this kind about an agent")

    def _returned(self, kind: type[ResultT], expected: str) -> ResultT:
        if not self.state:
            raise JobNotFound(self.job_id)
        if self.state == JobStatus.FAILED.value:
            raise JobFailed(self.job_id, self.reason(), self.partial_text)
        if self.state != JobStatus.FINISHED.value:
            stopped = self.state == JobStatus.STOPPED.value
            raise JobCanceled(self.job_id, "stopped while it ran" if stopped else "canceled")
        fields = self._newest(*_SUCCESS)
        if fields is None:
            raise JobNotFound(self.job_id, "finished, but its result has expired")
        try:
            return kind.model_validate(json.loads(unpacked(b64decode(fields[b"return_value"]), MAX_RESULT_BYTES)))
        except (KeyError, ValueError, RecursionError):
            raise JobFailed(self.job_id, f"UnreadableResult: it did not return {expected}") from None

    def reason(self) -> str:
        """The failure's last line: stoker's workers write only one, and RQ's end a traceback with the reason."""
        fields = self._newest(*_FAILURE) or {}
        text = ""
        with suppress(ValueError):  # not base64
            text = _failure_text(b64decode(fields.get(b"exc_string", b"")))
        lines = [line.strip() for line in (text or _failure_text(self._exc_info)).splitlines() if line.strip()]
        return lines[-1][:_MAX_REASON_CHARACTERS] if lines else "the worker gave no reason"

    def _newest(self, *types: Any) -> dict[bytes, bytes] | None:
        wanted = {str(kind.value).encode() for kind in types}
        return next((fields for fields in self._results if fields.get(b"type") in wanted), None)


def fields_of(meta: bytes) -> dict[str, Any]:
    """A job's `meta`; empty if it is not a JSON object."""
    try:
        fields = read_json(meta)
    except (ValueError, RecursionError):  # empty, a pickle, or too large
        return {}
    return fields if isinstance(fields, dict) else {}


def progress_in(fields: dict[str, Any]) -> JobProgress | None:
    """The progress in the `meta` of a running job; ``None`` if there is none yet."""
    try:
        shown = fields[META_PROGRESS]
        return JobProgress(str(shown["stage"]), int(shown["tokens"]), float(shown["tokens_per_s"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _failure_text(data: bytes) -> str:
    return unpacked(data, MAX_REASON_BYTES).decode(errors="replace")
