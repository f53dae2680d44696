"""Another process at a store: works on an agent, or tries to."""

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TRIES = """
import json, sys
from pathlib import Path
from stoker_shared.errors import AgentBusy
from stoker_worker.memory.locks import working_on

for line in sys.stdin:
    folder, agent_id, how = json.loads(line)
    try:
        with working_on(Path(folder), agent_id):
            print("working", flush=True)
            if how == "stay":
                sys.stdin.read()
    except AgentBusy:
        print("busy", flush=True)
"""


@contextmanager
def another_process_working_on(folder: Path, agent_id: str) -> Iterator[subprocess.Popen[str]]:
    """Works on the agent until it is killed, or the context ends."""
    with _start() as process:
        try:
            assert _answer(process, folder, agent_id, "stay") == "working"
            yield process
        finally:
            process.kill()


def is_busy_for_others(folder: Path, agent_id: str) -> bool:
    """Whether another process may not work on the agent now."""
    return _answer(_trying(), folder, agent_id, "try") == "busy"


def _start() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", _TRIES], stdin=pipe, stdout=pipe, text=True)


_trying = functools.cache(_start)
"""One for all tests: it ends with its stdin. A start takes longer than all that is asked of it."""


def _answer(process: subprocess.Popen[str], folder: Path, agent_id: str, how: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps([str(folder), agent_id, how]), file=process.stdin, flush=True)
    return process.stdout.readline().strip()
