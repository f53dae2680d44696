"""Moves answers from Redis into the output file: reads, writes and syncs them, and only then removes them. One thread.

It goes through the lines in Redis page by page and keeps only its position: Redis and the file are the whole state, so
it can stop anywhere and begin again.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final

from redis import Redis
from rq.results import Result

from stoker.batch.input_file import BadLine, answer_id_for
from stoker.batch.output_file import OutputFile, failure_line, not_run_line, success_line
from stoker.batch.record import BatchRecord, SentLine, bad_answers, sent_lines, take_out
from stoker.job_record import KEPT_RESULTS, JobRecord
from stoker.operations import Commands, Entries, Operation, ask, run, stream_entries
from stoker_shared.errors import JobCanceled, JobFailed, JobNotFound, RedisUnavailable
from stoker_shared.result import Usage

_MAX_PAGE: Final = 500
_MIN_PAGE: Final = 4
_LARGE_BYTES: Final = 8 * 2**20
_LOOK_AT_ALL_S: Final = 15.0


_CLOCK_JUMP_MS: Final = 60_000


@dataclass(frozen=True)
class End:
    """The end of a line. `usage` is ``None`` unless its job succeeded; `n_bytes` is about how much was read from Redis
    for it."""

    answer: Mapping[str, Any]
    usage: Usage | None = None
    n_bytes: int = 0


def ends_of(
    batch: str, lines: Sequence[SentLine], *, before_ms: int, look_at_all: bool
) -> Operation[dict[SentLine, End]]:
    """The ends of those of `lines` that have ended, in their order.

    Args:
        before_ms: omit jobs that ended at this time of the server or later. The lines of one agent end in their order;
            with one time for all lines, no line is found before its earlier ones.
        look_at_all: also find jobs that ended without an entry in their stream (canceled, deleted, expired); this costs
            a command for each line.
    """
    bad = yield from bad_answers(batch, [line.number for line in lines if line.custom_id is None])
    jobs = [line for line in lines if line.custom_id is not None]
    streams = yield from _streams([line.job_id(batch) for line in jobs])
    fresh = {job_id for job_id, entries in streams.items() if _is_since(before_ms, entries)}
    jobs = [line for line in jobs if line.job_id(batch) not in fresh]
    seen = [line for line in jobs if look_at_all or line.job_id(batch) in streams]
    hashes = yield Commands([JobRecord.hash_command(line.job_id(batch)) for line in seen])
    # A job that ended between the two reads has its entry by now, and is found next time.
    late = [line.job_id(batch) for line, values in zip(seen, hashes, strict=True) if values[0] is not None]
    late_streams = yield from _streams([job_id for job_id in late if job_id not in streams])
    # A job that failed and was requeued may end between them too: its success is not among the entries read then.
    torn = [
        job_id
        for job_id, values in zip((line.job_id(batch) for line in seen), hashes, strict=True)
        if values[0] == b"finished" and job_id in streams and JobRecord.finished(job_id, streams[job_id][::-1]) is None
    ]
    looks = [("XREVRANGE", Result.get_key(job_id), "+", "-", "COUNT", KEPT_RESULTS) for job_id in torn]
    newest = (yield Commands(looks)) if looks else []
    streams |= {job_id: entries[::-1] for job_id, entries in zip(torn, newest, strict=True)}
    fresh |= {job_id for job_id in torn if streams[job_id] and _is_since(before_ms, streams[job_id])}
    found = {line: End(bad[line.number]) for line in lines if line.number in bad}
    for line, values in zip(seen, hashes, strict=True):
        job_id = line.job_id(batch)
        end = _end(line, job_id, values, streams.get(job_id, []))
        if end is not None and job_id not in late_streams and job_id not in fresh:
            found[line] = end
    return {line: found[line] for line in lines if line in found}


def canceled(number: int, custom_id: str | None, job_id: str, why: str) -> dict[str, Any]:
    """The answer of a line that is not run because its batch, or its job, was canceled."""
    return not_run_line(answer_id_for(job_id), BadLine(number, custom_id, "batch_cancelled", why))


def _streams(job_ids: Sequence[str]) -> Operation[dict[str, Entries]]:
    if not job_ids:
        return {}
    keys = {Result.get_key(job_id): job_id for job_id in job_ids}
    [reply] = yield Commands([("XREAD", "COUNT", KEPT_RESULTS, "STREAMS", *keys, *["0-0"] * len(keys))])
    return {keys[key]: entries for key, entries in stream_entries(reply).items()}


def server_ms() -> Operation[int]:
    """The server's time, which also numbers the entries of streams."""
    seconds, microseconds = yield from ask("TIME")
    return int(seconds) * 1000 + int(microseconds) // 1000


