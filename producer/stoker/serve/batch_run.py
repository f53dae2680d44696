"""Runs one batch of the store, with the machinery of `stoker batch`: from its input file to its two output files.

The state is in the store and in Redis, so that a run can end anywhere and be continued, by this process or another. The
lock on the file of answers decides who runs the batch; it goes with its process.
"""

import json
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import BinaryIO, Final

from redis import Redis

from stoker.batch.collecting import Collector
from stoker.batch.feeding import Feeder
from stoker.batch.input_file import InputFile
from stoker.batch.output_file import OutputFile, is_success
from stoker.batch.progress import Progress
from stoker.batch.record import BatchRecord, cancel_batch, find_record, forget
from stoker.batch.work import BatchWork
from stoker.new_job import JobOptions
from stoker.openai.answers import Failure
from stoker.operations import run
from stoker.serve.batch_store import BatchState, BatchStore, StoredBatch
from stoker.serve.file_store import FileStore
from stoker.serve.settings import ServeSettings

_MIN_KEEP_S: Final = 86_400
_OUTPUT: Final = "batch_output"
MAX_LINES: Final = 1_000_000
"""Of an input file. Each takes some hundred bytes of memory, if it has a `custom_id`."""


class BatchRun:
    """For one thread. `close` lets another process run the batch."""

    def __init__(
        self, connection: Redis, batch: StoredBatch, batches: BatchStore, files: FileStore, settings: ServeSettings
    ) -> None:
        """
        Raises:
            OutputRefused: another process runs it.
            OSError: the store cannot be read or written.
        """
        self._connection = connection
        self._batch = batch
        self._batches = batches
        self._files = files
        self._settings = settings
        self._is_canceled = False
        self._work: BatchWork | None = None
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
            BatchHeld, InputChanged, OutputRefused, OSError: the batch cannot go on now.
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
            limits = {"max_line_bytes": self._settings.max_body_bytes, "max_lines": MAX_LINES}
            lines = self._open.enter_context(InputFile(self._files.content(source), **limits))
        except (Failure, OSError, ValueError) as error:
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
        feeder = Feeder(self._connection, lines, settings.body_options, jobs, None)
        collector = Collector(self._connection, self._output)
        progress = Progress(lines.n_requests, collector.tally, quiet=True)
        work = BatchWork(self._connection, batch.id, collector, progress, feeder, planned)
        work.begin()
        before = self._batches.state(batch.id)
        times = {"in_progress_at": int(time.time()), **before.times}
        self._batches.set_state(batch.id, BatchState("in_progress", lines.n_requests, times=times))
        return work

    def _must_cancel(self) -> bool:
        return self._batches.canceled_at(self._batch.id) is not None or time.time() > self._batch.expires_at

    def _fail(self, code: str, message: str) -> None:
        errors = [{"code": code, "message": message, "line": None, "param": "input_file_id"}]
        times = {"failed_at": int(time.time())}
        self._batches.set_state(self._batch.id, BatchState("failed", times=times, errors=errors))

    def _finish(self) -> None:
        """Put the answers into the output files, and say that the batch has ended; only then forget the rest."""
        batch, finalizing_at = self._batch, int(time.time())
        state = self._batches.state(batch.id)
        n_failed = self._output.n_failed
        n_completed = len(self._output.written) - n_failed
        output_id = self._split(wants_successes=True) if n_completed else None
        error_id = self._split(wants_successes=False) if n_failed else None
        status = "completed"
        if self._is_canceled:
            status = "expired" if self._batches.canceled_at(batch.id) is None else "cancelled"
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
        """The id of the file of all answers that are successes, or that are not."""

        def write(content: BinaryIO) -> None:
            with self._batches.answers(self._batch.id).open("rb") as answers:
                for line in answers:
                    if is_success(json.loads(line)) == wants_successes:
                        content.write(line)

        kind = "output" if wants_successes else "error"
        name = f"{self._batch.id}_{kind}.jsonl"
        return self._files.add(self._batch.owner, name, _OUTPUT, write, key=name).id
