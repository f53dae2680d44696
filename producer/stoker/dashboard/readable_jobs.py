"""Jobs as the dashboard's pages read them: one job that cannot be read must not take down the page that lists it."""

import json
import zlib
from contextlib import suppress
from typing import Any

from flask import Flask
from redis import Redis
from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.job import Job, JobStatus
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.utils import as_text
from rq_dashboard import web

from stoker.job_record import without_packing


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
        try:
            super().restore(raw_data)
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
            return Result.fetch_latest(self, serializer=_RemarkSerializer, timeout=timeout)
        except (ValueError, KeyError, zlib.error):
            return None


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
            return json.loads(without_packing(data))
        except (ValueError, RecursionError):
            return _remark(data)


class _RemarkEncoder(json.JSONEncoder):
    def default(self, value: Any) -> Any:
        return _remark(value) if isinstance(value, bytes) else super().default(value)


def _remark(data: bytes) -> str:
    return f"<{len(data)} bytes that are not JSON>"
