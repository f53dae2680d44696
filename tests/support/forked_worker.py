"""Workers and producers' commands in processes of their own, which start fast. The test's side of `fork_server`."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.wait import wait_for

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """This process's environment, with the checkout's packages and tests on the path."""
    folders = [ROOT, *(ROOT / name for name in ("shared", "producer", "worker"))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])}


class ForkServer:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()

    def run(
        self,
        arguments: Sequence[str],
        log: Path,
        *,
        program: str = "stoker-worker",
        env: Mapping[str, str] | None = None,
        hooks: Mapping[str, Any] | None = None,
    ) -> "ForkedWorker":
        order = {
            "program": program,
            "arguments": list(arguments),
            "log": str(log),
            "env": {**environment(), **(env or {})},
            "hooks": dict(hooks or {}),
        }
        return ForkedWorker(self, int(self.ask({"run": order})), log)

    def ask(self, order: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())


class ForkedWorker:
    def __init__(self, server: ForkServer, pid: int, log_path: Path) -> None:
        self._server = server
        self.pid = pid
        self.log_path = log_path
        self._returncode: int | None = None

    @property
    def returncode(self) -> int | None:
        if self._returncode is None:
            self._returncode = self._server.ask({"poll": self.pid})
        return self._returncode

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def signal(self, signum: signal.Signals) -> None:
        if self.returncode is None:  # not reaped, so the pid is still this process's
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Like a kill by the kernel: nothing is flushed, released or unregistered."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, timeout_s: float = 60) -> int:
        wait_for(lambda: self.returncode is not None, timeout_s, lambda: f"it still runs; its log:\n{self.log}")
        assert self.returncode is not None
        return self.returncode

    def wait_until_ready(self) -> "ForkedWorker":
        self.wait_for(lambda: "ready: model" in self.log)
        return self

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 60) -> None:
        def happened() -> bool:
            assert self.returncode is None or condition(), f"it left with {self.returncode}:\n{self.log}"
            return condition()

        wait_for(happened, timeout_s, lambda: f"its log:\n{self.log}")
