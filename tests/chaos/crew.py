"""The workers of a chaos run, one after the other: started, watched, buried. Owns their processes and who died when."""

import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.forked_worker import ForkedWorker, wait_for
from tests.chaos.plan import QUEUES
from tests.chaos.redis_view import RedisView
from tests.chaos.traffic import AWAY
from tests.worker_process import WorkerProcess

from stoker_shared.wire import MAX_ATTEMPTS

LEASE_S = 1.0
SHORT = {
    "STOKER_HEARTBEAT_S": "0.2",
    "STOKER_LEASE_TTL_S": str(LEASE_S),
    "STOKER_RECOVER_S": "0.3",
    "STOKER_POLL_S": "0.02",
}
RECOVERED_S = 5.0

AnyWorker = ForkedWorker | WorkerProcess


@dataclass(frozen=True)
class Breed:
    """The kind of worker that a storm is about.

    Attributes:
        start: a worker of these arguments, this log and these hooks.
        start_s: what it may take until its code begins to run.
        pause_s: shortest and longest time between two episodes.
    """

    start: Callable[[Sequence[str], Path, dict[str, Any]], AnyWorker]
    start_s: float
    pause_s: tuple[float, float]


class Crew:
    """Attributes:
    worker: the one that works, or stands by to.
    deaths: how many workers died for certain with a job in flight, by job id.
    loud_exits: workers that left by themselves because their engine broke; what was in it has used up a try.
    crashes: workers that a job has killed; `kills`: those that we have.
    problems: what must not be, a line for each.
    """

    def __init__(self, breed: Breed, redis_url: str, view: RedisView, folder: Path, hooks: dict[str, Any]) -> None:
        self._breed, self._url, self._view, self._folder, self._hooks = breed, redis_url, view, folder, hooks
        self.store = folder / "store-0"
        self.deaths: Counter[str] = Counter()
        self.loud_exits = self.crashes = self.kills = 0
        self.problems: list[str] = []
        self._workers: list[AnyWorker] = []
        self.worker = self.start()

    def start(self, *arguments: str) -> AnyWorker:
        options = ["--redis", self._url, "--store", str(self.store), "--queues", ",".join(QUEUES)]
        options += ["--max-batch", "8", "--grace-s", "0.3", *arguments]
        log = self._folder / f"worker-{len(self._workers):03}.log"
        worker = self._breed.start(options, log, self._hooks)
        self._workers.append(worker)
        return worker

    def end(self) -> None:
        """No process outlives the run, whatever became of it."""
        for worker in self._workers:
            worker.kill()

    def new_store(self) -> Path:
        """The name of another store, of which the next worker is to be."""
        self.store = self._folder / f"store-{len(self._workers)}"
        return self.store

    @property
    def is_ready(self) -> bool:
        """Before that, a signal ends it at once."""
        return "ready: model" in self.worker.log

    def log_of_all(self) -> str:
        return "".join(path.read_text() for path in sorted(self._folder.glob("worker-*.log")))

    # --- the end of one, and the next ---

    def replace(self, successor: AnyWorker | None = None) -> None:
        """A new worker for one that is dead, whose jobs do not look started for long."""
        name = name_of(self.worker)
        self.worker = successor or self.start()
        self.assert_soon_free_of(name)

    def see_to_worker(self) -> None:
        """Start another one when a job has killed it."""
        if self.worker.returncode is not None:
            self.note_leaving()
            self.replace()

    def stop_in_order(self, *, twice_after_s: float | None = None) -> None:
        could = self.is_ready
        self.worker.signal(signal.SIGTERM)
        if twice_after_s is not None:
            time.sleep(twice_after_s)
            self.worker.signal(signal.SIGINT)
        if self.worker.wait(30) != 0 and could:  # a job was faster
            self.note_leaving()

    def kill(self) -> None:
        """The worker, which sleeps."""
        self.note_deaths()
        self.worker.kill()
        self.kills += 1

    def put_to_sleep(self) -> bool:
        """Stop it, unless it runs a job's last try: it would be failed, and kills nobody."""
        self.worker.signal(signal.SIGSTOP)
        time.sleep(0.02)  # until Redis has read what it has sent
        if self.worker.returncode is not None:  # a job was faster
            return False
        in_flight = self._view.in_flight(name_of(self.worker))
        if any(self._view.lost_alone(job_id) >= MAX_ATTEMPTS - 1 for job_id in in_flight):
            self.worker.signal(signal.SIGCONT)
            return False
        return True

    def note_deaths(self) -> None:
        """Of what the worker has in flight."""
        self.deaths.update(self._view.in_flight(name_of(self.worker)))

    def note_leaving(self) -> None:
        """Of a worker that is gone without our doing."""
        worker = self.worker
        if worker.returncode == -signal.SIGKILL:
            self.crashes += 1
            self.note_deaths()
        elif "EngineFailed: the engine broke" in worker.log:
            self.loud_exits += 1
        elif not self.is_ready and "Error: RedisUnavailable" in worker.log:
            pass  # the server was killed while it started: it says so and leaves
        else:
            self.problems.append(f"a worker left with {worker.returncode}: {worker.log[-2000:]}")

    # --- waiting ---

    def assert_soon_free_of(self, name: str | None) -> None:
        """No started entry outlives its worker: within 5 s of the next one's start, and mostly at once."""

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
