"""The worker: makes the stages, and starts and stops them in order. Main thread.

Owns the life of the process, and decides when a stop no longer waits for running jobs but cuts them short. A job passes
through fetcher.py, loader.py, engine_thread.py and finisher.py.
"""

import logging
import signal
import threading
import time
from collections import Counter
from concurrent.futures import Future
from types import FrameType
from typing import Final

from stoker_shared.errors import EngineFailed, QueueHeld
from stoker_worker.events import Outage
from stoker_worker.pipeline.engine_thread import EngineThread
from stoker_worker.pipeline.fetcher import Fetcher, Leaving
from stoker_worker.pipeline.finisher import Finisher
from stoker_worker.pipeline.heartbeat import Heartbeat
from stoker_worker.pipeline.loader import Loader
from stoker_worker.ports import (
    NOT_COUNTED,
    CacheStorePort,
    LoadedModel,
    MetricsPort,
    ModelProviderPort,
    QueuePort,
    Serving,
    WorkerState,
)
from stoker_worker.ports.model import USUAL_JOBS
from stoker_worker.settings import WorkerSettings

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.05
_AWAY_S: Final = 1.0
"""A stop waits no longer than this for a Redis that is away."""


class Worker:
    """One resident worker, which holds its lease already. `run` returns at a limit or after a stop."""

    def __init__(
        self,
        settings: WorkerSettings,
        queue: QueuePort,
        store: CacheStorePort,
        provider: ModelProviderPort,
        metrics: MetricsPort = NOT_COUNTED,
    ) -> None:
        self._queue = queue
        self._stop_requests: list[None] = []  # a list grows in one step: a signal handler takes no lock
        self._grace_s = settings.grace_s
        self._drain_until: float | None = None
        self._loaded = loaded = Future[LoadedModel]()
        outage = Outage("Redis")
        self._heartbeat = Heartbeat(queue, period_s=settings.heartbeat_s, outage=outage)
        self._store = store
        self._serving: Serving | None = None
        store.order_by(queue.place_of)
        self._finisher = Finisher(store, loaded, metrics, outage=outage)
        self._engine = EngineThread(provider, loaded, self._finisher, metrics)
        self._loader = Loader(
            store,
            loaded,
            self._engine,
            self._finisher,
            share_prefixes=settings.share_prefixes,
            defaults=settings.request_defaults,
            metrics=metrics,
        )
        self._fetcher = Fetcher(
            queue,
            store,
            self._engine,
            self._loader,
            max_in_flight=settings.max_batch or USUAL_JOBS,
            poll_s=settings.poll_s,
            recover_s=settings.recover_s,
            leaving=Leaving(burst=settings.burst, max_jobs=settings.max_jobs, max_idle_s=settings.max_idle_s),
            metrics=metrics,
            outage=outage,
        )

    def request_stop(self) -> None:
        """Once: let running jobs finish within the grace. Twice: stop at once. Any thread, and signal handlers."""
        self._stop_requests.append(None)

    def install_signal_handlers(self) -> None:
        def handle(signum: int, frame: FrameType | None) -> None:
            self.request_stop()

        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGINT, handle)

    def run(self) -> None:
        """
        Raises:
            ModelNotLoadable: the model could not be loaded.
            EngineFailed: the engine broke, and its jobs were given back; or a thread died, with jobs in flight.
            QueueHeld: another worker took over, and puts this one's jobs back.
        """
        self._heartbeat.start()
        self._fetcher.start()
        self._engine.start()
        try:
            model = self._load()
            if model is None:
                self._engine.finish()  # once it has loaded the model
            else:
                self._serve(model)
            if self._heartbeat.deposed.is_set():
                raise QueueHeld("another worker has taken over the queue")
        finally:
            self._fetcher.leave()
            self._heartbeat.finish()
            self._heartbeat.join()
            self._fetcher.join(_AWAY_S)  # or it would renew the lease that the caller gives up

    def is_still_loading(self) -> bool:
        """After `run`: whether a stop came while the model loads. The engine thread then still loads it."""
        return self._engine.is_alive()

    def state(self) -> WorkerState:
        """Any thread."""
        stages = Counter[str](progress.stage for progress in self._engine.progress().values())
        beside = len(self._queue.in_flight()) - stages.total()
        return WorkerState(
            serving=self._serving,
            stages={"memory": max(0, beside), **stages},
            kv=self._engine.kv,
            step_age_s=self._engine.step_age_s(),
            redis_away_s=self._heartbeat.redis_away_s(),
            redis_away_total_s=self._heartbeat.redis_away_total_s(),
            data_loss=self._queue.data_loss(),
            is_suspended=self._queue.is_suspended(),
        )

    def _load(self) -> LoadedModel | None:
        """Wait for the model and the first recovery; ``None`` if a stop comes first."""
        while not (self._loaded.done() and (self._fetcher.has_looked.is_set() or not self._fetcher.is_alive())):
            if self._is_to_stop():
                return None
            time.sleep(_LOOK_S)
        return self._loaded.result()

    def _serve(self, model: LoadedModel) -> None:
        self._store.model_loaded(model)
        self._finisher.start()
        self._loader.start()
        width = model.max_batch
        mode = str(model.mode)
        self._serving = serving = Serving(model.name, model.context_tokens, mode, width.jobs, width.why)
        self._queue.announce(serving)
        self._fetcher.serve(width.jobs)
        log.info("ready: %s", serving)
        is_whole = self._drain()
        # In the order in which a job passes through them: nothing is put into a stage that has ended.
        self._join(self._fetcher)
        self._loader.finish()
        self._join(self._loader)
        self._engine.finish()
        self._join(self._engine)
        self._finisher.finish()
        self._join(*self._finisher.threads)
        if self._engine.error is not None:
            raise EngineFailed(f"the engine broke: {self._engine.error}") from self._engine.error
        if not is_whole:  # a service starts a worker again only after an error
            raise EngineFailed("a thread of the worker has died: the jobs in flight are left to recovery")

    def _is_to_stop(self) -> bool:
        return bool(self._stop_requests) or self._heartbeat.deposed.is_set()

    def _drain(self) -> bool:
        """Wait until the fetcher has left, by itself or because of a stop; ``False``: a thread has died."""
        while not self._fetcher.left.wait(_LOOK_S):
            is_fetching = self._fetcher.is_alive() or self._fetcher.left.is_set()
            if not (is_fetching and self._loader.is_alive() and self._finisher.is_alive()):
                self._fetcher.leave()
                return False
            self._stop_if_asked()
        return True

    def _stop_if_asked(self) -> None:
        engine_died = self._engine.error is not None or not self._engine.is_alive()
        at_once = len(self._stop_requests) > 1 or self._heartbeat.deposed.is_set() or engine_died
        if self._drain_until is None:
            if not (self._stop_requests or at_once):
                return
            grace_s = 0.0 if at_once else self._grace_s
            log.info("stopping: no new claims, %g s for running jobs; a second signal ends at once", grace_s)
            self._drain_until = time.monotonic() + grace_s
            self._fetcher.drain()
            self._finisher.hurry()
        if engine_died:
            self._engine.hand_over_waiting()
        if self._hang_up_if_away() or at_once or time.monotonic() > self._drain_until:
            self._fetcher.cancel_all("stopping")
            self._finisher.abandon()
        if self._fetcher.claims_no_more.is_set() and len(self._queue.in_flight()) <= self._finisher.n_to_give_back():
            self._fetcher.leave()

    def _join(self, *threads: threading.Thread) -> None:
        """Wait until the threads have ended; hang up if they wait for a Redis that is away."""
        for thread in threads:
            while thread.is_alive():
                thread.join(_LOOK_S)
                self._hang_up_if_away()

    def _hang_up_if_away(self) -> bool:
        is_away = self._heartbeat.redis_away_s() > _AWAY_S
        if is_away:
            self._queue.hang_up()
        return is_away
