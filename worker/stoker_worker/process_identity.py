"""Which process on which boot of which host: enough to tell a dead worker from a live one. No state.

A pid alone proves nothing: it is used again. Host, boot and start time together name one process for ever.
"""

import os
import platform
import socket
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class ProcessIdentity:
    """One process. `started` is an opaque token that differs between two processes of one pid."""

    host: str
    boot: str
    pid: int
    started: str

    @classmethod
    def of_this_process(cls) -> "ProcessIdentity":
        pid = os.getpid()
        return cls(host=socket.gethostname(), boot=_boot_id(), pid=pid, started=_start_token(pid) or "unknown")

    def is_certainly_dead(self) -> bool:
        """``True`` only when this is its host and boot, and no such process runs; ``False`` may mean "cannot say"."""
        if (self.host, self.boot) != (socket.gethostname(), _boot_id()):
            return False
        return _start_token(self.pid) != self.started


@cache
def _boot_id() -> str:
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "kern.bootsessionuuid")
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_token(pid: int) -> str | None:
    """``None`` when no process has this pid, or only a zombie does."""
    if platform.system() == "Darwin":
        # One -o for each column: BSD's ps takes all that follows a "=" for that column's heading.
        columns = _output("ps", "-o", "state=", "-o", "lstart=", "-p", str(pid)).split(maxsplit=1)
        return None if len(columns) < 2 or columns[0].startswith("Z") else columns[1].strip()
    try:
        # The command name, in parentheses, may hold anything: what follows its last ")" is what can be split.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


def _output(*command: str) -> str:
    plain = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}  # times are written in the caller's language and zone
    return subprocess.run(command, capture_output=True, text=True, check=False, env=plain).stdout.strip()
