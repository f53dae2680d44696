"""The worker as a service of its user: a launchd agent on a Mac, a systemd unit on Linux.

Owns the service's file, and runs the programs of the service manager. Reads no settings.
"""

import getpass
import math
import os
import platform
import plistlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.parsers.expat import ExpatError

from stoker_shared.durable_file import draft_of, write_new
from stoker_shared.environment import ENV_PREFIX
from stoker_shared.errors import StokerError

RESTART_S: Final = 30
"""Pause between two starts of a worker that crashes: a wrong setting must not load the model all the time."""

_SAVING_S: Final = 30
"""Time after the grace to give back the jobs that were cut short, and for the embedded server to write its file."""
_MOST_GRACE_S: Final = 366 * 86_400
"""The service managers know no infinite time."""

# A service starts with almost no variables. PATH finds redis-server, HF_* and XDG_CACHE_HOME the models that are
# downloaded already, AWS_* the shared store.
_PROXIES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_CERTIFICATES: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")  # a proxy may have its own
_KEPT: Final = (
    "HOME", "PATH", "PYTHONPATH", "XDG_CACHE_HOME", *_CERTIFICATES, *_PROXIES, *map(str.lower, _PROXIES),
)  # fmt: skip
_KEPT_PREFIXES: Final = (ENV_PREFIX, "HF_", "AWS_")


@dataclass(frozen=True)
class ServiceUnit:
    """
    Attributes:
        name: of the service and of its file.
        command: program and arguments.
        folder: the working folder: that of `install`, for relative paths among the options.
        environment: the variables that it needs besides those of every process of the user.
        stop_timeout_s: the service manager kills a worker that takes longer to stop.
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]
    stop_timeout_s: int


def worker_unit(
    name: str, options: Sequence[str], *, grace_s: float, environment: Mapping[str, str] = os.environ
) -> ServiceUnit:
    """The unit of `stoker-worker run` with these options, this Python, folder and environment. The Redis URL becomes a
    variable: it may have a password, and everybody can read the arguments of a process."""
    kept = {
        variable: value
        for variable, value in sorted(environment.items())
        if variable in _KEPT or variable.startswith(_KEPT_PREFIXES)
    }
    others, words = list[str](), iter(options)
    for word in words:
        if word == "--redis" or word.startswith("--redis="):
            kept[f"{ENV_PREFIX}REDIS_URL"] = next(words) if word == "--redis" else word.removeprefix("--redis=")
        else:
            others.append(word)
    # -P: a folder named like one of the worker's packages must not be imported instead.
    command = (sys.executable, "-P", "-m", "stoker_worker", "run", *others)
    return ServiceUnit(name, command, Path.cwd(), kept, math.ceil(min(grace_s, _MOST_GRACE_S)) + _SAVING_S)


Say = Callable[[str], None]
"""Prints a line about a step."""


class ServiceRefused(StokerError):
    """The service manager is missing, or it refused; the message has its reason."""


def require_program(name: str, system: str) -> None:
    """Raises `ServiceRefused` if the program is not on the PATH."""
    if shutil.which(name) is None:
        raise ServiceRefused(f"{name} is missing: a service needs {system}; `--print` shows what it would run")


def called(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def called_well(*command: str, or_code: int = 0) -> None:
    """Raises `ServiceRefused`, with the command's output, if it failed. `or_code`: another exit code that is well."""
    done = called(*command)
    if done.returncode not in (0, or_code):
        # launchctl's last line only advises to become root, which is wrong for an agent.
        said = "; ".join((done.stderr or done.stdout).strip().splitlines())
        raise ServiceRefused(f"{' '.join(command)}: {said or f'exit code {done.returncode}'}")


def _is_other(path: Path, text: str) -> bool:
    """True if there is no such file, or one with another text."""
    return not path.exists() or path.read_bytes() != text.encode()


