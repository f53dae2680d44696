"""Another process at a store: works on an agent, or tries to."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PROGRAM = """
import sys
from pathlib import Path
from stoker_worker.memory.locks import working_on

with working_on(Path(sys.argv[1]), sys.argv[2]):
    print("working", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process_working_on(folder: Path, agent_id: str) -> Iterator[subprocess.Popen[str]]:
    """Works on the agent until it is killed, or the context ends."""
    process = _start(folder, agent_id)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def is_busy_for_others(folder: Path, agent_id: str) -> bool:
    """Whether another process may not work on the agent now."""
    process = _start(folder, agent_id)
    output, errors = process.communicate("")
    assert (output == "working\n") is ("AgentBusy" not in errors), errors
    return "AgentBusy" in errors


def _start(folder: Path, agent_id: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(folder), agent_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
