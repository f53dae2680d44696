"""A real Redis or Valkey server of our own, on loopback, with its append-only file in our folder. Main thread.

Owns the server process and the files ``server.json``, ``server.lock`` and ``server.log`` next to the append-only file.
Does not know what is kept in it.

A worker that is killed leaves its server running, on purpose: producers go on enqueueing, and the next
`EmbeddedServer` on the folder takes it over. The lock on the folder is inherited by the server process and lives
exactly as long as it does, so that two servers can never write one append-only file. The server runs in a session of
its own: Ctrl-C in the terminal reaches the worker alone, which stops the server last.
"""

import fcntl
import json
import os
import socket
import subprocess
import time
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, RedisError
from redis.retry import Retry

from stoker_shared.errors import RedisUnavailable
from stoker_worker.process_identity import ProcessIdentity
from stoker_worker.server_program import find_program

HOST = "127.0.0.1"
_START_S = 20.0
_LOAD_S = 600.0  # a long append-only file is read before the first answer
_STOP_S = 30.0
_POLL_S = 0.02


@dataclass(frozen=True)
class _State:
    """What ``server.json`` says: where the server listens and which process stops it."""

    port: int
    owner: ProcessIdentity


class EmbeddedServer:
    """The one server of a folder: started here, or found running and used.

    Whoever started it stops it. One whose starter is dead belongs to the next that finds it; one whose starter lives
    is only used, and `stop` leaves it alone.
    """

    def __init__(self, folder: Path, port: int | None = None, *, preferred_port: int | None = None) -> None:
        """
        Args:
            folder: where its files are; made if missing, and closed to everybody else (0700).
            port: on 127.0.0.1; ``None`` for any free one.
            preferred_port: with `port` ``None``: this one where it is free.
        """
        self._folder = folder.expanduser().resolve()
        self._wanted_port = port
        self._preferred_port = preferred_port
        self._port: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owned = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """
        Raises:
            RedisUnavailable: it has not been started.
        """
        if self._port is None:
            raise RedisUnavailable("the embedded Redis server is not running")
        return f"redis://{HOST}:{self._port}"

    def start(self) -> str:
        """Start the folder's server, or take over the one that runs; returns its URL.

        Raises:
            RedisUnavailable: no server program, it does not start (with its log's last line), or the folder's server
                runs on another port than the one asked for.
        """
        if self._port is not None:
            return self.url
        self._make_folder()
        deadline = time.monotonic() + _START_S
        with closing(_FolderLock(self._folder / "server.lock")) as lock:
            while not lock.try_take():
                # A live server holds the lock: usable at once, or just starting or stopping.
                if self._adopt():
                    return self.url
                if time.monotonic() > deadline:
                    raise RedisUnavailable(f"the Redis server of {self._folder} runs but does not answer{self._why()}")
                time.sleep(_POLL_S)
            self._launch(lock)
        return self.url

    def stop(self) -> None:
        """Shut the server down, its append-only file written, unless another live process started it. May be repeated.

        Raises:
            RedisUnavailable: it did not stop within half a minute.
        """
        if self._port is not None and self._owned:
            with closing(_client(self._port)) as client, suppress(RedisError):
                client.shutdown(nosave=True)  # without RDB snapshots; the append-only file is flushed regardless
            self._wait_until_gone()
            (self._folder / "server.json").unlink(missing_ok=True)
        self._port, self._process, self._owned = None, None, False

    # --- steps ---

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._folder.chmod(0o700)
        except OSError as error:
            raise RedisUnavailable(f"{self._folder} cannot be the Redis server's folder: {error.strerror}") from error

    def _launch(self, lock: "_FolderLock") -> None:
        program = find_program()
        log = self._folder / "server.log"
        if log.exists():
            log.replace(log.with_suffix(".log.1"))
        for _ in range(5):
            port = self._wanted_port or _free_port(self._preferred_port)
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    [str(program), *_options(port)],
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=[lock.descriptor],
                )
            self._port, self._owned = port, True
            self._write_state(_State(port, ProcessIdentity.of_this_process()))
            if self._answers():
                return
            # Between our look at the port and the server's own bind, somebody else may have taken it.
            if self._wanted_port or "listening" not in self._why():
                break
        self._port, self._process, self._owned = None, None, False
        raise RedisUnavailable(f"{program.name} does not start{self._why()}")

    def _answers(self) -> bool:
        """Wait until the server answers; ``False`` when its process ends instead or the time is over."""
        assert self._process is not None
        assert self._port is not None
        deadline = time.monotonic() + _START_S
        with closing(_client(self._port)) as client:
            while self._process.poll() is None and time.monotonic() < deadline:
                try:
                    if self._is_ours(client):  # else another server has the port; ours notices and ends
                        return True
                except BusyLoadingError:
                    deadline = max(deadline, time.monotonic() + _LOAD_S)
                except RedisError:
                    pass
                time.sleep(_POLL_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        return False

    def _adopt(self) -> bool:
        state = self._read_state()
        if state is None:
            return False
        with closing(_client(state.port)) as client:
            try:
                if not self._is_ours(client):
                    return False
            except RedisError:
                return False
        if self._wanted_port not in {None, state.port}:
            raise RedisUnavailable(
                f"the Redis server of {self._folder} already runs on port {state.port}, not {self._wanted_port}"
            )
        self._port = state.port
        self._owned = state.owner.is_certainly_dead()
        if self._owned:
            self._write_state(_State(state.port, ProcessIdentity.of_this_process()))
        return True

    def _is_ours(self, client: Redis) -> bool:
        client.ping()
        served = client.config_get("dir").get("dir")
        return Path(served or "").resolve() == self._folder

    def _wait_until_gone(self) -> None:
        deadline = time.monotonic() + _STOP_S
        with closing(_FolderLock(self._folder / "server.lock")) as lock:
            while (self._process is not None and self._process.poll() is None) or not lock.try_take():
                if time.monotonic() > deadline:
                    raise RedisUnavailable(f"the Redis server of {self._folder} does not stop{self._why()}")
                time.sleep(_POLL_S)

    def _read_state(self) -> _State | None:
        try:
            state = json.loads((self._folder / "server.json").read_bytes())
            return _State(int(state["port"]), ProcessIdentity(**state["owner"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _write_state(self, state: _State) -> None:
        path = self._folder / "server.json"
        path.with_suffix(".new").write_text(json.dumps(asdict(state)))
        path.with_suffix(".new").replace(path)

    def _why(self) -> str:
        try:
            lines = (self._folder / "server.log").read_text(errors="replace").split("\n")
        except OSError:
            return ""
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {last}" if last else ""


class _FolderLock:
    """An exclusive lock that a child process holding the descriptor keeps alive."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def try_take(self) -> bool:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self.descriptor)


def _options(port: int) -> list[str]:
    options: dict[str, Any] = {
        "bind": HOST,
        "port": port,
        "dir": "./",  # the working folder: no quoting of a path with spaces
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def _client(port: int) -> Redis:
    return Redis(host=HOST, port=port, socket_timeout=5, socket_connect_timeout=1, retry=Retry(NoBackoff(), 0))


def _free_port(preferred: int | None) -> int:
    """`preferred` if nobody has it, else any that nobody has."""
    for wanted in (preferred, 0):
        with socket.socket() as probe, suppress(OSError):
            if wanted is not None:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one just left by a server is free
                probe.bind((HOST, wanted))
                port: int = probe.getsockname()[1]
                return port
    raise RedisUnavailable(f"no free port on {HOST}")