@contextmanager
def _replaced(path: Path, text: str) -> Iterator[None]:
    """Give a file another text. Only its owner can read it, because variables may have passwords. The caller stops the
    service in the block. The text is on disk before the block, because the disk may be full, and replaces the old one
    after it: if `install` is interrupted in the block, the next one still finds the difference."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with draft_of(path) as draft:
        write_new(draft, text.encode())
        yield


# --- a Mac ---

_POLL_S: Final = 0.2
_MARGIN_S: Final = 10.0
_RUNS_ALREADY: Final = 37
"""The exit code of `launchctl kickstart` for an agent that runs: macOS' EALREADY."""


class Launchd:
    """Talks to the launchd of the user's session, `launchctl ... gui/UID`, which may refuse with `ServiceRefused`."""

    def __init__(self, library: Path, uid: int) -> None:
        """`library`: the user's ``~/Library``."""
        self._agents = library / "LaunchAgents"
        self._logs = library / "Logs" / "stoker"
        self._session = f"gui/{uid}"

    def path(self, name: str) -> Path:
        """The service's file, which exists while the service is installed."""
        return self._agents / f"{name}.plist"

    def text(self, unit: ServiceUnit) -> str:
        """The text of the service's file."""
        log = str(self._log(unit.name))
        agent = {
            "Label": unit.name,
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
        """Write the file and start the service; stop it first if it runs with another file."""
        self._require()
        path, text, is_loaded = self.path(unit.name), self.text(unit), self._is_loaded(unit.name)
        self._logs.mkdir(parents=True, exist_ok=True)  # else launchd makes it, as root
        is_other = _is_other(path, text)
        if is_other:
            with _replaced(path, text):
                if is_loaded:
                    say("it runs: it stops first, once its running jobs have ended")
                    self._unload(unit.name, self._stop_timeout_s(unit.name))
        say(f"{'wrote' if is_other else 'unchanged:'} {path}")
        called("launchctl", "enable", self._target(unit.name))  # launchd refuses one that was disabled: error 5
        if is_other or not is_loaded:
            called_well("launchctl", "bootstrap", self._session, str(path))
        else:  # it may have ended well, and then starts only if told to
            called_well("launchctl", "kickstart", self._target(unit.name), or_code=_RUNS_ALREADY)
        say(f"{unit.name} is started, and will be at each login")

    def uninstall(self, name: str, say: Say) -> None:
        """Stop an installed service, once its running jobs have ended or their grace is over; remove its file."""
        self._require()
        path = self.path(name)
        if self._is_loaded(name):
            say(f"stopping {name}: its running jobs may end first")
            self._unload(name, self._stop_timeout_s(name))
        path.unlink()
        say(f"removed {path}; the store and {self._log(name)} stay")

    def logs_command(self, name: str, *, lines: int, follow: bool) -> list[str]:
        """The command that prints the end of the log."""
        log = self._log(name)
        if not log.exists():
            raise ServiceRefused(f"there is no log {log}")
        return ["tail", "-n", str(lines), *(["-F"] if follow else []), str(log)]

    def _unload(self, name: str, stop_timeout_s: float) -> None:
        """Stop the agent, and wait: launchctl returns earlier, but launchd takes no other agent of that name until the
        worker has ended. It kills a worker that takes too long."""
        called("launchctl", "bootout", self._target(name))
        deadline = time.monotonic() + stop_timeout_s + _MARGIN_S
        while self._is_loaded(name):
            if time.monotonic() > deadline:
                raise ServiceRefused(f"launchd does not end {name}: see launchctl print {self._target(name)}")
            time.sleep(_POLL_S)

    def _stop_timeout_s(self, name: str) -> float:
        """The stop timeout of the agent that runs; the next one may have another. 0: unknown."""
        try:
            return float(plistlib.loads(self.path(name).read_bytes())["ExitTimeOut"])
        except (OSError, ValueError, TypeError, KeyError, ExpatError):  # a person may have changed the file
            return 0.0

    def _is_loaded(self, name: str) -> bool:
        return called("launchctl", "print", self._target(name)).returncode == 0

    def _target(self, name: str) -> str:
        return f"{self._session}/{name}"

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _require(self) -> None:
        require_program("launchctl", "launchd")
        if called("launchctl", "print", self._session).returncode != 0:
            raise ServiceRefused(
                "launchd has no session of yours: log in on the Mac's own screen first; docs/operations.md has the way "
                "without a login"
            )


# --- Linux ---

_LINGER: Final = Path("/var/lib/systemd/linger")

# KillMode: a stop reaches only the worker, which needs its embedded Redis server until its jobs are given back, and the
# server of a crashed worker goes on taking jobs. Exit code 2 is a wrong option, which no restart mends.
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
_SYSTEMCTL: Final = ("systemctl", "--user")


class Systemd:
    """Talks to the user's own manager, `systemctl --user`. The methods are those of `Launchd`."""

    def __init__(self, units: Path) -> None:
        """`units`: folder of the units, ``~/.config/systemd/user``."""
        self._units = units

    def path(self, name: str) -> Path:
        return self._units / f"{name}.service"

    def text(self, unit: ServiceUnit) -> str:
        program, *words = unit.command  # systemd expands variables in the words alone
        return _UNIT.format(
            name=unit.name,
            command=" ".join([_quoted(program), *(_quoted(word).replace("$", "$$") for word in words)]),
            folder=str(unit.folder).replace("%", "%%"),
            environment="".join(f"Environment={_quoted(f'{k}={v}')}\n" for k, v in unit.environment.items()),
            restart_s=RESTART_S,
            stop_timeout_s=unit.stop_timeout_s,
        )

    def install(self, unit: ServiceUnit, say: Say) -> None:
        self._require()
        path, text = self.path(unit.name), self.text(unit)
        is_other = _is_other(path, text)
        if is_other:
            with _replaced(path, text):
                if called(*_SYSTEMCTL, "--quiet", "is-active", path.name).returncode == 0:
                    say("it runs: it stops first, once its running jobs have ended")
                    called_well(*_SYSTEMCTL, "stop", path.name)  # the reload would give it the new TimeoutStopSec
        say(f"{'wrote' if is_other else 'unchanged:'} {path}")
        called_well(*_SYSTEMCTL, "daemon-reload")
        called_well(*_SYSTEMCTL, "--quiet", "enable", path.name)
        called_well(*_SYSTEMCTL, "restart" if is_other else "start", path.name)
        say(f"{unit.name} is started, and will be at each login")
        if not (_LINGER / getpass.getuser()).exists():
            say("to start it at boot, and keep it after you log out: loginctl enable-linger")

    def uninstall(self, name: str, say: Say) -> None:
        self._require()
        path = self.path(name)
        say(f"stopping {name}: its running jobs may end first")
        called_well(*_SYSTEMCTL, "--quiet", "disable", "--now", path.name)
        path.unlink()
        called_well(*_SYSTEMCTL, "daemon-reload")
        say(f"removed {path}; the store stays")

    def logs_command(self, name: str, *, lines: int, follow: bool) -> list[str]:
        if not self.path(name).exists():
            raise ServiceRefused(f"{name} is not installed")
        require_program("journalctl", "systemd's journal")
        follows = ["--follow"] if follow else []
        return ["journalctl", "--no-pager", "--user-unit", self.path(name).name, "--lines", str(lines), *follows]

    def _require(self) -> None:
        require_program("systemctl", "systemd")
        done = called(*_SYSTEMCTL, "show", "--property=Version")
        if done.returncode != 0:
            raise ServiceRefused(f"systemd runs no services for this user here: {done.stderr.strip()}")


def _quoted(word: str) -> str:
    """A word for a unit file, where `%` begins a specifier, and quotes and line ends are escaped as in C."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped.replace("%", "%%")}"'


# --- this system ---

ServiceManager = Launchd | Systemd


def manager_here() -> ServiceManager:
    """launchd on a Mac, systemd elsewhere."""
    if platform.system() == "Darwin":
        return Launchd(Path.home() / "Library", os.getuid())
    return Systemd(Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user")
