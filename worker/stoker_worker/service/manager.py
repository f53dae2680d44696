"""The service manager of this system, and what its two kinds have in common. Runs their programs; reads no settings."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from stoker_shared.durable_file import replace_file
from stoker_shared.errors import StokerError
from stoker_worker.service.unit import ServiceUnit

RUNNING: Final = 0
NOT_RUNNING: Final = 3
NOT_INSTALLED: Final = 4
"""Exit codes of `status`, those of systemctl."""

Say = Callable[[str], None]
"""Gets each line about what is done."""


class ServiceRefused(StokerError):
    """The service manager is missing, or it refused; the message has its words."""


class ServiceManager(Protocol):
    """All raise `ServiceRefused`: the program of the service manager is missing, or it refused."""

    def text(self, unit: ServiceUnit) -> str:
        """The file that `install` writes."""

    def path(self, name: str) -> Path:
        """Where `install` writes it: the service is installed if it is there."""

    def redis_url_file(self, name: str) -> Path:
        """Where `install` writes a Redis URL with a password."""

    def install(self, unit: ServiceUnit, say: Say) -> None:
        """Write the file and start the service; start it anew if it runs with another file."""

    def uninstall(self, name: str, say: Say) -> None:
        """Of an installed service: stop it, once its running jobs have ended or their grace is over; remove its
        file."""

    def status(self, name: str, say: Say) -> int:
        """Of an installed service: says how it is; the exit code."""

    def logs_command(self, name: str, *, lines: int, follow: bool) -> list[str]:
        """The command that prints the end of the log."""


def require_program(name: str, system: str) -> None:
    """
    Raises:
        ServiceRefused: it is not on the PATH.
    """
    if shutil.which(name) is None:
        raise ServiceRefused(f"{name} is missing: a service needs {system}; `--print` shows what it would run")


def called(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def called_well(*command: str) -> str:
    """What it printed.

    Raises:
        ServiceRefused: it failed; the message has its last line.
    """
    done = called(*command)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ServiceRefused(f"{' '.join(command)}: {said[-1] if said else f'exit code {done.returncode}'}")
    return done.stdout


def write_files(manager: ServiceManager, unit: ServiceUnit) -> bool:
    """Write the service's file, and that of its Redis URL, which only the user of the service can read.

    Returns:
        whether one of them has changed.
    """
    url_file, changed = manager.redis_url_file(unit.name), False
    if unit.redis_url:
        changed = _write_if_other(url_file, f"{unit.redis_url}\n")
        if unit.account is not None:
            os.chown(url_file, unit.account.pw_uid, unit.account.pw_gid)
    else:
        url_file.unlink(missing_ok=True)
    return _write_if_other(manager.path(unit.name), manager.text(unit)) or changed


def remove_files(manager: ServiceManager, name: str) -> None:
    manager.path(name).unlink()
    manager.redis_url_file(name).unlink(missing_ok=True)


def _write_if_other(path: Path, text: str) -> bool:
    """Whether it was written. Only its owner can read it: variables may have passwords too."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.encode())
    return True
