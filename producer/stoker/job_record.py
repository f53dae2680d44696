"""A job as it is in Redis, read without unpickling and without importing anything it names. Reads only.

Owns what each of RQ's keys means. Reading them directly, instead of through `rq.job.Job`, takes one round trip, leaves
the request (up to megabytes) where it is, and works on jobs any client in any language has enqueued.
"""

import json
import zlib
from base64 import b64decode
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ValidationError
from rq.job import Job, JobStatus
from rq.results import Result

from stoker.operations import Command, Commands, Entries, Operation
from stoker_shared.errors import JobCanceled, JobFailed, JobNotFound
from stoker_shared.result import GenerationResult
from stoker_shared.wire import META_PARTIAL, META_PROGRESS

T = TypeVar("T")
AgentT = TypeVar("AgentT", bound=BaseModel)

ENDED = frozenset(str(s.value) for s in (JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED))
NO_ENTRY = "0-0"
_FIELDS = ("status", "origin", "worker_name", "meta", "exc_info")
KEPT_RESULTS = 10  # RQ trims the stream to this many
_MAX_REASON_CHARACTERS = 2000
_SUCCESS = (Result.Type.SUCCESSFUL,)
_FAILURE = (Result.Type.FAILED, Result.Type.MAX_RETRIES_EXCEEDED)


@dataclass(frozen=True)
class JobProgress:
    """How far a running job is, as its worker wrote it."""

    stage: str
    tokens: int
    tokens_per_s: float


@dataclass(frozen=True)
class JobRecord:
    """One consistent reading of a job's hash and result stream; `last_entry_id` is where to wait for the next."""

    job_id: str
    state: str
    queue: str
    worker: str | None
    progress: JobProgress | None
    partial_text: str | None
    last_entry_id: str
    _exc_info: bytes
    _results: tuple[dict[bytes, bytes], ...]

    @classmethod
    def read(cls, job_id: str) -> Operation[Self | None]:
        """``None`` when there is no such job (any more)."""
        newest_results = ("XREVRANGE", Result.get_key(job_id), "+", "-", "COUNT", KEPT_RESULTS)
        values, entries = yield Commands([cls.hash_command(job_id), newest_results], atomic=True)
        return cls.from_replies(job_id, values, entries)

    @staticmethod
    def hash_command(job_id: str) -> Command:
        """Reads of the job's hash what `from_replies` takes."""
        return ("HMGET", Job.key_for(job_id), *_FIELDS)

    @classmethod
    def from_replies(cls, job_id: str, values: Sequence[bytes | None], entries: Entries) -> Self | None:
        """
        Args:
            values: the reply to `hash_command`.
            entries: of the job's result stream, the newest first.
        """
        if values[0] is None:
            return None
        status, origin, worker, meta, exc_info = (value or b"" for value in values)
        fields = fields_of(meta)
        return cls(
            job_id=job_id,
            state=status.decode(errors="replace"),
            queue=origin.decode(errors="replace"),
            worker=worker.decode(errors="replace") or None,
            progress=progress_in(fields),
            partial_text=partial if isinstance(partial := fields.get(META_PARTIAL), str) else None,
            last_entry_id=entries[0][0].decode() if entries else NO_ENTRY,
            _exc_info=exc_info,
            _results=tuple(fields for _, fields in entries),
        )

    @classmethod
    def finished(cls, job_id: str, queue: str | None, entries: Entries) -> Self | None:
        """Of a job that has finished, from its entries alone; ``None`` when the newest does not tell that.

        Only for a job that is not repeated and was waited for when the entry was written.
        """
        newest = entries[0][1]
        if newest.get(b"type") != str(Result.Type.SUCCESSFUL.value).encode():
            return None
        known = {"status": b"finished", "origin": (queue or "").encode(), "worker_name": newest.get(b"worker_name")}
        return cls.from_replies(job_id, [known.get(name) for name in _FIELDS], entries)

    @property
    def has_ended(self) -> bool:
        # The hash decides, not the stream: retries, requeues and stops leave entries there that are not the job's end.
        return self.state in ENDED

    @property
    def is_whole(self) -> bool:
        """Whether the entry of its end is here, of a job that has ended so that there is one."""
        if self.state == JobStatus.FINISHED.value:
            return self._newest(*_SUCCESS) is not None
        return self.state != JobStatus.FAILED.value or self._newest(*_FAILURE) is not None

    def outcome(self) -> GenerationResult:
        """What the job, which has ended, returned.

        Raises:
            JobFailed: with the worker's reason; also when it returned something that is not a generation result.
            JobCanceled: it was canceled, or stopped while it ran.
            JobNotFound: it finished, and its result has expired.
        """
        return self._returned(GenerationResult.model_validate, "a generation result")

    def agent_outcome(self, kind: type[AgentT]) -> AgentT:
        """The same of a job about an agent's memory, whose result is of this kind."""
        return self._returned(kind.model_validate, "a result of this kind about an agent")

    def _returned(self, read: Callable[[Any], T], what: str) -> T:
        if self.state == JobStatus.FAILED.value:
            raise JobFailed(self.job_id, self.reason(), self.partial_text)
        if self.state != JobStatus.FINISHED.value:
            stopped = self.state == JobStatus.STOPPED.value
            raise JobCanceled(self.job_id, "stopped while it ran" if stopped else "canceled")
        fields = self._newest(*_SUCCESS)
        if fields is None:
            raise JobNotFound(self.job_id, "finished, but its result has expired")
        try:
            return read(json.loads(without_packing(b64decode(fields[b"return_value"]))))
        except (KeyError, ValueError, RecursionError, ValidationError):
            raise JobFailed(self.job_id, f"UnreadableResult: it did not return {what}") from None

    def reason(self) -> str:
        """The last line of what the worker wrote: ours is the only one, and a traceback's reason is there."""
        fields = self._newest(*_FAILURE)
        text = _failure_text(b64decode(fields[b"exc_string"])) if fields and b"exc_string" in fields else ""
        lines = [line.strip() for line in (text or _failure_text(self._exc_info)).splitlines() if line.strip()]
        return lines[-1][:_MAX_REASON_CHARACTERS] if lines else "the worker gave no reason"

    def _newest(self, *types: Any) -> dict[bytes, bytes] | None:
        wanted = {str(kind.value).encode() for kind in types}
        return next((fields for fields in self._results if fields.get(b"type") in wanted), None)


def require_readable_id(job_id: str) -> str:
    """
    Raises:
        ValueError: it is empty or holds characters no job id has.
    """
    if not job_id or not job_id.isprintable():
        raise ValueError("a job id is a non-empty printable string")
    return job_id


def fields_of(meta: bytes) -> dict[str, Any]:
    """A job's `meta`; empty where it is something else than a JSON object."""
    try:
        fields = json.loads(meta)
    except (ValueError, RecursionError):  # none, or a pickle
        return {}
    return fields if isinstance(fields, dict) else {}


def progress_in(fields: dict[str, Any]) -> JobProgress | None:
    """``None`` where `meta` does not tell, yet or any more."""
    try:
        shown = fields[META_PROGRESS]
        return JobProgress(str(shown["stage"]), int(shown["tokens"]), float(shown["tokens_per_s"]))
    except (KeyError, TypeError, ValueError):
        return None


def _failure_text(data: bytes) -> str:
    return without_packing(data).decode(errors="replace")


def without_packing(data: bytes) -> bytes:
    """Results are compressed where their producer asked for it (`FIELD_PACKED`); other languages need not compress."""
    with suppress(zlib.error):
        return zlib.decompress(data)
    return data
