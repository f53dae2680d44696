"""Runs the batches of the store with the code of `stoker batch`, all at the same time. Owns the thread ``batches``, and
its runs.

The state is in the store and in Redis, so a run can end anywhere and be continued. Several processes may share a store:
the one that locks a batch's answers first runs it, and when that process has ended, another one does.
"""

import json
import logging
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import BinaryIO, Final

from redis import Redis

from stoker.api.failure import Failure
from stoker.batch.collecting import Collector
from stoker.batch.feeding import Feeder
from stoker.batch.input_file import InputFile
from stoker.batch.json_lines import JsonLines
from stoker.batch.output_file import OutputFile, OutputRefused, is_success
from stoker.batch.progress import Progress
from stoker.batch.record import RENEW_S, BatchHeld, BatchRecord, cancel_batch, find_record, forget
from stoker.batch.work import BatchWork
from stoker.new_job import JobOptions
from stoker.operations import run
from stoker.serve.settings import ANYBODY, ServeSettings
from stoker.serve.store import BatchState, BatchStore, FileStore, StoredBatch, StoredFile
from stoker_shared.errors import RedisUnavailable

_MIN_KEEP_S: Final = 86_400
_OUTPUT: Final = "batch_output"
_NOT_RUN: Final = frozenset({"batch_cancelled", "batch_expired"})
"""Codes of lines without an answer."""
MAX_LINES: Final = 1_000_000
"""The most lines of an input file. Each takes about a hundred bytes of memory, if it has a `custom_id`."""


class BatchRun:
    """One batch while this process runs it; `close` lets another process run it. For one thread."""

    def __init__(
        self, connection: Redis, batch: StoredBatch, batches: BatchStore, files: FileStore, settings: ServeSettings
    ) -> None:
        """Raises `OutputRefused`: another process runs it; `OSError`: the store cannot be read or written."""
        self._connection = connection
        self._batch = batch
        self._batches = batches
        self._files = files
        self._settings = settings
        self._is_canceled = False
        self._work: BatchWork | None = None
        self._lines: InputFile | None = None
        self._open = ExitStack()
        self._output = self._open.enter_context(OutputFile(batches.answers(batch.id), batch.id))

    def close(self) -> None:
        if self._work is not None:
            self._work.end()
        self._open.close()

    def step(self) -> int | None:
        """Do what can be done now; returns how many lines were moved, ``None`` when the batch has ended.

        Raises:
            RedisUnavailable: no server answers; the next step continues.
            BatchHeld, InputChanged, OutputRefused, OSError: the batch cannot continue now.
        """
        if self._work is None:
            if self._batches.state(self._batch.id).has_ended:
                return None
            self._work = self._begun()
            if self._work is None:
                return None
        if not self._is_canceled and self._must_cancel():
            run(self._connection, cancel_batch(run(self._connection, find_record(self._batch.id)), remove=False))
            self._is_canceled = True
        moved = self._work.round()
        if moved is None:
            self._finish()
        return moved

    def _begun(self) -> BatchWork | None:
        """The work; ``None`` if the input has no line, or is gone: the batch has failed."""
        batch = self._batch
        try:
            source = self._files.get(batch.owner, batch.input_file_id)
            lines = self._input(source)
        except (Failure, OSError, ValueError) as error:
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError) and not self._must_cancel():
                raise  # perhaps it can be read later
            self._fail("invalid_file", f"the input file cannot be read: {error}")
            return None
        if not lines.n_requests:
            self._fail("empty_file", "the input file has no lines")
            return None
        keep_s = max(batch.window_s, _MIN_KEEP_S)
        settings = self._settings
        queue, created_s = settings.batch_queue, batch.created_at
        planned = BatchRecord(batch.id, queue, source.filename, lines.n_requests, lines.n_lines, keep_s, created_s)
        jobs = JobOptions(result_ttl_s=keep_s, failure_ttl_s=keep_s, ttl_s=keep_s)
        name = None if batch.owner == ANYBODY else batch.owner
        feeder = Feeder(self._connection, lines, settings.body_options, jobs, None, name=name)
        collector = Collector(self._connection, self._output)
        progress = Progress(lines.n_requests, collector.tally, quiet=True)
        work = BatchWork(self._connection, batch.id, collector, progress, feeder, planned)
        work.begin()
        before = self._batches.state(batch.id)
        times = {"in_progress_at": int(time.time()), **before.times}
        self._batches.set_state(batch.id, BatchState("in_progress", lines.n_requests, times=times))
        return work

    def _input(self, source: StoredFile) -> InputFile:
        """The lines of the file. They are read through once, however often the batch tries to begin. Raises `OSError`,
        `ValueError`: the file cannot be read."""
        if self._lines is None:
            rows = JsonLines(self._files.content(source), max_line_bytes=self._settings.max_body_bytes)
            self._lines = self._open.enter_context(InputFile(rows, max_lines=MAX_LINES))
        return self._lines

    def _must_cancel(self) -> bool:
        return self._batches.canceled_at(self._batch.id) is not None or time.time() > self._batch.expires_at

    def _fail(self, code: str, message: str) -> None:
        errors = [{"code": code, "message": message, "line": None, "param": "input_file_id"}]
        times = {"failed_at": int(time.time())}
        self._batches.set_state(self._batch.id, BatchState("failed", times=times, errors=errors))

    def _finish(self) -> None:
        """Write the output files, then record that the batch has ended; only then forget the rest."""
        batch, finalizing_at = self._batch, int(time.time())
        state = self._batches.state(batch.id)
        n_failed = self._output.n_failed
        n_completed = len(self._output.written) - n_failed
        output_id = self._split(wants_successes=True) if n_completed else None
        error_id = self._split(wants_successes=False) if n_failed else None
        status, is_on_request = "completed", self._batches.canceled_at(batch.id) is not None
        # Its time may be over only because no process looked earlier.
        if self._is_canceled and (is_on_request or self._output.causes.counts.keys() & _NOT_RUN):
            status = "cancelled" if is_on_request else "expired"
        ended = replace(
            state,
            status=status,
            completed=n_completed,
            failed=n_failed,
            output_file_id=output_id,
            error_file_id=error_id,
            times={**state.times, "finalizing_at": finalizing_at, f"{status}_at": int(time.time())},
        )
        self._batches.set_state(batch.id, ended)
        run(self._connection, forget(batch.id))
        with suppress(OSError):
            self._batches.answers(batch.id).unlink()

    def _split(self, *, wants_successes: bool) -> str:
        """The id of the file with all answers that are successes, or with all that are not."""

        def write(content: BinaryIO) -> None:
            with self._batches.answers(self._batch.id).open("rb") as answers:
                for line in answers:
                    if is_success(json.loads(line)) == wants_successes:
                        content.write(line)

        kind = "output" if wants_successes else "error"
        name = f"{self._batch.id}_{kind}.jsonl"
        return self._files.add(self._batch.owner, name, _OUTPUT, write, key=name).id


