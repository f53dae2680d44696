"""A process that is killed while it commits groups of turns: what it has saved is there, once, and the store opens."""

import os
import random
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from tests.worker.memory.agents import Agent, ids, open_store
from tests.worker.memory.saving_process import AGENTS, THREADS

from stoker_worker.memory.admin.verify import verify_store
from stoker_worker.memory.transcripts import find_agent, read_history

KILLS = 60 if os.environ.get("DEEP") else 6


@pytest.mark.slow
def test_kills_in_group_commits_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    dice = random.Random(KILLS)
    saved: dict[str, list[str]] = {}
    for kill in range(KILLS):
        module = "tests.worker.memory.saving_process"
        command = [sys.executable, "-m", module, str(tmp_path / "store"), str(kill)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(dice.randrange(60, 160)):
            note(saved, process.stdout.readline())
        process.kill()
        rest = process.stdout.read().splitlines(keepends=True)
        for line in rest:
            if line.endswith("\n"):
                note(saved, line)
        process.wait()
        process.stdout.close()
        check(tmp_path / "store", saved)
    assert len(saved) == THREADS * AGENTS


def note(saved: dict[str, list[str]], line: str) -> None:
    name, version, job_id = line.split()
    jobs = saved.setdefault(name, [])
    assert int(version) == len(jobs) + 1
    jobs.append(job_id)


def check(folder: Path, saved: dict[str, list[str]]) -> None:
    """Each agent has all turns that were saved, and at most the one that was being saved; from there it goes on."""
    with closing(open_store(folder)) as store:
        assert list(verify_store(store.parts)) == []
        for name in (f"{thread}/{number}" for thread in range(THREADS) for number in range(AGENTS)):
            agent, jobs = Agent(store, name), saved.setdefault(name, [])
            number = agent.open().number
            assert number - len(jobs) in (0, 1), name
            assert agent.tokens() == ids(40, seed=int(name[0])) * number
            with store.parts.database.snapshot() as connection:
                row = find_agent(connection, name)
                kept = [record for record, _ in read_history(connection, row)] if row else []
            made = {record.version: record.about.job_id for record in kept}
            if number > len(jobs):
                jobs.append(str(made[number]))  # its answer was on its way
            assert made == {version: jobs[version - 1] for version in made}
