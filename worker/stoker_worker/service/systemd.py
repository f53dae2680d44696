"""The worker as a systemd user unit. Owns the unit's file; its log is the journal's."""

import getpass
from pathlib import Path
from typing import Final

from stoker_worker.service.manager import (
    Say,
    ServiceRefused,
    called,
    called_well,
    require_program,
    write_if_other,
)
from stoker_worker.service.unit import RESTART_S, ServiceUnit

_LINGER: Final = Path("/var/lib/systemd/linger")

# KillMode: a stop reaches the worker alone, which needs its embedded Redis server until its jobs are given back; and
# the server of a worker that crashed goes on taking jobs. Exit code 2 is a wrong option, which no restart mends.
_UNIT: Final = """\
[Unit]
Description=stoker worker ({name})
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={command}
WorkingDirectory={folder}
{environment}Restart=on-failure
RestartSec={restart_s}
RestartPreventExitStatus=2
TimeoutStopSec={stop_timeout_s}
KillMode=process

[Install]
WantedBy=default.target
"""


class Systemd:
    """Talks to the user's own manager, `systemctl --user`."""

    def __init__(self, units: Path) -> None:
        """
        Args:
            units: folder of the user's units, ``~/.config/systemd/user``.
        """
        self._units = units

    def text(self, unit: ServiceUnit) -> str:
        return _UNIT.format(
            name=unit.name,
            command=" ".join(_quoted(word).replace("$", "$$") for word in unit.command),
            folder=str(unit.folder).replace("%", "%%"),
            environment="".join(f"Environment={_quoted(f'{k}={v}')}\n" for k, v in unit.environment.items()),
            restart_s=RESTART_S,
            stop_timeout_s=unit.stop_timeout_s,
        )

    def install(self, unit: ServiceUnit, say: Say) -> None:
        self._require()
        path = self.path(unit.name)
        changed = write_if_other(path, self.text(unit))
        say(f"{'wrote' if changed else 'unchanged:'} {path}")
        service = path.name
        called_well("systemctl", "--user", "daemon-reload")
        called_well("systemctl", "--user", "--quiet", "enable", service)
        if changed and called("systemctl", "--user", "--quiet", "is-active", service).returncode == 0:
            say("it runs: it stops first, once its running jobs have ended")
        called_well("systemctl", "--user", "restart" if changed else "start", service)
        say(f"{unit.name} is started, and will be at each login")
        if not (_LINGER / getpass.getuser()).exists():
            say("to start it at boot, and keep it after you log out: loginctl enable-linger")

    def uninstall(self, name: str, say: Say) -> None:
        path = self.path(name)
        self._require()
        say(f"stopping {name}: its running jobs may end first")
        called_well("systemctl", "--user", "--quiet", "disable", "--now", path.name)
        path.unlink()
        called_well("systemctl", "--user", "daemon-reload")
        say(f"removed {path}; the store stays")

    def status(self, name: str, say: Say) -> int:
        self._require()
        done = called("systemctl", "--user", "--no-pager", "status", self.path(name).name)
        say((done.stdout or done.stderr).rstrip())
        return done.returncode

    def logs_command(self, name: str, *, lines: int, follow: bool) -> list[str]:
        if not self.path(name).exists():
            raise ServiceRefused(f"{name} is not installed")
        require_program("journalctl", "systemd's journal")
        follows = ["--follow"] if follow else []
        return ["journalctl", "--no-pager", "--user-unit", self.path(name).name, "--lines", str(lines), *follows]

    def path(self, name: str) -> Path:
        return self._units / f"{name}.service"

    def _require(self) -> None:
        require_program("systemctl", "systemd")
        done = called("systemctl", "--user", "show", "--property=Version")
        if done.returncode != 0:
            raise ServiceRefused(f"systemd runs no services for this user here: {done.stderr.strip()}")


def _quoted(word: str) -> str:
    """A word of a unit file: in it, `%` begins a specifier, and quotes and line ends are escaped as in C."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped.replace("%", "%%")}"'
