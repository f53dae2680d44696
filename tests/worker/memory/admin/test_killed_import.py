"""kill -9 of `stoker-worker memory import`: the agent is there whole or not at all, and the store works."""

import os
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.worker.memory.agents import Agent, ids, open_store

from stoker_shared.errors import AgentMemoryError
from stoker_worker.memory.admin.archive import export_agent, import_agent
from stoker_worker.memory.admin.verify import verify_store

LONG = ids(1000)
EVERY = 1 if "DEEP" in os.environ else 4
KILLED_AT = """
import os, sqlite3, sys
from functools import partial
from stoker_worker.cli.main import main

store, stop = sys.argv.pop(1), int(sys.argv.pop(1))
step = 0

def count():
    global step
    step += 1
    if step == stop:
        os.kill(os.getpid(), 9)

def look(event, arguments):
    writes = event in ("os.rename", "os.remove", "os.mkdir") or event == "open" and arguments[2] & os.O_CREAT
    if writes and str(arguments[0]).startswith(store):
        count()

class Counted(sqlite3.Connection):
    def execute(self, sql, *arguments):
        if sql.startswith(("INSERT", "UPDATE", "DELETE", "COMMIT")):
            count()
        return super().execute(sql, *arguments)

sys.addaudithook(look)
sqlite3.connect = partial(sqlite3.connect, factory=Counted)
try:
    main()
finally:
    os.write(2, f"changes: {step}".encode())
"""


@dataclass(frozen=True)
class Case:
    """A store with an agent `other`, and a file with agent `a`: its three turns, three blocks and a tail."""

    folder: Path
    file: Path

    def import_(self, stop: int = 0) -> int:
        """The command, in a process of its own. Returns how many changes it made; killed before change `stop`."""
        command = ["memory", "import", str(self.file), "--with-blocks", "--store", str(self.folder)]
        program = [sys.executable, "-c", KILLED_AT, str(self.folder), str(stop), *command]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        assert done.returncode == (-9 if stop else 0), done.stderr
        return int(done.stderr.rpartition("changes: ")[2] or 0)

    def again(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.folder.with_name("pristine"), self.folder)

    def version_of_a(self) -> int:
        """0: there is no such agent. The store is whole, and so is everyone in it; a second import does what it should,
        and the agent goes on."""
        with closing(open_store(self.folder)) as store:
            assert list(verify_store(store.parts)) == []
            found = Agent(store, "a").open().number
            if found:
                with pytest.raises(AgentMemoryError, match="already"):
                    import_agent(store.parts, self.file)
            else:
                assert import_agent(store.parts, self.file, with_blocks=True).version == 3
            agent, other = Agent(store, "a"), Agent(store, "other")
            assert (agent.open().number, agent.tokens()) == (3, LONG)
            assert agent.cached((*LONG, 1)) == 1000
            assert other.tokens() == LONG[:300]
            for each in (agent, other):
                each.say((*each.tokens(), 1, 2))
            assert list(verify_store(store.parts)) == []
            return found


@pytest.fixture
def case(tmp_path: Path) -> Case:
    with closing(open_store(tmp_path / "home")) as store:
        for prompt in (ids(300, seed=5), LONG[:600], LONG):
            Agent(store, "a").say(prompt)
        export_agent(store.parts, "a", tmp_path / "a.tar", with_blocks=True)
    with closing(open_store(tmp_path / "pristine")) as store:
        Agent(store, "other").say(LONG[:300])
    return Case(tmp_path / "store", tmp_path / "a.tar")


@pytest.mark.slow
def test_a_kill_at_any_step_of_an_import_leaves_the_agent_whole_or_absent(case: Case) -> None:
    case.again()
    steps = case.import_()
    assert case.version_of_a() == 3
    seen = set()
    for stop in range(steps, 0, -EVERY):
        case.again()
        case.import_(stop)
        seen.add(case.version_of_a())
    assert seen == {0, 3}
