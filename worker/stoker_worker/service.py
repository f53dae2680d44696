"""The worker as a service: a launchd agent on a Mac, a systemd unit on Linux; the user's own or the machine's.

Owns the service's file and that of its Redis URL. Runs the programs of the service manager; reads no settings.
"""

import getpass
import math
import os
import platform
import plistlib
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from stoker_shared.durable_file import replace_file
from stoker_shared.environment import ENV_PREFIX
from stoker_shared.errors import StokerError
from stoker_shared.text import mask_url

RESTART_S: Final = 30
"""Between two starts of a worker that crashes: a wrong setting must not load the model all the time."""

_SAVING_S: Final = 30
"""After the grace: the jobs that were cut short are given back, and the embedded server writes its file."""

# A service starts with almost no variables. PATH finds redis-server, HF_* the models that are downloaded already.
_KEPT: Final = ("PATH", "PYTHONPATH")
_KEPT_PREFIXES: Final = (ENV_PREFIX, "HF_")
_REDIS_URL: Final = f"{ENV_PREFIX}REDIS_URL"


@dataclass(frozen=True)
class ServiceUnit:
    """
    Attributes:
        name: of the service and of its file.
        command: program and arguments.
        folder: where it runs: relative paths among the options mean what they meant to `install`.
        environment: all variables that it needs besides those that every process of the user has.
        stop_timeout_s: the service manager kills a worker that takes longer to stop.
        account: the user that a system-wide service runs as; ``None``: it is the user's own service.
        redis_url: to be written into the file that `command` names; empty: there is no password to hide.
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]
    stop_timeout_s: int
    account: pwd.struct_passwd | None = None
    redis_url: str = ""


def worker_unit(
    name: str,
    options: Sequence[str],
    redis_url_file: Path,
    *,
    grace_s: float,
    environment: Mapping[str, str] = os.environ,
    account: pwd.struct_passwd | None = None,
) -> ServiceUnit:
    """The unit of `stoker-worker run` with these options, from this Python, folder and environment.

    Args:
        redis_url_file: for a Redis URL with a password, which everybody could read in the arguments of a process.
    """
    kept = {
        variable: value
        for variable, value in sorted(environment.items())
        if variable in _KEPT or variable.startswith(_KEPT_PREFIXES)
    }
    others, urls = _split_redis(options)
    redis_url = urls[-1] if urls else kept.get(_REDIS_URL, "")
    if urls or _has_password(redis_url):
        kept.pop(_REDIS_URL, None)
    if not _has_password(redis_url):
        redis_url, others = "", list(options)
    else:
        others += ["--redis", redis_url_file.as_uri()]
    if account is not None:  # the system's manager shows a service's variables to every user
        kept.pop("HF_TOKEN", None)
        kept["HOME"] = account.pw_dir
    # -P: a folder named like one of the worker's packages must not be imported instead.
    command = (sys.executable, "-P", "-m", "stoker_worker", "run", *others)
    return ServiceUnit(name, command, Path.cwd(), kept, math.ceil(grace_s) + _SAVING_S, account, redis_url)


def _split_redis(options: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options without ``--redis``, and its values."""
    others, urls, words = list[str](), list[str](), iter(options)
    for word in words:
        if word == "--redis":
            urls.append(next(words))
        elif word.startswith("--redis="):
            urls.append(word.removeprefix("--redis="))
        else:
            others.append(word)
    return others, urls


def _has_password(url: str) -> bool:
    return "://" in url and mask_url(url) != url


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
        """Stop an installed service, once its running jobs have ended or their grace is over; remove its file."""

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
    """Return its output.

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
    """Returns True if it was written. Only its owner can read it: variables may have passwords too."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.encode())
    return True


# --- a Mac ---

_POLL_S: Final = 0.2
_MARGIN_S: Final = 10.0


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
        """The time limit of the installed agent; the next one may have another."""
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


# --- Linux ---

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


# --- this system ---

ROOT: Final = Path("/")


def manager_here(*, is_system: bool) -> ServiceManager:
    """launchd on a Mac, systemd elsewhere."""
    secrets = ROOT / "etc/stoker" if is_system else Path.home() / ".config/stoker"
    if platform.system() == "Darwin":
        library = ROOT / "Library" if is_system else Path.home() / "Library"
        return Launchd(library, None if is_system else os.getuid(), secrets)
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    units = ROOT / "etc/systemd/system" if is_system else config / "systemd" / "user"
    return Systemd(units, secrets, is_system=is_system)


def account_of(user: str | None, environment: Mapping[str, str] = os.environ) -> pwd.struct_passwd:
    """The user that a system-wide service runs as.

    Args:
        user: ``None`` for the one who called sudo.

    Raises:
        ServiceRefused: there is none, or it is root.
    """
    name = user or environment.get("SUDO_USER")
    if name is None:
        raise ServiceRefused("a --system service needs the name of the user to run as: --user NAME")
    try:
        account = pwd.getpwnam(name)
    except KeyError:
        raise ServiceRefused(f"there is no user {name}") from None
    if account.pw_uid == 0:
        raise ServiceRefused("the worker needs no rights of root: name another user with --user NAME")
    return account


def require_root() -> None:
    """
    Raises:
        ServiceRefused: this process may not change the system's services.
    """
    if os.geteuid() != 0:
        raise ServiceRefused("a --system service can be changed by root only: call it with sudo")
