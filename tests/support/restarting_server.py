"""A Redis or Valkey server that can be killed and started again on its port, with its append-only file."""

import os
import signal
import subprocess
from pathlib import Path

from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.support.private_server import free_port, wait_until_it_answers

from stoker_worker.embedded_redis import find_program


class RestartingServer:
    """Every write is in the file before its reply, so that an acknowledged enqueue is durable."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def connection(self) -> Redis:
        return Redis.from_url(self.url, retry=Retry(NoBackoff(), 0), socket_timeout=10)

    def start(self) -> None:
        listening = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder)]
        durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        command = [str(find_program()), *listening, *durable]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        with self.connection() as probe:
            wait_until_it_answers(probe, self._process, self._folder / "server.log")

    def kill(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(20)
