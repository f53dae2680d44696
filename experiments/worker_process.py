"""Server processes that are stopped, killed and started again, the worker among them. Experiments only; no MLX."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

PROGRAM = (sys.executable, "-m", "stoker_worker", "run")
SCRIPTED = ("--engine", "scripted", "--scripted-steps-per-s", "100000")
"""Options of a worker without a model."""
_STOP_S = 60.0


def watched(samples: Path) -> list[str]:
    """The worker's program with a thread that writes its figures to a file, once a second."""
    return [sys.executable, str(Path(__file__).with_name("watched_worker.py")), str(samples), "run"]


class ServerProcess:
    """It ends with the context that it is used as.

    Attributes:
        log: what all its lives have written.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        is_ready: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Returns once it is ready.

        Raises:
            RuntimeError: it ended before; the message is the end of its log.
        """
        self._command, self._is_ready, self._environment = command, is_ready, environment
        self.log = log
        self._lives = 0
        self._process = self._started()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Until it ends by itself."""
        self._process.wait()

    def stop(self, with_signal: signal.Signals = signal.SIGTERM) -> None:
        """Killed, if it has not ended a minute after the signal."""
        self._process.send_signal(with_signal)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def restart(self, with_signal: signal.Signals) -> float:
        """Returns the seconds until it was ready again."""
        self.stop(with_signal)
        begin = time.perf_counter()
        self._process = self._started()
        return time.perf_counter() - begin

    def _started(self) -> "subprocess.Popen[bytes]":
        self._lives += 1
        with self.log.open("ab") as log:
            process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environment)
        while not self._is_ready():
            if process.poll() is not None and not self._is_ready():
                raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.05)
        return process


class WorkerProcess(ServerProcess):
    def __init__(
        self, url: str, store: Path, *options: str, program: Sequence[str] = PROGRAM, is_awaited: bool = True
    ) -> None:
        """
        Args:
            url: of the Redis server.
            program: the command before its options.
            is_awaited: return when it is ready, not at once.
        """
        command = [*program, "--redis", url, "--store", str(store), *options]
        super().__init__(command, store.with_suffix(".log"), is_ready=self._says_so if is_awaited else lambda: True)

    def _says_so(self) -> bool:
        return self.log.read_text().count("ready: model") >= self._lives
