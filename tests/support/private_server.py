"""A private server for one test, started with the options under test. Loopback only; stopped with the test."""

import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError
from tests.support.server_fixture import require_server_program

from stoker_worker.embedded_redis import find_program


class ServerDidNotStart(RuntimeError):
    """Carries the server's last output."""


@contextmanager
def private_server(
    folder: Path, *options: str, port: int | None = None, password: str | None = None
) -> Iterator[Redis]:
    """Yields an administrator's connection, by unix socket: it works whatever `options` do to the network.
    Skips as `require_server_program` does.

    Raises:
        ServerDidNotStart: the program refuses the options.
    """
    require_server_program()
    folder.mkdir(exist_ok=True)
    unix_socket = folder / "admin.sock"
    listening = ["--bind", "127.0.0.1", "--port", str(free_port() if port is None else port)]
    local = ["--unixsocket", str(unix_socket), "--dir", str(folder), "--appendonly", "yes", "--save", ""]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [str(find_program()), *listening, *local, *options], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        with Redis(unix_socket_path=str(unix_socket), password=password) as admin:
            wait_until_it_answers(admin, process, folder / "server.log")
            yield admin
    finally:
        process.terminate()
        process.wait(20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def acl_refusals(admin: Redis) -> Sequence[str]:
    """Each user with the refused command, readable. Without CLIENT SETINFO, which redis-py sends to newer servers and
    does not need: older servers would not load a rule that grants it."""
    entries = [entry for entry in admin.acl_log() if entry["object"] != "client|setinfo"]
    return [f"{entry['username']}: {entry['reason']} {entry['object']}" for entry in entries]


def wait_until_it_answers(admin: Redis, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """
    Raises:
        ServerDidNotStart: with what is in `log`.
    """
    end = time.monotonic() + 20
    while True:
        with suppress(RedisError):
            admin.ping()
            return
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise ServerDidNotStart(log.read_text())
        time.sleep(0.02)
