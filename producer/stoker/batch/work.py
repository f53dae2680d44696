"""The loop of `batch run` and `batch fetch`: send, collect, show, until all is answered. Owns the outages of Redis.

All that counts is in Redis and in the output file, so a round that was cut short by anything is simply made again.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from redis import Redis

from stoker.batch.collecting import Collector
from stoker.batch.ends import canceled
from stoker.batch.feeding import CHUNK_LINES, Feeder
from stoker.batch.holding import HOLD_S, RENEW_S, BatchHeld, hold, release
from stoker.batch.naming import job_id_for
from stoker.batch.output_file import OutputFile, OutputRefused
from stoker.batch.progress import Progress
from stoker.batch.record import BatchGone, BatchRecord, read_record, register
from stoker.batch.sent_lines import n_in_redis
from stoker.driver import run
from stoker.presence import unattended
from stoker_shared.errors import RedisUnavailable

GIVE_UP_S: Final = 600.0
"""Seconds without Redis after which a batch stops; the same command goes on with it later."""

_LOOK_FOR_WORKERS_S: Final = 5.0
_IDLE_S: Final = (0.2, 0.3)
_GROUP: Final = 100
_CANCELED: Final = "the batch was canceled before this line was sent"


@dataclass
class BatchWork:
    """
    Attributes:
        collector: writes the answers.
        feeder: sends the lines; ``None`` to take out what others send.
        planned: the record to begin with where Redis has none; ``None`` if it must have one.
        window: lines in Redis at the most, of those this process sends.
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
    _unattended: str | None = field(default=None, init=False)

    @property
    def _output(self) -> OutputFile:
        return self.collector.output

    def begin(self) -> None:
        """Make or find the batch, and see to it that nobody else takes its answers.

        Raises:
            OutputRefused: answers that left Redis are not in this file.
            BatchGone, BatchHeld, RedisUnavailable.
        """
        end = time.monotonic() + HOLD_S + 1
        while True:
            self._require_all_that_left()
            try:
                self._hold()
                break
            except BatchHeld as held:
                if time.monotonic() > end:
                    raise
                self.progress.say(f"{held}; waiting for that to end")
                time.sleep(1)
        try:
            self._require_all_that_left()  # a process that held it may have taken some out since
        except OutputRefused:
            self.end()
            raise

    def go(self, *, follow: bool = True) -> None:
        """Until every line is answered; without `follow`, until what has ended by now is taken out.

        Raises:
            BatchGone, BatchHeld, InputChanged, RedisUnavailable, OSError: the same command goes on later.
        """
        away_since: float | None = None
        pause_s = _IDLE_S[0]
        while True:
            try:
                found = self._round()
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
            self._show(self._held_back or self._unattended)
            pause_s = _IDLE_S[0] if found else min(_IDLE_S[1], 1.5 * pause_s)
            if found < _GROUP:
                time.sleep(pause_s)

    def end(self) -> None:
        """Let others take the answers out."""
        with suppress(RedisUnavailable):  # then it expires
            run(self.connection, release(self.batch, self._output.identity))

    def _require_all_that_left(self) -> None:
        record = self._record()
        if record.n_taken > len(self._output.written):
            raise OutputRefused(
                f"{record.n_taken:,} answers of {self.batch} are out of Redis already, in "
                f"{record.output.split(' ', 2)[-1]}; give that file as --out, or forget the batch and run all lines "
                f"anew (`stoker batch cancel --forget {self.batch}`)"
            )

    def _round(self) -> int | None:
        """How many lines moved; ``None`` when all is over."""
        record = self._record()
        self._hold()
        n_there = run(self.connection, n_in_redis(self.batch))
        if record.all_sent and not n_there:
            self._answer_unsent(record)
            return None
        # First what makes room: a server that is full takes no lines.
        found = self.collector.walk(record)
        for line in self._output.causes.take_news():
            self.progress.say(line)
        self._look_for_workers(record.queue)
        return found + self._feed(record, max(0, n_there - found))

    def _look_for_workers(self, queue: str) -> None:
        now = time.monotonic()
        if now > self._looked_for_workers_at + _LOOK_FOR_WORKERS_S:
            self._looked_for_workers_at, self._unattended = now, run(self.connection, unattended(queue))

    def _record(self) -> BatchRecord:
        record = run(self.connection, read_record(self.batch))
        if record is None:
            if self.planned is None:
                raise BatchGone(f"no batch {self.batch} in Redis; `stoker batch ls` shows which there are")
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
        # Others may have filled Redis; with nothing of its own in there, a batch goes on a few lines at a time.
        if self._held_back:
            return not n_there and self.feeder.feed(record, 1, self._output.written)
        return self.feeder.feed(record, room, self._output.written)

    def _answer_unsent(self, record: BatchRecord) -> None:
        """The lines of a canceled batch that never were sent get an answer too, where the input is at hand."""
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