log = logging.getLogger(__name__)

_LOOK_S: Final = 2.0
_IDLE_S: Final = 0.3
_AGAIN_S: Final = 30.0


class BatchRunner:
    """The thread that runs batches. Any thread may call its methods."""

    def __init__(self, connection: Redis, batches: BatchStore, files: FileStore, settings: ServeSettings) -> None:
        self._connection = connection
        self._batches = batches
        self._files = files
        self._settings = settings
        self._runs: dict[str, BatchRun] = {}
        self._ended: set[str] = set()
        self._not_before: dict[str, float] = {}
        self._away = False
        self._is_stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="batches", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def look(self) -> None:
        """To be called when there is a new batch, or one to cancel."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread; the batches continue in the next process that looks for them."""
        self._is_stopping = True
        self._wake.set()
        self._thread.join()
        self._connection.close()

    def _loop(self) -> None:
        looked_at = float("-inf")
        while not self._is_stopping:
            if self._wake.is_set() or time.monotonic() > looked_at + _LOOK_S:
                self._wake.clear()
                looked_at = time.monotonic()
                self._take_over()
            moved = sum(self._step(batch_id, batch_run) for batch_id, batch_run in list(self._runs.items()))
            if not moved:
                self._wake.wait(_IDLE_S if self._runs else _LOOK_S)
        for batch_run in self._runs.values():
            batch_run.close()

    def _take_over(self) -> None:
        """Begin the batches that have not ended and that no process runs."""
        now = time.monotonic()
        try:
            found = [batch_id for batch_id in self._batches.ids() if batch_id not in self._ended]
            for batch_id in sorted(found):
                if batch_id in self._runs or now < self._not_before.get(batch_id, 0.0):
                    continue
                with self._batches.leaving_out(batch_id):
                    self._take(batch_id)
        except Exception:
            log.exception("the batch store cannot be read")

    def _take(self, batch_id: str) -> None:
        batch = self._batches.read(batch_id)
        if batch is None or self._batches.state(batch_id).has_ended:
            self._ended.add(batch_id)
            return
        with suppress(OutputRefused):  # another process runs it
            self._runs[batch_id] = BatchRun(self._connection, batch, self._batches, self._files, self._settings)

    def _step(self, batch_id: str, batch_run: BatchRun) -> int:
        try:
            moved = batch_run.step()
        except RedisUnavailable as error:
            if not self._away:
                log.warning("batches wait: %s", error)
            self._away = True
            return 0
        except BatchHeld as held:  # by a process that was killed a moment ago, or by one that serves the same folder
            log.info("%s waits: %s", batch_id, held)
            self._not_before[batch_id] = time.monotonic() + RENEW_S
            self._leave(batch_id)
            return 0
        except Exception as error:
            log.error("%s cannot go on, and is tried again in %g s: %s", batch_id, _AGAIN_S, error, exc_info=error)
            self._not_before[batch_id] = time.monotonic() + _AGAIN_S
            self._leave(batch_id)
            return 0
        self._away = False
        if moved is None:
            self._ended.add(batch_id)
            self._leave(batch_id)
        return moved or 0

    def _leave(self, batch_id: str) -> None:
        self._runs.pop(batch_id).close()
