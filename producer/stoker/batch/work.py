"""The loop of `batch run` and `batch fetch`: send, collect and show until all is answered. Endures outages of Redis.

The whole state is in Redis and in the output file, so an interrupted round is simply repeated.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from redis import Redis

from stoker.batch.collecting import Collector, canceled
from stoker.batch.feeding import CHUNK_LINES, Feeder
from stoker.batch.input_file import job_id_for
from stoker.batch.output_file import OutputFile, OutputRefused
from stoker.batch.progress import Progress
from stoker.batch.record import (
    RENEW_S,
    BatchGone,
    BatchRecord,
    hold,
    n_in_redis,
    read_record,
    register,
    release,
)
from stoker.cascade.routing import NobodyServes
from stoker.operations import run
from stoker.presence import unready
from stoker_shared.errors import RedisUnavailable

GIVE_UP_S: Final = 600.0
"""Seconds without Redis after which the command ends; the same command continues later."""

_LOOK_FOR_WORKERS_S: Final = 5.0
_IDLE_S: Final = (0.2, 0.3)
_GROUP: Final = 100
_CANCELED: Final = "the batch was canceled before this line was sent"


@dataclass
class BatchWork:
    """
    Attributes:
        collector: writes the answers.
        feeder: sends the lines; ``None`` if only other processes send them.
        planned: the record with which to begin if Redis has none; ``None`` if Redis must have one.
        window: the most lines in Redis at a time, of those that this process sends.
    """

    connection: Redis
    batch: str
    collector: Collector
    progress: Progress
    feeder: Feeder | None = None
    planned: BatchRecord | None = None
    window: int = 1000
    _held_at: float = field(default=float("-inf"), init=False)
    _looked_back_at: float = field(default=float("-inf"), init=False)
    _held_back: str | None = field(default=None, init=False)
    _looked_for_workers_at: float = field(default=float("-inf"), init=False)
    _unready: str | None = field(default=None, init=False)
    _unserved: str | None = field(default=None, init=False)

    @property
    def _output(self) -> OutputFile:
        return self.collector.output

    def begin(self) -> None:
        """Make or find the batch, and hold it, so that no other process takes its answers. Raises `BatchGone`,
        `BatchHeld`, `RedisUnavailable`; `OutputRefused`: answers that have left Redis are not in this file."""
        self._hold()
        try:
            record = self._record()
            if record.n_taken > len(self._output.written):
                raise OutputRefused(
                    f"{record.n_taken:,} answers of {self.batch} have left Redis already; they are in "
                    f"{record.output.split(' ', 2)[-1]}. Give that file as --out, or forget the batch and run all "
                    f"lines again (`stoker batch cancel --forget {self.batch}`)"
                )
        except BaseException:
            self.end()
            raise

    def go(self, *, follow: bool = True) -> None:
        """Work until every line is answered; without `follow`, until all ready answers are taken out. Raises
        `BatchGone`, `BatchHeld`, `InputChanged`, `RedisUnavailable`, `OSError`: the same command continues later."""
        away_since: float | None = None
        pause_s = _IDLE_S[0]
        while True:
            try:
                found = self.round()
                away_since = None
            except RedisUnavailable as error:
                now = time.monotonic()
                away_since = away_since or now
                if now > away_since + GIVE_UP_S:
                    raise
                self._show(f"waiting: {error}")
                time.sleep(1)
                continue
            if found is None or not follow:
                break
            self._show(self._held_back or self._unserved or self._unready)
            pause_s = _IDLE_S[0] if found else min(_IDLE_S[1], 1.5 * pause_s)
            if found < _GROUP:
                time.sleep(pause_s)

    def round(self) -> int | None:
        """One round; returns how many lines it moved, ``None`` when all lines are answered. Raises as `go`: the next
        round continues."""
        record = self._record()
        self._hold()
        n_there = run(self.connection, n_in_redis(self.batch))
        if record.all_sent and not n_there:
            self._answer_unsent(record)
            return None
        # Collecting comes first, because it makes room: a full server accepts no lines.
        found = self.collector.walk(record)
        for line in self._output.causes.take_news():
            self.progress.report(line)
        self._look_for_workers(record.queues)
        return found + self._feed(record, max(0, n_there - found))

    def end(self) -> None:
        """Let other processes take the answers out."""
        with suppress(RedisUnavailable):  # then it expires
            run(self.connection, release(self.batch, self._output.identity))

    def _look_for_workers(self, queues: Sequence[str]) -> None:
        now = time.monotonic()
        if now > self._looked_for_workers_at + _LOOK_FOR_WORKERS_S:
            self._looked_for_workers_at, self._unready = now, run(self.connection, unready(*queues))

    def _record(self) -> BatchRecord:
        record = run(self.connection, read_record(self.batch))
        if record is None:
            if self.planned is None:
                raise BatchGone(self.batch)
            record = run(self.connection, register(self.planned))
        return record

    def _hold(self) -> None:
        now = time.monotonic()
        if now > self._held_at + RENEW_S:
            run(self.connection, hold(self.batch, self._output.identity))
            self._held_at = now

    def _feed(self, record: BatchRecord, n_there: int) -> bool:
        room = self.window - n_there
        if self.feeder is None or record.all_sent or room < min(CHUNK_LINES, self.window) // 2:
            return False
        now = time.monotonic()
        if now > self._looked_back_at + 1:
            self._looked_back_at, self._held_back = now, self.feeder.is_held_back()
        if self._held_back:  # other clients may have filled Redis: with no lines in it, send one all the same
            room = 0 if n_there else 1
        try:
            is_fed = room > 0 and self.feeder.feed(record, room, self._output.written)
        except NobodyServes as nobody:  # a restarted worker will serve it soon
            self._unserved = str(nobody)
            return False
        self._unserved = None
        return is_fed

    def _answer_unsent(self, record: BatchRecord) -> None:
        """Answer the lines of a canceled batch that were never sent, if the input is available."""
        if self.feeder is None or not record.canceled:
            return
        lines = self.feeder.input
        group = []
        for number in range(record.next_line, lines.n_lines + 1):
            if number not in self._output.written and not lines.is_blank(number):
                custom_id = lines.custom_id(number)
                job_id = job_id_for(self.batch, number, custom_id)
                group.append((number, canceled(number, custom_id, job_id, _CANCELED)))
            if len(group) == CHUNK_LINES or (group and number == lines.n_lines):
                self._output.append(group)
                group = []
        self._output.append(group)

    def _show(self, note: str | None) -> None:
        n_failed = self._output.n_failed
        self.progress.show(len(self._output.written) - n_failed, n_failed, note)
