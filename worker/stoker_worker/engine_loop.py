"""The engine thread: everything MLX, loading the model included. Touches neither Redis nor disk.

Owns which job each sequence belongs to. Arrays belong to the thread that made them, so the model is loaded here and
nothing lazy ever leaves.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Final

from stoker_shared.errors import EngineFailed
from stoker_worker.loader import Ended, Prepared
from stoker_worker.ports import Completion, GenerationEnginePort, LoadedModel, ModelProviderPort, RowProgress

log = logging.getLogger(__name__)

_GATHER_S: Final = 0.5
"""Longest wait of a job that is ready for those which the loader is about to have ready. Whenever rows join a batch
mlx-lm copies the caches of all that are in it: once for eight of them costs an eighth (EXP-014)."""


class EngineLoop(threading.Thread):
    """Steps the engine while anything is in it, and hands over every sequence in the step it ends."""

    def __init__(
        self, provider: ModelProviderPort, *, to_finaliser: Callable[[Ended], None], on_broken: Callable[[], None]
    ) -> None:
        """
        Args:
            on_broken: called when the engine broke, before its jobs are handed over: nobody may fill their places.
        """
        super().__init__(name="engine", daemon=True)
        self._provider = provider
        self._to_finaliser = to_finaliser
        self._on_broken = on_broken
        self._prepared: SimpleQueue[Prepared | None] = SimpleQueue()
        self._gathered: list[Prepared] = []
        self._gather_until = 0.0
        self._running: dict[int, Prepared] = {}
        self._progress: dict[str, RowProgress] = {}
        self._listened: frozenset[int] = frozenset()
        self._texts: dict[int, str] = {}
        self.loaded: Future[LoadedModel] = Future()
        self.error: BaseException | None = None

    def put(self, prepared: Prepared) -> None:
        self._prepared.put(prepared)

    def finish(self) -> None:
        """Let the thread end once nothing is left in the engine."""
        self._prepared.put(None)

    def has_rows(self) -> bool:
        """Whether anything is in the engine; any thread may ask."""
        return bool(self._running)

    def progress(self) -> dict[str, RowProgress]:
        """How far each job in the engine is, by job id; a snapshot any thread may read."""
        return self._progress

    def listen(self, claim_numbers: frozenset[int]) -> dict[int, str]:
        """Ask for the texts of some jobs, by their `claim_number`: an id may run again. Any thread, one at a time.

        Returns:
            what was asked for last time: the texts as they were after the step that ended then.
        """
        self._listened = claim_numbers
        return self._texts

    def run(self) -> None:
        try:
            engine, loaded = self._provider.load()
        except BaseException as error:  # the main thread raises it to the operator
            self._leave()
            self.loaded.set_exception(error)
            return
        self.loaded.set_result(loaded)
        try:
            self._serve(engine)
        except BaseException as error:
            log.exception("the engine broke")
            self.error = error
            self._on_broken()
            failed = EngineFailed(f"{type(error).__name__}: {error}")
            for uid in list(self._running):
                self._hand_over(uid, error=failed)
        finally:
            try:
                engine.close()
            finally:
                self._leave()

    def _leave(self) -> None:
        try:
            self._provider.leave_thread()
        except Exception:  # MLX itself may be what cannot be imported
            log.debug("the engine thread could not be tidied", exc_info=True)

    def _serve(self, engine: GenerationEnginePort) -> None:
        while self._take_in(engine):
            self._cancel(engine)
            for completion in engine.step():
                self._hand_over(completion.uid, completion=completion)
            self._progress = {self._running[uid].job.job_id: row for uid, row in engine.progress().items()}
            self._tell(engine)

    def give_up_waiting(self) -> None:
        """After the engine broke: hand over what the loader still put in, so that it is given back."""
        while True:
            try:
                prepared = self._prepared.get_nowait()
            except Empty:
                break
            if prepared is not None:
                self._gathered.append(prepared)
        for prepared in self._gathered:
            prepared.job.cancel.set("stopping")
            self._to_finaliser(Ended(prepared.job, prepared))
        self._gathered.clear()

    def _take_in(self, engine: GenerationEnginePort) -> bool:
        """Submit what is ready, waiting for it while the engine is empty; ``False`` to end the thread."""
        while True:
            try:
                prepared = self._prepared.get(timeout=self._patience_s(engine))
            except Empty:
                break
            if prepared is None:
                return False
            if not self._gathered:
                self._gather_until = time.monotonic() + _GATHER_S
            self._gathered.append(prepared)
        if not self._expects_more():
            while self._gathered:
                self._submit(engine, self._gathered.pop(0))
        return True

    def _patience_s(self, engine: GenerationEnginePort) -> float | None:
        """How long to wait for the next job; ``None``: until there is one."""
        if engine.in_flight:
            return 0.0
        if not self._gathered:
            return None
        return max(0.0, self._gather_until - time.monotonic()) if self._expects_more() else 0.0

    def _expects_more(self) -> bool:
        """Whether to wait for what the loader is at."""
        return bool(self._gathered) and self._gathered[-1].has_next and time.monotonic() < self._gather_until

    def _submit(self, engine: GenerationEnginePort, prepared: Prepared) -> None:
        if prepared.job.cancel.reason is not None:
            self._to_finaliser(Ended(prepared.job, prepared))
            return
        try:
            uid = engine.submit(prepared.work)
        except Exception as error:
            self._to_finaliser(Ended(prepared.job, prepared, error=error))
            return
        self._running[uid] = prepared.without_arrays()

    def _cancel(self, engine: GenerationEnginePort) -> None:
        for uid, prepared in list(self._running.items()):
            if prepared.job.cancel.reason is not None:
                self._hand_over(uid, completion=engine.cancel(uid))

    def _tell(self, engine: GenerationEnginePort) -> None:
        """Once for each time somebody asked: text that nobody reads is not put together."""
        if listened := self._listened:
            self._listened = frozenset()
            numbers = {uid: prepared.job.claim_number for uid, prepared in self._running.items()}
            self._texts = {number: engine.text(uid) for uid, number in numbers.items() if number in listened}

    def _hand_over(self, uid: int, *, completion: Completion | None = None, error: Exception | None = None) -> None:
        prepared = self._running.pop(uid)
        self._to_finaliser(Ended(prepared.job, prepared, completion, error))
