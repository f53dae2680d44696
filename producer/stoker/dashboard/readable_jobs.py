"""Jobs as the dashboard's pages read them: one job that cannot be read must not take down the page that lists it."""

import json
from typing import Any

from flask import Flask
from redis import Redis
from rq import Queue
from rq.job import Job
from rq.results import Result
from rq.serializers import JSONSerializer
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
        """The newest result, with a remark in place of a value that is not JSON.

        rq-dashboard, since 0.8.1, lets one result that cannot be read end the page.
        """
        return Result.fetch_latest(self, serializer=_RemarkSerializer, timeout=timeout)


class _ReadableQueue(Queue):
    job_class = _ReadableJob


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
