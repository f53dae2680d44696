"""Runs the batches of the store, as many at a time as there are. Owns the thread ``batches``, and its runs.

Several processes may share a store: each batch is run by the one that locked its answers first, and by another when
that one has ended.
"""

import logging
import threading
import time
from typing import Final

from redis import Redis

from stoker.batch.output_file import OutputRefused
from stoker.serve.batch_run import BatchRun
from stoker.serve.batch_store import BatchStore
from stoker.serve.file_store import FileStore
from stoker.serve.settings import ServeSettings
from stoker_shared.errors import RedisUnavailable

log = logging.getLogger(__name__)

_LOOK_S: Final = 2.0
_IDLE_S: Final = 0.3
_AGAIN_S: Final = 30.0


class BatchRunner:
    """Any thread may call its methods."""

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
        """There is a new batch, or one to cancel."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread; the batches go on when they are looked for again, here or in another process."""
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
                batch = self._batches.read(batch_id)
                if batch is None or self._batches.state(batch_id).has_ended:
                    self._ended.add(batch_id)
                    continue
                try:
                    self._runs[batch_id] = BatchRun(self._connection, batch, self._batches, self._files, self._settings)
                except OutputRefused as error:
                    log.debug("%s", error)
        except Exception:
            log.exception("the batch store cannot be read")

    def _step(self, batch_id: str, batch_run: BatchRun) -> int:
        try:
            moved = batch_run.step()
        except RedisUnavailable as error:
            if not self._away:
                log.warning("batches wait: %s", error)
            self._away = True
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
