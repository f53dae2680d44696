"""Chooses the service manager of this system. Asks it nothing."""

import os
import platform
from pathlib import Path

from stoker_worker.service.launchd import Launchd
from stoker_worker.service.manager import ServiceManager
from stoker_worker.service.systemd import Systemd


def manager_here() -> ServiceManager:
    """launchd on a Mac, systemd elsewhere."""
    if platform.system() == "Darwin":
        return Launchd(Path.home() / "Library", os.getuid())
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Systemd(config / "systemd" / "user")
