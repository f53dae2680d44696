"""Jobs as the dashboard's pages read them: one job that cannot be read must not take down the page that lists it."""

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from flask import Flask
from redis import Redis
from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.job import Job, JobStatus
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.utils import as_text
from rq_dashboard import web

from stoker_shared.job_data import MAX_DATA_BYTES, MAX_REASON_BYTES, MAX_RESULT_BYTES, is_within_bounds, unpacked

_FITS: Final[Mapping[bytes, Callable[[bytes], bool]]] = {
    b"data": lambda value: len(unpacked(value, MAX_DATA_BYTES)) <= MAX_DATA_BYTES,
    b"exc_info": lambda value: len(unpacked(value, MAX_REASON_BYTES)) <= MAX_REASON_BYTES,
    b"meta": is_within_bounds,
}
"""RQ unpacks and reads these, to gigabytes if need be."""


def read_jobs_of_any_client() -> None:
    """Let rq-dashboard read all jobs through `_ReadableJob`, whose methods name the faults they repair."""
    web.Job, web.Queue = _ReadableJob, _ReadableQueue


def encode_unreadable_meta(app: Flask) -> None:
    """Show a remark in place of `meta` that is not JSON.

    RQ leaves such `meta` as bytes; rq-dashboard, since 0.7.1, hands them to an encoder that refuses bytes.
    """
    app.config["RQ_DASHBOARD_JSON_ENCODER"] = _RemarkEncoder


class _ReadableJob(Job):
    @classmethod
    def fetch(cls, id: str, connection: Redis | None = None, serializer: Any = None) -> Job:
        """Read a job of any id.

        RQ 3 raises `ValueError` for ids that earlier releases and other clients used; rq-dashboard 0.9.0 lets that end
        the page that lists the job.
        """
        job = cls(connection=connection, serializer=serializer)
        job._id = id
        job.refresh()  # type: ignore[no-untyped-call]
        return job

    def restore(self, raw_data: Any) -> None:
        """Read what can be read, with a remark in place of the description if a field cannot.

        RQ, as of 3.0.0, refuses texts that are not UTF-8, and times in any form but its own; rq-dashboard 0.9.0 lets
        that end the page that lists the job.
        """
        too_long = {name for name, fits in _FITS.items() if not fits(raw_data.get(name, b""))}
        try:
            super().restore({**raw_data, **dict.fromkeys(too_long, b"<too long to be shown>")})
        except NoSuchJobError:
            raise
        except Exception as error:  # RQ even asserts
            self.origin = raw_data.get(b"origin", b"").decode(errors="replace")  # a page lists only its queue's jobs
            self.description = f"<a job that RQ cannot read: {error}>"

    def get_status(self, refresh: bool = True) -> JobStatus:
        """As it was just read. RQ raises if it is asked again and the state is none that it knows."""
        return self._status or JobStatus.CREATED

    def get_meta(self, refresh: bool = True) -> dict[str, Any]:
        """The `meta` that was just read.

        rq-dashboard, since 0.7.1, has it read again, and RQ raises then if it is not JSON.
        """
        return self.meta

    @property
    def dependency_ids(self) -> list[str]:
        """Ids that can be decoded: rq-dashboard, since 0.7.1, calls `decode` on them, but since RQ 3 they are text."""
        return [_DecodableText(key) for key in super().dependency_ids]

    def latest_result(self, timeout: int = 0) -> Result | None:
        """The newest result, with a remark in place of a value that is not JSON; ``None`` if all of it is garbage.

        rq-dashboard, since 0.8.1, lets one result that cannot be read end the page.
        """
        try:
            return _ReadableResult.fetch_latest(self, serializer=_RemarkSerializer, timeout=timeout)
        except (ValueError, KeyError, zlib.error):
            return None


class _ReadableResult(Result):
    @classmethod
    def restore(cls, job_id: str, result_id: str, payload: dict[Any, Any], *args: Any, **others: Any) -> Result:
        """With as much of a failure's text as can be shown."""
        if reason := payload.get(b"exc_string"):
            text = unpacked(b64decode(reason), MAX_REASON_BYTES)
            payload = {**payload, b"exc_string": b64encode(zlib.compress(text))}
        return super().restore(job_id, result_id, payload, *args, **others)


class _ReadableQueue(Queue):
    job_class = _ReadableJob

    @classmethod
    def all(cls, connection: Redis, *args: Any, **others: Any) -> list[Queue]:
        """The queues whose keys are names.

        RQ, as of 3.0.0, raises for a key in its set that is not UTF-8 or not that of a queue, and no page that lists
        queues opens any more.
        """
        queues = []
        for key in connection.smembers(cls.redis_queues_keys):
            with suppress(ValueError):
                queues.append(cls.from_queue_key(as_text(key), connection, *args, **others))
        return queues


class _DecodableText(str):
    def decode(self, *_: Any) -> str:
        return str(self)


class _RemarkSerializer:
    dumps = JSONSerializer.dumps

    @staticmethod
    def loads(data: bytes) -> Any:
        try:
            return json.loads(unpacked(data, MAX_RESULT_BYTES))
        except (ValueError, RecursionError):
            return _remark(data)


class _RemarkEncoder(json.JSONEncoder):
    def default(self, value: Any) -> Any:
        return _remark(value) if isinstance(value, bytes) else super().default(value)


def _remark(data: bytes) -> str:
    return f"<{len(data)} bytes that are not JSON>"
