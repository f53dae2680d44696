"""A job's progress, in its `meta`, for people who look at the job with RQ's tools. Fetcher and finisher threads.

Owns one key of `meta`; the rest is the producer's and stays as it is. A `meta` that is no JSON object, is large, or has
something else under that key is left alone.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import ResponseError

from stoker_shared.job_data import read_json
from stoker_shared.wire import FIELD_STREAM, META_PROGRESS
from stoker_worker.ports import SequenceProgress
from stoker_worker.queue.json_job import JobRun

_KEYS: Final = frozenset({"stage", "tokens", "tokens_per_s"})
_MAX_BYTES: Final = 16_384  # it is read and written whole

# Asked of all running jobs twice a second.
_LOOK: Final = """
local found = redis.call('HMGET', KEYS[1], 'status', ARGV[1])
found[3] = redis.call('HSTRLEN', KEYS[1], 'meta') <= tonumber(ARGV[2]) and (redis.call('HGET', KEYS[1], 'meta') or '')
return found
"""

# Nothing is written over a producer's newer `meta`, into a job that has ended, or beside another worker's run.
_NOTE: Final = """
local found = redis.call('HMGET', KEYS[1], 'status', 'meta')
if found[1] ~= 'started' or (found[2] or '') ~= ARGV[1] or redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
return redis.call('HSET', KEYS[1], 'meta', ARGV[2])
"""
_CLEAR: Final = """
if redis.pcall('HGET', KEYS[1], 'meta') ~= ARGV[1] then return 0 end
if ARGV[2] == '{}' then return redis.call('HDEL', KEYS[1], 'meta') end
return redis.call('HSET', KEYS[1], 'meta', ARGV[2])
"""


class ProgressMeta:
    """Writes progress that has changed, and removes it."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._look = connection.register_script(_LOOK)
        self._note = connection.register_script(_NOTE)
        self._clear = connection.register_script(_CLEAR)

    def look(self, pipeline: Pipeline, run: JobRun) -> None:
        """Ask for the job's `status`, its `FIELD_STREAM`, and its `meta` if that is not too large for progress."""
        self._look(keys=[run.job.key], args=[FIELD_STREAM, _MAX_BYTES], client=pipeline)

    def note(self, pipeline: Pipeline, run: JobRun, meta: bytes, progress: SequenceProgress) -> None:
        """
        Args:
            meta: as `look` has read it.
        """
        if (fields := read_meta(meta)) is None:
            return
        shown = {
            "stage": progress.stage,
            "tokens": progress.tokens,
            "tokens_per_s": round(progress.tokens_per_s, 1),
        }
        before = fields.get(META_PROGRESS)
        if META_PROGRESS in fields and not _is_ours(before):
            return
        if before and all(before[key] == shown[key] for key in ("stage", "tokens")):
            return
        run.job.has_progress = True
        written = json.dumps({**fields, META_PROGRESS: shown})
        self._note(keys=[run.job.key, run.execution.key], args=[meta, written], client=pipeline)

    def clear(self, job_key: str) -> None:
        """Of a job that does not run any more, and that `JobFinish` did not end."""
        meta = None
        with suppress(ResponseError):  # its key is no hash any more
            meta = self._connection.hget(job_key, "meta")
        if meta and (fields := read_meta(meta)) and has_progress(fields):
            self._clear(keys=[job_key], args=[meta, json.dumps(without_progress(fields))])


def read_meta(meta: bytes | str | None) -> dict[str, Any] | None:
    """``None`` when it is not a JSON object."""
    if not meta:
        return {}
    try:
        fields = read_json(meta.encode() if isinstance(meta, str) else meta)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def has_progress(fields: Mapping[str, Any]) -> bool:
    return _is_ours(fields.get(META_PROGRESS))


def without_progress(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != META_PROGRESS or not _is_ours(value)}


def _is_ours(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == _KEYS