def _is_since(before_ms: int, entries: Entries) -> bool:
    """True if the job ended at `before_ms` or later. An end far in the future counts as older, because the server's
    clock was set back since."""
    return before_ms <= _ended_ms(entries) < before_ms + _CLOCK_JUMP_MS


def _ended_ms(entries: Entries) -> int:
    return int(entries[-1][0].split(b"-")[0])


def _end(line: SentLine, job_id: str, values: Sequence[Any], entries: Entries) -> End | None:
    answer_id, custom_id = answer_id_for(job_id), line.custom_id or ""
    record = JobRecord.from_replies(job_id, values, entries[::-1])
    if not record.has_ended:
        return None
    try:
        if not record.state:
            raise JobNotFound(job_id, "gone: it, or its result, has expired, or it was deleted")
        result = record.outcome()
    except JobFailed as failed:
        return End(failure_line(answer_id, custom_id, job_id, failed.reason, failed.partial_text))
    except JobCanceled as error:
        return End(canceled(line.number, custom_id, job_id, str(error)))
    except JobNotFound as error:
        return End(not_run_line(answer_id, BadLine(line.number, custom_id, "batch_expired", str(error))))
    answer = success_line(answer_id, custom_id, line.url, _ended_ms(entries) // 1000, result)
    return End(answer, result.usage, sum(len(value) for _, fields in entries for value in fields.values()))


@dataclass
class Tally:
    """Totals of the answers that this process has read."""

    n_answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, end: End) -> None:
        self.n_answers += 1
        if end.usage is not None:
            self.prompt_tokens += end.usage.prompt_tokens
            self.cached_tokens += end.usage.cached_tokens
            self.completion_tokens += end.usage.completion_tokens


@dataclass
class Collector:
    """With `in_order`, answers are written in the order of their lines; an early answer stays in Redis until its
    turn."""

    connection: Redis
    output: OutputFile
    in_order: bool = False
    tally: Tally = field(default_factory=Tally)
    _after: int = 0
    _page: int = 100
    _looked_at_all_at: float = 0.0
    _looks_at_all: bool = True
    _is_full: bool = False

    def walk(self, record: BatchRecord) -> int:
        """Go once through all lines in Redis; returns the number of answers that are now in the file and out of Redis.

        Raises:
            RedisUnavailable: at any point; the next call continues. If the server is full, only at the end, after every
                page has made what room it can.
            OSError: the output file cannot be written.
        """
        now = time.monotonic()
        self._looks_at_all = record.canceled or now > self._looked_at_all_at + _LOOK_AT_ALL_S
        if self._looks_at_all:
            self._looked_at_all_at = now
        self._after, found, self._is_full = 0, 0, False
        before_ms = run(self.connection, server_ms())
        while True:
            n_lines, n_ended = self._step(record, before_ms)
            found += n_ended
            if not n_lines or (self.in_order and n_ended < n_lines):
                break
        if self._is_full:
            raise RedisUnavailable("the Redis server is full; the answers are in the file, but cannot be counted yet")
        return found

    def _step(self, record: BatchRecord, before_ms: int) -> tuple[int, int]:
        lines = run(self.connection, sent_lines(record.batch, self._after, self._page))
        if not lines:
            return 0, 0
        known = [line for line in lines if line.number in self.output.written]
        unknown = [line for line in lines if line.number not in self.output.written]
        ends = run(self.connection, ends_of(record.batch, unknown, before_ms=before_ms, look_at_all=self._looks_at_all))
        n_bytes = sum(end.n_bytes for end in ends.values())
        if self.in_order:  # only those before the first line that has not ended
            ends = {line: ends[line] for line in takewhile(ends.__contains__, unknown)}
        self._size_pages(n_bytes, has_gap=self.in_order and len(ends) < len(unknown))
        self.output.append([(line.number, end.answer) for line, end in ends.items()])
        for end in ends.values():
            self.tally.add(end)
        if done := [*known, *ends]:
            succeeded = {line: self.output.has_succeeded(line.number) for line in done}
            is_out = run(self.connection, take_out(record, succeeded, self.output.identity))
            self._is_full = self._is_full or not is_out
        self._after = lines[-1].number
        return len(lines), len(done)

    def _size_pages(self, n_bytes: int, *, has_gap: bool) -> None:
        """Make pages small while answers are large, because a page is held in memory, or while they wait for others."""
        if has_gap:
            self._page = _MIN_PAGE
        else:
            self._page = max(_MIN_PAGE, self._page // 2) if n_bytes > _LARGE_BYTES else min(_MAX_PAGE, 2 * self._page)
