"""A worker in a process of its own; its log is shown when something goes wrong."""

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.support.forked_worker import ForkedWorker, ForkServer
from tests.support.wait import wait_for

SHORT = {"STOKER_HEARTBEAT_S": "0.2", "STOKER_LEASE_TTL_S": "1", "STOKER_RECOVER_S": "0.5", "STOKER_GRACE_S": "1"}
"""Settings of a worker that notices a loss within a second, and leaves as soon."""


class WorkerProcess:
    """A worker as its operator starts it."""

    def __init__(
        self,
        arguments: Sequence[str],
        log_path: Path,
        env: dict[str, str] | None = None,
        *,
        program: Sequence[str] = ("stoker_worker",),
    ) -> None:
        """
        Args:
            program: the module to run, and its own arguments.
        """
        self.log_path = log_path
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *program, "run", *arguments],
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, **(env or {})},
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def wait_until_ready(self, timeout_s: float = 60) -> "WorkerProcess":
        self.wait_for(lambda: "ready: model" in self.log, timeout_s)
        return self

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 60) -> None:
        def happened() -> bool:
            assert self.returncode is None or condition(), f"the worker left with {self.returncode}:\n{self.log}"
            return condition()

        wait_for(happened, timeout_s, lambda: f"the worker's log:\n{self.log}")

    def signal(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)

    def kill(self) -> None:
        """Like a kill by the kernel: nothing is flushed, released or unregistered."""
        self._process.kill()
        self._process.wait()

    def wait(self, timeout_s: float = 60) -> int:
        return self._process.wait(timeout_s)


AnyWorker = ForkedWorker | WorkerProcess


@cache
def fork_server() -> ForkServer:
    """One for all tests of this process; ends with it."""
    server = ForkServer()
    atexit.register(server.close)
    return server


@contextmanager
def running_worker(
    redis_url: str, store: Path, *arguments: str, log_name: str = "worker.log", env: dict[str, str] | None = None
) -> Iterator[AnyWorker]:
    """A worker on `redis_url`, ended with the context in any case. A new process with a model, else a fork."""
    base = ["--redis", redis_url, "--store", str(store)]
    log_path = store.parent / f"{store.name}-{log_name}"
    worker: AnyWorker
    if "--model" in arguments:  # MLX does not survive a fork
        worker = WorkerProcess([*base, *arguments], log_path, env)
    else:
        worker = fork_server().run(["run", *base, "--engine", "scripted", *arguments], log_path, env=env)
    try:
        yield worker
    finally:
        if worker.returncode is None:
            worker.signal(signal.SIGTERM)
            try:
                worker.wait(20)
            except (AssertionError, subprocess.TimeoutExpired):
                worker.kill()


def burst(redis_url: str, store: Path, *arguments: str, log_name: str = "burst.log", timeout_s: float = 240) -> str:
    """Let a worker end every job that waits, and return its log."""
    with running_worker(redis_url, store, "--burst", *arguments, log_name=log_name) as worker:
        assert worker.wait(timeout_s) == 0, worker.log
    return worker.log
