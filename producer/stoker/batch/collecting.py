"""Moves answers from Redis into the output file: reads, writes and syncs them, and only then removes them. One thread.

It goes over the lines in Redis page by page and keeps only its place between two pages: Redis and the file are the
whole state, so that it can stop anywhere and begin again.
"""

import time
from dataclasses import dataclass, field
from typing import Final

from redis import Redis

from stoker.batch.ends import End, ends_of, server_ms
from stoker.batch.output_file import OutputFile
from stoker.batch.record import BatchRecord
from stoker.batch.sent_lines import SentLine, sent_lines, take_out
from stoker.operations import run
from stoker_shared.errors import RedisUnavailable

_MAX_PAGE: Final = 500
_MIN_PAGE: Final = 4
_LARGE_BYTES: Final = 8 * 2**20
_LOOK_AT_ALL_S: Final = 15.0


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
    """
    Attributes:
        in_order: write answers in the order of their lines; an answer that is early stays in Redis until its turn.
    """

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
        """Go once over all lines that are in Redis; returns how many answers are in the file now and out of Redis.

        Raises:
            RedisUnavailable: at any point; the next call continues. A server that is full raises it at the end, after
                every page has made what room it can.
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
        if self.in_order:
            ends = _without_gaps(unknown, ends)
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


def _without_gaps(lines: list[SentLine], ends: dict[SentLine, End]) -> dict[SentLine, End]:
    """The ends before the first line that has not ended."""
    kept = {}
    for line in lines:
        if line not in ends:
            break
        kept[line] = ends[line]
    return kept
