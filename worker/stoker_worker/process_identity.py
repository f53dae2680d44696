"""Identifies a process by host, boot, pid and start time, to tell dead workers from live ones: pids are used again."""

import os
import platform
import socket
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class ProcessIdentity:
    """One process, ever. `started` is an opaque token that differs between two processes with the same pid."""

    host: str
    boot: str
    pid: int
    started: str

    @classmethod
    def of_this_process(cls) -> "ProcessIdentity":
        pid = os.getpid()
        return cls(host=socket.gethostname(), boot=_boot_id(), pid=pid, started=_start_token(pid) or "unknown")

    def is_certainly_dead(self) -> bool:
        """``True`` if it ran on this host and boot, and is gone or has no known start time; ``False`` if it is alive,
        or ran on another host or before this boot."""
        if (self.host, self.boot) != (socket.gethostname(), _boot_id()):
            return False
        return _start_token(self.pid) != self.started


def pid_namespace() -> str:
    """The PID namespace of this process; empty on a system without them. A container has its own, even if it has the
    host's name: processes that it cannot see may be alive."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


@cache
def _boot_id() -> str:
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "kern.bootsessionuuid")
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_token(pid: int) -> str | None:
    """The start time of a process, as an opaque token; ``None`` if there is no such process, or only a zombie."""
    if platform.system() == "Darwin":
        # One -o for each column: BSD's ps takes everything after a "=" as the heading of that column.
        columns = _output("ps", "-o", "state=", "-o", "lstart=", "-p", str(pid)).split(maxsplit=1)
        return None if len(columns) < 2 or columns[0].startswith("Z") else columns[1].strip()
    try:
        # The command name, in parentheses, may contain anything. Only the part after the last ")" can be split.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


def _output(*command: str) -> str:
    plain = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}  # ps writes times in the caller's language and time zone
    return subprocess.run(command, capture_output=True, text=True, check=False, env=plain).stdout.strip()
