"""kill -9 of a backup, a restore and a salvage: the store is as before or as after, and works."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
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
FORKS = """
import json, os, sys
from pathlib import Path
from stoker_worker.memory.admin.backup import back_up, restore
from stoker_worker.memory.admin.salvage import salvage
from stoker_worker.memory.store_parts import opened

step = 0

def look(event, arguments):
    global step
    if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "sqlite3.connect"):
        step += 1
        if step == stop:
            os.kill(os.getpid(), 9)

for line in sys.stdin:
    what, store, file, stop = json.loads(line)
    if (pid := os.fork()) == 0:
        sys.addaudithook(look)
        if what == "backup":
            with opened(Path(store)) as parts:
                back_up(parts, Path(file))
        else:
            restore(Path(store), Path(file)) if what == "restore" else salvage(Path(store))
        print(step, end=" ", flush=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""A process that does what is asked of it in forks: a process of its own for each takes half a second to start."""


@dataclass(frozen=True)
class Case:
    """A store at version 2 of its agents, and a backup of their version 1."""

    folder: Path
    backup: Path
    forks: subprocess.Popen[str]

    def run(self, what: str, file: Path, stop: int = 0) -> int:
        """Returns the steps that it took; killed before step `stop`."""
        print(json.dumps([what, str(self.folder), str(file), stop]), file=self.forks.stdin, flush=True)
        assert self.forks.stdout is not None
        *steps, status = map(int, self.forks.stdout.readline().split())
        assert status == (-9 if stop else 0)
        return sum(steps)

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


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", FORKS], stdin=pipe, stdout=pipe, text=True) as process:
        yield process


@pytest.fixture
def case(tmp_path: Path, forks: subprocess.Popen[str]) -> Case:
    case = Case(tmp_path / "store", tmp_path / "backup", forks)
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
