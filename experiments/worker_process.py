"""A worker process that can be killed and started again. Experiments only; no MLX."""

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path


class WorkerProcess:
    """
    Attributes:
        log: what all its lives have written.
    """

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command = command
        self.log = folder / "worker.log"
        self._process = self._started()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _started(self) -> "subprocess.Popen[bytes]":
        seen = self.log.read_text().count("ready: model") if self.log.exists() else 0
        with self.log.open("ab") as log:
            process = subprocess.Popen(self._command, stderr=log)
        while self.log.read_text().count("ready: model") == seen:
            if process.poll() is not None:
                raise SystemExit(self.log.read_text())
            time.sleep(0.05)
        return process

    def stop(self, with_signal: signal.Signals) -> None:
        self._process.send_signal(with_signal)
        self._process.wait()

    def restart(self, with_signal: signal.Signals) -> float:
        """Returns the seconds until it was ready again."""
        self.stop(with_signal)
        begin = time.perf_counter()
        self._process = self._started()
        return time.perf_counter() - begin
