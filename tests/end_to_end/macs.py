"""Several scripted workers on one queue, each with a store of its own, and what happens to machines."""

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redis import Redis
from tests.support.forked_worker import ForkedWorker
from tests.support.wait import wait_for
from tests.support.worker_process import fork_server

from stoker_shared.wire import MEMBERS_KEY

# On a busy machine, workers that wait for a processor for a second are taken for dead, or find nobody dead.
LEASE_S = 4.0 if os.environ.get("CHAOS") == "long" else 1.0
SHORT = {
    "STOKER_HEARTBEAT_S": str(LEASE_S / 5),
    "STOKER_LEASE_TTL_S": str(LEASE_S),
    "STOKER_RECOVER_S": "0.3",
    "STOKER_POLL_S": "0.02",
    "STOKER_GRACE_S": "0.5",
    "STOKER_PATIENCE_S": "0.5",
    "STOKER_KEEP_VERSIONS": "100000",
}


class Macs:
    """Workers by number, each with a store of its own, which its successor has too.

    Attributes:
        workers: those that run now, or ran last.
    """

    def __init__(
        self,
        redis_url: str,
        folder: Path,
        n_workers: int,
        *arguments: str,
        each: Sequence[Sequence[str]] = ((),),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            arguments: more options of all workers.
            each: more options of some: worker `n` has those at `n`, modulo how many there are.
            env: variables beside those for short times.
        """
        self._redis_url, self._folder = redis_url, folder
        self._arguments, self._each, self._env = arguments, each, {**SHORT, **(env or {})}
        self._n_started = 0
        self.workers = {n: self._start(n) for n in range(n_workers)}

    def store(self, n: int) -> Path:
        return self._folder / f"store-{n}"

    def _start(self, n: int, hooks: Mapping[str, Any] | None = None) -> ForkedWorker:
        self._n_started += 1
        options = ["--redis", self._redis_url, "--store", str(self.store(n)), "--name", f"mac{n}", "--max-batch", "8"]
        log = self._folder / f"worker-{n}-{self._n_started}.log"
        options += ["--engine", "scripted", "--scripted-steps-per-s", "400", *self._arguments]
        options += self._each[n % len(self._each)]
        return fork_server().run(["run", *options], log, env=self._env, hooks=hooks)

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self._folder.glob("worker-*.log")))

    def wait_until_ready(self) -> None:
        for worker in self.workers.values():
            worker.wait_until_ready()

    def are_ready(self) -> bool:
        """Replaces those that left by themselves."""
        self.see_to_all()
        return all("ready: model" in worker.log for worker in self.workers.values())

    def replace(self, n: int, **hooks: Any) -> None:
        """`hooks`: of tests/chaos/hooks.py."""
        self.workers[n] = self._start(n, hooks)

    def see_to_all(self) -> None:
        """Replace those that left by themselves: on a busy machine a lease of a second can be lost, and a worker that
        loses its connection while it starts leaves."""
        for n, worker in self.workers.items():
            if worker.returncode is not None:
                assert "QueueHeld" in worker.log or "Error: RedisUnavailable" in worker.log, worker.log
                self.replace(n)

    def kill(self, n: int) -> None:
        self.workers[n].kill()

    def stop(self, n: int) -> None:
        self.workers[n].wait_until_ready()  # before, a signal ends it at once
        self.workers[n].signal(signal.SIGTERM)
        assert self.workers[n].wait(60) in (0, 1), self.workers[n].log

    def sleep(self, n: int) -> None:
        """Until another worker has put its jobs back."""
        self.workers[n].wait_until_ready()
        self.workers[n].signal(signal.SIGSTOP)
        with Redis.from_url(self._redis_url) as connection:
            wait_for(lambda: not connection.hexists(MEMBERS_KEY, f"mac{n}"), 60, self.logs)
        self.workers[n].signal(signal.SIGCONT)
        assert self.workers[n].wait(60) == 1, self.workers[n].log
        assert "QueueHeld" in self.workers[n].log

    def end(self) -> None:
        try:
            for n, worker in self.workers.items():
                if worker.returncode is None:
                    self.stop(n)
        finally:  # none outlives a test that fails, one that sleeps neither
            for worker in self.workers.values():
                worker.kill()
