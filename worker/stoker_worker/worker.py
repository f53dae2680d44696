"""The worker: wires the threads, starts them in order and stops them in order. Main thread.

Owns the life of the process. What happens to jobs is in inbox.py (the loop), loader.py, engine_loop.py, finaliser.py.
"""

import logging
import signal
import threading
import time
from types import FrameType

from stoker_shared.errors import EngineFailed, QueueHeld
from stoker_worker.admission import Admission
from stoker_worker.engine_loop import EngineLoop
from stoker_worker.finaliser import Finaliser
from stoker_worker.heartbeat import Heartbeat
from stoker_worker.inbox import Inbox
from stoker_worker.loader import Ended, Loader
from stoker_worker.ports import CacheStorePort, LoadedModel, ModelProviderPort, QueuePort, Serving
from stoker_worker.settings import WorkerSettings

log = logging.getLogger(__name__)


class Worker:
    """One resident worker. The queue is held already; `run` returns when the work is done or it was told to stop."""

    def __init__(
        self,
        settings: WorkerSettings,
        queue: QueuePort,
        store: CacheStorePort,
        provider: ModelProviderPort,
        *,
        burst: bool,
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._store = store
        self._burst = burst
        self._stops = 0
        self._deposed = threading.Event()
        self._heartbeat = Heartbeat(queue, period_s=settings.heartbeat_s, on_deposed=self._deposed.set)
        self._inbox: Inbox | None = None
        self._finaliser: Finaliser | None = None
        self._engine = EngineLoop(provider, to_finaliser=self._to_finaliser, on_broken=self._break_off)

    def request_stop(self) -> None:
        """Once: drain. Twice: at once. Safe from any thread and from a signal handler."""
        self._stops += 1

    def install_signal_handlers(self) -> None:
        def handle(signum: int, frame: FrameType | None) -> None:
            self.request_stop()

        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGINT, handle)

    def run(self) -> None:
        """
        Raises:
            ModelNotLoadable: the model could not be loaded.
            EngineFailed: the engine broke; its jobs were given back.
            QueueHeld: another worker took the queue over; its jobs are that worker's.
        """
        self._heartbeat.start()
        self._recover_early()
        self._engine.start()
        try:
            model = self._load()
            if model is not None:
                self._serve(model)
            if self._deposed.is_set():
                raise QueueHeld("another worker has taken over the queue")
        finally:
            self._heartbeat.finish()
            self._heartbeat.join()

    def _recover_early(self) -> None:
        """A dead worker's jobs need not look started while the model loads, which may take minutes."""
        try:
            if recovered := self._queue.recover():
                log.warning("%d jobs of a dead worker are back in the queue", recovered)
        except Exception:  # the inbox looks again
            log.exception("no recovery yet")

    def _load(self) -> LoadedModel | None:
        """Wait for the model; ``None`` when told to stop meanwhile."""
        while not self._engine.loaded.done():
            if self._stops or self._deposed.is_set():
                return None
            time.sleep(0.05)
        return self._engine.loaded.result()

    def _serve(self, model: LoadedModel) -> None:
        loader = Loader(
            self._store,
            model,
            to_engine=self._engine.put,
            to_finaliser=self._to_finaliser,
            rows_run=self._engine.has_rows,
            share_prefixes=self._settings.share_prefixes,
        )
        self._inbox = inbox = Inbox(
            self._queue,
            Admission(self._settings.max_batch),
            to_loader=loader.put,
            protect=self._store.protect,
            progress=self._engine.progress,
            listen=self._engine.listen,
            poll_s=self._settings.poll_s,
            recover_s=self._settings.recover_s,
            burst=self._burst,
        )
        self._finaliser = finaliser = Finaliser(self._queue, self._store, model, on_ended=inbox.ended)
        for thread in (finaliser, loader, inbox):
            thread.start()
        serving = Serving(model.name, model.context_tokens, str(model.mode))
        self._queue.announce(serving)
        log.info("ready: %s", serving)
        self._wait(inbox)
        inbox.join()
        # Downstream in the order of a job's way, so that nothing is put into a thread that has ended.
        loader.finish()
        loader.join()
        self._engine.finish()
        self._engine.join()
        finaliser.finish()
        finaliser.join()
        if self._engine.error is not None:
            raise EngineFailed(f"the engine broke: {self._engine.error}") from self._engine.error

    def _wait(self, inbox: Inbox) -> None:
        """Until nothing is in flight any more: the burst is done, or a stop has been carried out."""
        drain_until: float | None = None
        while not inbox.idle.wait(0.05):
            if self._finaliser is not None and not self._finaliser.is_alive():
                log.error("the finaliser has died: what is in flight is left to recovery")
                inbox.leave()
                return
            engine_died = self._engine.error is not None or not self._engine.is_alive()
            at_once = self._stops > 1 or self._deposed.is_set() or engine_died
            if drain_until is None and (self._stops or at_once):
                grace_s = 0.0 if at_once else self._settings.grace_s
                log.info("stopping: no new claims, %g s for what is running", grace_s)
                drain_until = time.monotonic() + grace_s
                inbox.drain()
            if drain_until is None:
                continue
            if engine_died:
                self._engine.give_up_waiting()
            if at_once or time.monotonic() > drain_until:
                inbox.cancel_all("stopping")
                if self._finaliser is not None:
                    self._finaliser.abandon()

    def _break_off(self) -> None:
        """The engine broke; on its thread, before its jobs have left their places to others."""
        if self._inbox is not None and self._finaliser is not None:
            self._inbox.drain()
            self._finaliser.abandon()

    def _to_finaliser(self, ended: Ended) -> None:
        assert self._finaliser is not None  # nothing is submitted before the model is loaded
        self._finaliser.put(ended)
