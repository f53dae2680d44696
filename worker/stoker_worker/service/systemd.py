"""The worker as a systemd unit, the user's or the system's. Owns the unit's file; its log is the journal's."""

import getpass
from pathlib import Path
from typing import Final

from stoker_worker.service.manager import (
    Say,
    ServiceRefused,
    called,
    called_well,
    remove_files,
    require_program,
    write_files,
)
from stoker_worker.service.unit import RESTART_S, ServiceUnit

_LINGER: Final = Path("/var/lib/systemd/linger")

# KillMode: a stop reaches the worker alone, which needs its embedded Redis server until its jobs are given back; and
# the server of a worker that crashed goes on taking jobs. Exit code 2 is a wrong option, which no restart mends.
_UNIT: Final = """\
[Unit]
Description=stoker worker ({name})
StartLimitIntervalSec=0
{after}
[Service]
Type=exec
{user}ExecStart={command}
WorkingDirectory={folder}
{environment}Restart=on-failure
RestartSec={restart_s}
RestartPreventExitStatus=2
TimeoutStopSec={stop_timeout_s}
KillMode=process

[Install]
WantedBy={target}
"""
_AFTER_NETWORK: Final = "Wants=network-online.target\nAfter=network-online.target\n"


class Systemd:
    """Talks to the user's own manager, `systemctl --user`, or to the system's."""

    def __init__(self, units: Path, secrets: Path, *, is_system: bool = False) -> None:
        """
        Args:
            units: folder of the units, ``~/.config/systemd/user`` or ``/etc/systemd/system``.
            secrets: folder of Redis URLs with passwords.
        """
        self._units = units
        self._secrets = secrets
        self._is_system = is_system
        self._systemctl = ("systemctl",) if is_system else ("systemctl", "--user")

    def text(self, unit: ServiceUnit) -> str:
        return _UNIT.format(
            name=unit.name,
            after=_AFTER_NETWORK if self._is_system else "",
            user=f"User={unit.account.pw_name}\n" if unit.account else "",
            target="multi-user.target" if self._is_system else "default.target",
            command=" ".join(_quoted(word).replace("$", "$$") for word in unit.command),
            folder=str(unit.folder).replace("%", "%%"),
            environment="".join(f"Environment={_quoted(f'{k}={v}')}\n" for k, v in unit.environment.items()),
            restart_s=RESTART_S,
            stop_timeout_s=unit.stop_timeout_s,
        )

    def install(self, unit: ServiceUnit, say: Say) -> None:
        self._require()
        path = self.path(unit.name)
        changed = write_files(self, unit)
        if self._is_system:  # systemd shows a unit to everybody, and complains about a file that pretends otherwise
            path.chmod(0o644)
        say(f"{'wrote' if changed else 'unchanged:'} {path}")
        service = path.name
        called_well(*self._systemctl, "daemon-reload")
        called_well(*self._systemctl, "--quiet", "enable", service)
        if changed and called(*self._systemctl, "--quiet", "is-active", service).returncode == 0:
            say("it runs: it stops first, once its running jobs have ended")
        called_well(*self._systemctl, "restart" if changed else "start", service)
        say(f"{unit.name} is started, and will be at each {'boot' if self._is_system else 'login'}")
        if not self._is_system and not (_LINGER / getpass.getuser()).exists():
            say("to start it at boot, and keep it after you log out: loginctl enable-linger")

    def uninstall(self, name: str, say: Say) -> None:
        path = self.path(name)
        self._require()
        say(f"stopping {name}: its running jobs may end first")
        called_well(*self._systemctl, "--quiet", "disable", "--now", path.name)
        remove_files(self, name)
        called_well(*self._systemctl, "daemon-reload")
        say(f"removed {path}; the store stays")

    def status(self, name: str, say: Say) -> int:
        self._require()
        done = called(*self._systemctl, "--no-pager", "status", self.path(name).name)
        say((done.stdout or done.stderr).rstrip())
        return done.returncode

    def logs_command(self, name: str, *, lines: int, follow: bool) -> list[str]:
        if not self.path(name).exists():
            raise ServiceRefused(f"{name} is not installed")
        require_program("journalctl", "systemd's journal")
        follows = ["--follow"] if follow else []
        unit = "--unit" if self._is_system else "--user-unit"
        return ["journalctl", "--no-pager", unit, self.path(name).name, "--lines", str(lines), *follows]

    def path(self, name: str) -> Path:
        return self._units / f"{name}.service"

    def redis_url_file(self, name: str) -> Path:
        return self._secrets / f"{name}.redis-url"

    def _require(self) -> None:
        require_program("systemctl", "systemd")
        done = called(*self._systemctl, "show", "--property=Version")
        if done.returncode != 0:
            raise ServiceRefused(
                f"systemd runs no services {'' if self._is_system else 'for this user '}here: {done.stderr.strip()}"
            )


def _quoted(word: str) -> str:
    """A word of a unit file: in it, `%` begins a specifier, and quotes and line ends are escaped as in C."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped.replace("%", "%%")}"'
