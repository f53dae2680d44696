"""A worker as its operator starts it: a process of its own; its log is shown when something goes wrong."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class WorkerProcess:
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
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, f"gave up waiting; the worker's log:\n{self.log}"
            assert self.returncode is None, f"the worker left with {self.returncode}:\n{self.log}"
            time.sleep(0.02)

    def signal(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)

    def kill(self) -> None:
        """Like a kill by the kernel: nothing is flushed, released or unregistered."""
        self._process.kill()
        self._process.wait()

    def wait(self, timeout_s: float = 60) -> int:
        return self._process.wait(timeout_s)


@contextmanager
def running_worker(
    redis_url: str, store: Path, *arguments: str, log_name: str = "worker.log", env: dict[str, str] | None = None
) -> Iterator[WorkerProcess]:
    """A worker on `redis_url`, ended with the context in any case."""
    base = ["--redis", redis_url, "--store", str(store)]
    if "--model" not in arguments:
        base += ["--engine", "scripted"]
    log_path = store.parent / f"{store.name}-{log_name}"
    worker = WorkerProcess([*base, *arguments], log_path, env)
    try:
        yield worker
    finally:
        if worker.returncode is None:
            worker.signal(signal.SIGTERM)
            try:
                worker.wait(20)
            except subprocess.TimeoutExpired:
                worker.kill()
