"""Chooses the service manager of this system, and the account of a system-wide service. Asks the manager nothing."""

import os
import platform
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from stoker_worker.service.launchd import Launchd
from stoker_worker.service.manager import ServiceManager, ServiceRefused
from stoker_worker.service.systemd import Systemd

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
    """Whom a system-wide service runs as.

    Args:
        user: ``None``: the one who called sudo.

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
