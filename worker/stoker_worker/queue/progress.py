"""Shows jobs while they run: their progress in their `meta`, and the text of jobs with a reader in a Redis stream each.
Fetcher thread; finisher threads write the end.

Owns these streams, and the progress in `meta`. Nothing is tried again: readers take the answer from the job's result.
"""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import RedisError, ResponseError

from stoker_shared.job_data import read_json
from stoker_shared.wire import FIELD_STREAM, META_PROGRESS, STREAM_KEY
from stoker_worker.ports import SequenceProgress, TextSoFar
from stoker_worker.queue.client import lua, may_pass
from stoker_worker.queue.json_job import JobRun

log = logging.getLogger(__name__)

TTL_S: Final = 3600
"""How long a stream outlives its last entry, if its worker dies."""

ENDED_TTL_S: Final = 60
MAX_TEXT_BYTES: Final = 2**20
"""A longer text is not streamed to its end: the rest comes with the result."""

MAX_ENTRIES: Final = 256

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


class ProgressMeta:
    """Writes progress that has changed. The end of the job removes it."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._look = connection.register_script(_LOOK)
        self._note = connection.register_script(_NOTE)

    def look(self, pipeline: Pipeline, run: JobRun) -> None:
        """Ask for the job's `status`, its `FIELD_STREAM`, and its `meta` if that is not too large for progress."""
        self._look(keys=[run.job.key], args=[FIELD_STREAM, _MAX_BYTES], client=pipeline)

    def note(self, pipeline: Pipeline, run: JobRun, meta: bytes, progress: SequenceProgress) -> None:
        """Write the progress into the job's `meta` if it has changed. `meta`: as `look` has read it."""
        if (fields := read_meta(meta)) is None:
            return
        rate = round(progress.tokens_per_s, 1)
        shown = {"stage": progress.stage, "tokens": progress.tokens, "tokens_per_s": rate}
        before = fields.get(META_PROGRESS)
        if META_PROGRESS in fields and not _is_ours(before):
            return
        if before and all(before[key] == shown[key] for key in ("stage", "tokens")):
            return
        written = json.dumps({**fields, META_PROGRESS: shown})
        self._note(keys=[run.job.key, run.execution.key], args=[meta, written], client=pipeline)
        run.job.raw_meta = written.encode()


def read_meta(meta: bytes | str | None) -> dict[str, Any] | None:
    """The fields of a job's `meta`; ``None`` when it is not a JSON object."""
    if not meta:
        return {}
    try:
        fields = read_json(meta.encode() if isinstance(meta, str) else meta)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def without_progress(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != META_PROGRESS or not _is_ours(value)}


def _is_ours(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == _KEYS


@dataclass
class _Stream:
    """The contents of one stream.

    Attributes:
        told: characters that it holds; -1 before the first entry, or while its contents are in doubt.
        is_refused: the server refuses to write to this key, which may be of another type.
    """

    run: JobRun
    told: int = -1
    entries: int = 0
    is_refused: bool = False

    def next_entry(self, text: str) -> tuple[str, str] | None:
        """Kind and text; ``None`` when there is nothing new. After many entries, the whole text replaces them."""
        if len(text) <= self.told:
            return None
        if self.told < 0 or self.entries >= MAX_ENTRIES:
            return "whole", text
        return "more", text[self.told :]

    def has(self, kind: str, told: int) -> None:
        self.entries = 1 if kind == "whole" else self.entries + 1
        self.told = told


class JobStreams:
    """The streams of the jobs in flight."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._tell = connection.register_script(lua("tell"))
        self._open: dict[int, _Stream] = {}

    @property
    def claim_numbers(self) -> frozenset[int]:
        return frozenset(self._open) if self._open else frozenset()

    def open(self, claim_number: int, run: JobRun) -> None:
        """Stream this run's text from now on; may be called again."""
        self._open.setdefault(claim_number, _Stream(run))

    def tell(self, claim_number: int, so_far: TextSoFar) -> None:
        """Write what is new of a job's text. Raises `RedisError` if Redis is away: it may have been written or not."""
        stream, text = self._open.get(claim_number), so_far.text
        if stream is None or stream.is_refused or len(text.encode()) > MAX_TEXT_BYTES:
            return
        if (entry := stream.next_entry(text)) is None:
            return
        told, stream.told = stream.told, -1  # in doubt until the reply has come
        job, execution = stream.run.job, stream.run.execution
        keys = [execution.key, STREAM_KEY.format(job_id=job.id)]
        try:
            written = self._tell(keys=keys, args=[TTL_S, execution.id, *entry, so_far.markers.model_dump_json()])
        except ResponseError as error:
            if may_pass(error):
                raise
            stream.is_refused = True
            log.warning("job %s cannot be read along: %s", job.id, error)
            return
        if written == 1:
            stream.has(entry[0], len(text))
        elif written == 0:  # the job has ended or was taken away
            stream.told = told

    def close(self, claim_number: int, *, ended: bool) -> None:
        """Write nothing more of this run.

        Args:
            ended: this run has ended, and the job's hash has what follows; else it is to run again, or another worker
                has it.
        """
        stream = self._open.pop(claim_number, None)
        if stream is None or stream.is_refused or not ended:
            return
        key = STREAM_KEY.format(job_id=stream.run.job.id)
        # Not tried again if it is lost: readers look at the job's hash now and then.
        with suppress(RedisError), self._connection.pipeline(transaction=True) as pipeline:
            pipeline.xadd(key, {"run": stream.run.execution.id, "kind": "end", "text": ""})
            pipeline.expire(key, ENDED_TTL_S)
            pipeline.execute()
