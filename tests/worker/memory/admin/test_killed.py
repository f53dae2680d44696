"""kill -9 of a backup, a restore and a salvage: the store is as before or as after, and works."""

import os
import random
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.worker.memory.agents import Agent, ids, open_store

from stoker_worker.memory.admin.backup import back_up, restore
from stoker_worker.memory.admin.salvage import salvage
from stoker_worker.memory.store_parts import opened

pytestmark = pytest.mark.slow

NAMES = [f"agent-{n}" for n in range(8)]
N_KILLS = 200 if "DEEP" in os.environ else 3
KILLED_AT = """
import os, sys
from pathlib import Path
from stoker_worker.memory.admin.backup import back_up, restore
from stoker_worker.memory.admin.salvage import salvage
from stoker_worker.memory.store_parts import opened

what, store, file, stop = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
step = 0

def look(event, arguments):
    global step
    if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "sqlite3.connect"):
        step += 1
        if step == stop:
            os.kill(os.getpid(), 9)

sys.addaudithook(look)
if what == "backup":
    with opened(store) as parts:
        back_up(parts, file)
else:
    restore(store, file) if what == "restore" else salvage(store)
os.write(1, str(step).encode())
os._exit(0)
"""


@dataclass(frozen=True)
class Case:
    """A store at version 2 of its agents, and a backup of their version 1."""

    folder: Path
    backup: Path

    def run(self, what: str, file: Path, stop: int = 0) -> int:
        """Returns the steps that it took; killed before step `stop`."""
        arguments = [what, str(self.folder), str(file), str(stop)]
        done = subprocess.run([sys.executable, "-c", KILLED_AT, *arguments], capture_output=True, check=False)
        assert done.returncode == (-9 if stop else 0), done.stderr.decode()
        return int(done.stdout or 0)

    def versions(self) -> set[int]:
        """That the agents are at. A worker starts, and saves a turn."""
        with closing(open_store(self.folder)) as store:
            found = set()
            for n, name in enumerate(NAMES):
                version = store.open_agent(name)
                assert version.transcript is not None
                assert version.transcript.token_ids == ids(20 + n)[: 10 + 10 * (version.number - 1) + n]
                found.add(version.number)
            Agent(store, "another").say((1, 2))
        return found


@pytest.fixture
def case(tmp_path: Path) -> Case:
    case = Case(tmp_path / "store", tmp_path / "backup")
    with closing(open_store(case.folder)) as store:
        for length in (10, 20):
            for n, name in enumerate(NAMES):
                Agent(store, name).say(ids(20 + n)[: length + n])
            if length == 10:
                back_up(store.parts, case.backup)
        shutil.copytree(case.folder, tmp_path / "pristine")  # with the log of a worker that was killed
    shutil.rmtree(case.folder)
    shutil.copytree(tmp_path / "pristine", case.folder)
    return case


def again(case: Case) -> None:
    shutil.rmtree(case.folder)
    shutil.copytree(case.folder.with_name("pristine"), case.folder)


@pytest.mark.parametrize("what", ["restore", "salvage", "backup"])
def test_a_kill_at_any_step_leaves_the_store_as_before_or_as_after(case: Case, tmp_path: Path, what: str) -> None:
    file = case.backup if what == "restore" else tmp_path / "new"
    steps = case.run(what, file)
    after = {1} if what == "restore" else {2}
    assert case.versions() == after
    seen = set()
    stops = range(1, steps + 1)
    # The last steps exchange the two databases.
    for stop in sorted({*random.Random(1).sample(stops, min(N_KILLS, steps)), *stops[-12::2]}):
        again(case)
        if what == "backup":
            file.unlink(missing_ok=True)
        case.run(what, file, stop)
        versions = case.versions()
        assert versions in ({2}, after), stop
        seen |= versions
        if what == "restore":
            assert restore(case.folder, case.backup).agents == 8
        elif what == "salvage":
            assert salvage(case.folder).whole in (8, 9)
        elif file.exists():
            assert restore(tmp_path / f"restored-{stop}", file).agents == 8
        assert case.versions() == after
        assert not list((case.folder / "tmp").iterdir())
    assert seen == {2} | after


def test_a_command_of_the_shell_finishes_what_was_decided(case: Case) -> None:
    steps = case.run("restore", case.backup)
    for stop in range(steps, 0, -1):
        again(case)
        case.run("restore", case.backup, stop)
        if list(case.folder.glob("agents.db.new-*")):
            break
    else:
        pytest.fail("the database is never exchanged")
    with opened(case.folder) as parts, parts.database.snapshot() as connection:
        assert connection.execute("SELECT max(version) FROM agents").fetchone() == (1,)
    assert len(list(case.folder.glob("agents.db.replaced-*"))) >= 1
    assert case.versions() == {1}
