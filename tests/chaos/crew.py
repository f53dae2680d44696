"""The workers of a chaos run, one after the other. Owns their processes and the count of worker losses."""

import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.plan import QUEUES
from tests.chaos.redis_view import RedisView
from tests.chaos.traffic import AWAY
from tests.support.wait import wait_for
from tests.support.worker_process import AnyWorker

from stoker_shared.wire import MAX_ATTEMPTS

LEASE_S = 1.0
SHORT = {
    "STOKER_HEARTBEAT_S": "0.2",
    "STOKER_LEASE_TTL_S": str(LEASE_S),
    "STOKER_RECOVER_S": "0.3",
    "STOKER_POLL_S": "0.02",
    "STOKER_KEEP_VERSIONS": "100000",  # the rules are for whole histories
}
RECOVERED_S = 5.0


@dataclass(frozen=True)
class Breed:
    """The kind of worker that a storm hits.

    Attributes:
        start: starts a worker with these arguments, this log and these hooks.
        start_s: the longest time until its code begins to run.
        pause_s: shortest and longest time between two episodes.
    """

    start: Callable[[Sequence[str], Path, dict[str, Any]], AnyWorker]
    start_s: float
    pause_s: tuple[float, float]


class Crew:
    """Attributes:
    worker: the worker that holds the queue, or stands by for it.
    worker_losses: how many workers were certainly lost with the job in flight, by job id.
    loud_exits: workers that left by themselves because their engine broke; the jobs in the engine used up a try.
    crashes: workers that a job killed; `kills`: workers that the storm killed.
    problems: broken rules, one line each.
    """

    def __init__(self, breed: Breed, redis_url: str, view: RedisView, folder: Path, hooks: dict[str, Any]) -> None:
        self._breed, self._url, self._view, self._folder, self._hooks = breed, redis_url, view, folder, hooks
        self.store = folder / "store-0"
        self.worker_losses: Counter[str] = Counter()
        self.loud_exits = self.crashes = self.kills = 0
        self.problems: list[str] = []
        self._workers: list[AnyWorker] = []
        self.worker = self.start()

    def start(self, *arguments: str) -> AnyWorker:
        options = ["--redis", self._url, "--store", str(self.store), "--queues", ",".join(QUEUES)]
        options += ["--max-batch", "8", "--grace-s", "0.3", "--new-store", *arguments]
        log = self._folder / f"worker-{len(self._workers):03}.log"
        worker = self._breed.start(options, log, self._hooks)
        self._workers.append(worker)
        return worker

    def end(self) -> None:
        """Leave no process behind, in any case."""
        for worker in self._workers:
            worker.kill()

    def new_store(self) -> Path:
        """A name for another store, used from the next worker on."""
        self.store = self._folder / f"store-{len(self._workers)}"
        return self.store

    @property
    def is_ready(self) -> bool:
        """Whether the worker handles signals already; before, a signal ends it at once."""
        return "ready: model" in self.worker.log

    def log_of_all(self) -> str:
        return "".join(path.read_text() for path in sorted(self._folder.glob("worker-*.log")))

    # --- the end of a worker, and the next one ---

    def replace(self, successor: AnyWorker | None = None) -> None:
        """Start a worker in place of a lost one, and check that the lost one's jobs leave the started registry soon."""
        name = name_of(self.worker)
        self.worker = successor or self.start()
        self.assert_soon_free_of(name)

    def see_to_worker(self) -> None:
        """Start another worker if a job killed this one."""
        if self.worker.returncode is not None:
            self.note_leaving()
            self.replace()

    def stop_in_order(self, *, twice_after_s: float | None = None) -> None:
        could = self.is_ready
        self.worker.signal(signal.SIGTERM)
        if twice_after_s is not None:
            time.sleep(twice_after_s)
            self.worker.signal(signal.SIGINT)
        if self.worker.wait(30) != 0 and could:  # a job killed it first
            self.note_leaving()

    def kill(self) -> None:
        """Kill the worker, which is paused."""
        self.note_losses()
        self.worker.kill()
        self.kills += 1

    def put_to_sleep(self) -> bool:
        """Pause the worker, unless it runs a job's last try: that job would fail, and would then kill no worker."""
        self.worker.signal(signal.SIGSTOP)
        time.sleep(0.02)  # until Redis has read everything the worker sent
        if self.worker.returncode is not None:  # a job killed it first
            return False
        in_flight = self._view.in_flight(name_of(self.worker))
        if any(self._view.lost_alone(job_id) >= MAX_ATTEMPTS - 1 for job_id in in_flight):
            self.worker.signal(signal.SIGCONT)
            return False
        return True

    def note_losses(self) -> None:
        """Count a loss for each job that the worker has in flight."""
        self.worker_losses.update(self._view.in_flight(name_of(self.worker)))

    def note_leaving(self) -> None:
        """Classify the exit of a worker that the storm did not end."""
        worker = self.worker
        if worker.returncode == -signal.SIGKILL:
            self.crashes += 1
            self.note_losses()
        elif "EngineFailed: the engine broke" in worker.log:
            self.loud_exits += 1
        elif not self.is_ready and "Error: RedisUnavailable" in worker.log:
            pass  # the server was killed while the worker started: it reports that and leaves
        else:
            self.problems.append(f"a worker left with {worker.returncode}: {worker.log[-2000:]}")

    # --- waiting ---

    def assert_soon_free_of(self, name: str | None) -> None:
        """No started entry outlives its worker by more than 5 s after the next one's start, and mostly none at all."""

        def free() -> bool:
            with suppress(*AWAY):
                return self.worker.returncode is not None or not self._view.in_flight(name or "?")
            return False

        wait_for(
            free,
            RECOVERED_S + self._breed.start_s,
            lambda: f"{name} still has jobs: {self._view.started()}\n{self.worker.log}",
        )

    def wait_until_ready(self) -> None:
        wait_for(
            lambda: self.is_ready or self.worker.returncode is not None,
            20 + self._breed.start_s,
            lambda: self.worker.log,
        )


def name_of(worker: AnyWorker) -> str | None:
    found = re.search(r"worker (stoker-\S+) holds", worker.log)
    return found[1] if found else None
