"""The worker as a launchd agent of the user, or a daemon of the Mac. Owns its plist and the place of its log."""

import os
import plistlib
import re
import time
from pathlib import Path
from typing import Final

from stoker_worker.service.manager import (
    NOT_RUNNING,
    RUNNING,
    Say,
    ServiceRefused,
    called,
    called_well,
    remove_files,
    require_program,
    write_files,
)
from stoker_worker.service.unit import RESTART_S, ServiceUnit

_POLL_S: Final = 0.2
_MARGIN_S: Final = 10.0
_FIELDS: Final = re.compile(r"^\t(state|pid|runs|last exit code) = (.+)$", re.MULTILINE)


class Launchd:
    """Talks to the launchd of the user's login session, `launchctl ... gui/UID`, or to the system's."""

    def __init__(self, library: Path, uid: int | None, secrets: Path) -> None:
        """
        Args:
            library: the user's ``~/Library``, or ``/Library``.
            uid: ``None``: a daemon of the system.
            secrets: folder of Redis URLs with passwords.
        """
        self._is_system = uid is None
        self._agents = library / ("LaunchDaemons" if self._is_system else "LaunchAgents")
        self._logs = library / "Logs" / "stoker"
        self._session = "system" if self._is_system else f"gui/{uid}"
        self._secrets = secrets

    def text(self, unit: ServiceUnit) -> str:
        log = str(self._log(unit.name))
        agent = {
            "Label": unit.name,
            **({"UserName": unit.account.pw_name} if unit.account else {}),
            "ProgramArguments": list(unit.command),
            "WorkingDirectory": str(unit.folder),
            "EnvironmentVariables": dict(unit.environment),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RESTART_S,
            "ExitTimeOut": unit.stop_timeout_s,
            "ProcessType": "Interactive",  # launchd slows all other kinds down
            "StandardOutPath": log,
            "StandardErrorPath": log,
        }
        return plistlib.dumps(agent, sort_keys=False).decode()

    def install(self, unit: ServiceUnit, say: Say) -> None:
        self._require()
        path, is_loaded = self.path(unit.name), self._is_loaded(unit.name)
        stop_timeout_s = self._stop_timeout_s(unit.name)
        self._logs.mkdir(parents=True, exist_ok=True)  # launchd would make it as root
        if unit.account is not None:
            self._log(unit.name).touch()
            os.chown(self._log(unit.name), unit.account.pw_uid, unit.account.pw_gid)
        changed = write_files(self, unit)
        say(f"{'wrote' if changed else 'unchanged:'} {path}")
        if changed and is_loaded:
            say("it runs: it stops first, once its running jobs have ended")
            self._unload(unit.name, stop_timeout_s)
        if changed or not is_loaded:
            called_well("launchctl", "bootstrap", self._session, str(path))
        else:  # it may have ended well, and stays so until it is told
            called_well("launchctl", "kickstart", self._target(unit.name))
        say(f"{unit.name} is started, and will be at each {'boot' if self._is_system else 'login'}")

    def uninstall(self, name: str, say: Say) -> None:
        self._require()
        path = self.path(name)
        if self._is_loaded(name):
            say(f"stopping {name}: its running jobs may end first")
            self._unload(name, self._stop_timeout_s(name))
        remove_files(self, name)
        say(f"removed {path}; the store and {self._log(name)} stay")

    def status(self, name: str, say: Say) -> int:
        self._require()
        done = called("launchctl", "print", self._target(name))
        fields = dict(_FIELDS.findall(done.stdout)) if done.returncode == 0 else {"state": "not loaded"}
        say("\n".join(f"{field}: {value}" for field, value in fields.items()))
        say(f"log: {self._log(name)}")
        return RUNNING if fields.get("state") == "running" else NOT_RUNNING

    def logs_command(self, name: str, *, lines: int, follow: bool) -> list[str]:
        log = self._log(name)
        if not log.exists():
            raise ServiceRefused(f"there is no log {log}")
        return ["tail", "-n", str(lines), *(["-F"] if follow else []), str(log)]

    def _unload(self, name: str, stop_timeout_s: float) -> None:
        """launchctl returns before the worker has ended, and launchd takes no other agent of that name until then."""
        called("launchctl", "bootout", self._target(name))
        deadline = time.monotonic() + stop_timeout_s + _MARGIN_S
        while self._is_loaded(name):
            if time.monotonic() > deadline:
                raise ServiceRefused(f"launchd does not end {name}: see launchctl print {self._target(name)}")
            time.sleep(_POLL_S)

    def _stop_timeout_s(self, name: str) -> float:
        """Of the installed agent, which may have another one than the next."""
        try:
            return float(plistlib.loads(self.path(name).read_bytes())["ExitTimeOut"])
        except (OSError, ValueError, KeyError, plistlib.InvalidFileException):
            return 0.0

    def _is_loaded(self, name: str) -> bool:
        return called("launchctl", "print", self._target(name)).returncode == 0

    def _target(self, name: str) -> str:
        return f"{self._session}/{name}"

    def path(self, name: str) -> Path:
        return self._agents / f"{name}.plist"

    def redis_url_file(self, name: str) -> Path:
        return self._secrets / f"{name}.redis-url"

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _require(self) -> None:
        require_program("launchctl", "launchd")
        if called("launchctl", "print", self._session).returncode != 0:
            raise ServiceRefused(
                "launchd has no session of yours: log in on the Mac's own screen first, or install it with --system"
            )
