"""`memory fork` and `memory rm` in a loop beside a worker under load, and killed in the middle: nothing is lost, and
every agent is whole or not there."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.wait import wait_for
from tests.support.worker_process import running_worker

from stoker import Producer
from stoker_shared.errors import JobFailed

pytestmark = pytest.mark.server

AGENTS, TURNS, KILLS = (30, 40, 60) if os.environ.get("DEEP") else (8, 20, 5)
ANSWER_TOKENS, VICTIMS_TOKENS = 4, 40
BRIEF = "All of us begin in this way, which is longer than a block of the cache. " * 5

SHELL = """
import json, random, sys
from click.testing import CliRunner
from stoker_worker.cli.main import main

store, name, agents = sys.argv[1:]
rng = random.Random(name)

def run(command, *arguments):
    result = CliRunner().invoke(main, ["memory", command, "--store", store, "--json", *arguments])
    print(json.dumps([command, *arguments, result.exit_code, json.loads(result.stdout)]), flush=True)

n = 0
while True:
    n += 1
    run("fork", f"agent {rng.randrange(int(agents))}", f"fork {name} {n}")
    run("rm", f"fork {name} {n - rng.randrange(3)}", "--yes")
    run("rm", "victim", "--yes")
"""
"""A shell that forks agents with work in flight, and removes forks, and an agent with work now and then."""


@contextmanager
def a_shell(store: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    """Killed with the context, wherever it is."""
    log = (store.parent / f"{name}.log").open("w")
    with (
        log,
        subprocess.Popen(
            [sys.executable, "-c", SHELL, str(store), name, str(AGENTS)],
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        ) as shell,
    ):
        try:
            yield shell
        finally:
            shell.kill()


def lines_of(store: Path, name: str) -> list[list[Any]]:
    """Its commands, their exit codes and their outputs; what it was writing when it was killed is left out."""
    return [json.loads(line) for line in (store.parent / f"{name}.log").read_text().splitlines(keepends=True)
            if line.endswith("\n")]  # fmt: skip


def memory(store: Path, command: str, *arguments: str) -> Any:
    program = [sys.executable, "-m", "stoker_worker", "memory", command, "--store", str(store), "--json", *arguments]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def wait_for_lines(store: Path, name: str, n: int, shell: subprocess.Popen[str]) -> None:
    wait_for(lambda: len(lines_of(store, name)) >= n or shell.poll() is not None)
    assert shell.poll() is None, (store.parent / f"{name}.log").read_text()


@pytest.mark.timeout(600)
def test_fork_and_rm_in_a_loop_lose_nothing_beside_a_worker_under_load(producer, redis_url, store):
    rng, tickets = random.Random(AGENTS), {f"agent {n}": [] for n in range(AGENTS)}
    names, stop, versions = ["patient"], threading.Event(), list[int]()
    victim = threading.Thread(target=lambda: versions.extend(victims_turns(redis_url, stop)))
    with running_worker(redis_url, store, "--scripted-steps-per-s", "500") as worker:
        worker.wait_until_ready()
        for turn in range(TURNS):
            for agent_id, theirs in tickets.items():
                prompt = f"{BRIEF}I am {agent_id}." if turn == 0 else f" {turn}"
                fields = {"context": "append", "max_tokens": ANSWER_TOKENS}
                theirs.append(producer.submit(agent_id=agent_id, prompt=prompt, **fields))
        for theirs in tickets.values():
            theirs[0].result(timeout_s=60)
        victim.start()
        with a_shell(store, "patient") as patient:
            for kill in range(KILLS):
                names.append(f"killed {kill}")
                with a_shell(store, names[-1]) as shell:
                    wait_for_lines(store, names[-1], rng.randrange(1, 8), shell)
                    time.sleep(rng.random() * 0.01)  # anywhere in a command, not only after one
            wait_for_lines(store, "patient", 60, patient)
        stop.set()
        victim.join(60)
        assert versions
        assert all(versions), worker.log
        for agent_id, theirs in tickets.items():
            n_tokens = 0
            for turn, ticket in enumerate(theirs):
                result = ticket.result(timeout_s=120)
                new = len(f"{BRIEF}I am {agent_id}.") if turn == 0 else 1 + len(str(turn))
                assert (result.usage.prompt_tokens, result.cache.agent_version) == (n_tokens + new, turn + 1)
                n_tokens += new + ANSWER_TOKENS

    forked, n_removed = {}, 0
    for line in (line for name in names for line in lines_of(store, name)):
        command, agent_id, exit_code, output = line[0], line[1], line[-2], line[-1]
        if command == "fork":
            assert exit_code == 0, line
            forked[line[2]] = agent_id
        elif exit_code == 0 and agent_id == "victim":
            n_removed += 1
        else:
            assert exit_code == 0 or output["error"]["type"] in {"AgentNotFound", "AgentBusy"}, line
    assert versions.count(1) <= n_removed + KILLS + 1  # a killed command may have removed it

    memory(store, "verify")
    text_of = {agent_id: memory(store, "show", agent_id, "--text")["text"] for agent_id in tickets}
    left = [agent["agent_id"] for agent in memory(store, "ls") if agent["agent_id"].startswith("fork")]
    assert left
    for agent_id in rng.sample(left, min(10, len(left))):
        text = memory(store, "show", agent_id, "--text")["text"]
        assert text.startswith(BRIEF)
        source = forked.get(agent_id)  # unknown if its command was killed before it had said so
        assert any(whole.startswith(text) for name, whole in text_of.items() if source in {None, name})


def victims_turns(redis_url: str, stop: threading.Event) -> Iterator[int]:
    """The version after each turn of the agent that is removed now and then; 0 if a turn failed or was not right."""
    with Producer(redis_url) as producer:
        while not stop.is_set():
            ticket = producer.submit(agent_id="victim", prompt="?" * 10, context="append", max_tokens=VICTIMS_TOKENS)
            try:
                result = ticket.result(timeout_s=60)
            except JobFailed:
                yield 0
                continue
            assert result.cache.agent_version is not None
            before = (result.cache.agent_version - 1) * (10 + VICTIMS_TOKENS)
            yield result.cache.agent_version if result.usage.prompt_tokens == 10 + before else 0
