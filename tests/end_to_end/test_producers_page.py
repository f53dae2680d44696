"""Every block of docs/producers.md, and the README's Python and client commands, run as they are."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.support.worker_process import running_worker

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "producers.md"
README = ROOT / "README.md"
MEMORY_PAGE = ROOT / "docs" / "agent-memory.md"
PLAYED_REDIS_CLI = Path(__file__).with_name("played_redis_cli.py")
SHOWN_URL = "redis://127.0.0.1:6379"


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def worker(redis_url, tmp_path):
    with running_worker(redis_url, tmp_path / "store", "--scripted-steps-per-s", "2000") as worker:
        yield worker.wait_until_ready()


@pytest.fixture
def run(worker, redis_url, tmp_path):
    """Run a block, with the test's server in place of the one it names."""

    def run(command, block, folder=tmp_path):
        path = f"{Path(sys.executable).parent}:{tmp_path}:{os.environ['PATH']}"
        own = {"STOKER_STORE": str(tmp_path / "store"), "HOME": str(tmp_path), "STOKER_REDIS_URL": redis_url}
        done = subprocess.run(
            command, input=block.replace(SHOWN_URL, redis_url), cwd=folder,
            env={**os.environ, **own, "PATH": path},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


def put_program(folder, name, script):
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_every_language_of_the_page_is_run():
    assert set(re.findall(r"^```(\w*)$", PAGE.read_text(), re.MULTILINE)) == {"", "python", "sh", "js"}


@pytest.mark.parametrize("page", [PAGE, README], ids=lambda page: page.name)
def test_the_python_blocks_run_one_after_the_other(run, page):
    script = "\n".join(blocks(page, "python"))
    assert run([sys.executable, "-W", "error"], script)


def test_the_shell_blocks_run(run, tmp_path):
    if not shutil.which("redis-cli"):
        put_program(tmp_path, "redis-cli", f'exec "{sys.executable}" "{PLAYED_REDIS_CLI}" "$@"')
    for block in blocks(PAGE, "sh"):
        out = run(["bash", "-eu", "-o", "pipefail"], block)
        assert '"text": ' in out or '"text":"' in out


def test_a_job_made_with_redis_commands_has_its_true_age(run, tmp_path):
    put_program(tmp_path, "redis-cli", f'exec "{sys.executable}" "{PLAYED_REDIS_CLI}" "$@"')
    [block] = [block for block in blocks(PAGE, "sh") if "XREAD" in block]
    began = datetime.now(UTC)
    result = json.loads(run(["bash", "-eu", "-o", "pipefail"], block).splitlines()[-1])
    assert result["timing"]["queued_s"] <= (datetime.now(UTC) - began).total_seconds() + 1


def test_the_client_commands_of_the_readme_and_the_memory_page_run(run, worker, tmp_path):
    put_program(tmp_path, "git", "echo the diff")
    run([sys.executable, "-W", "error"], "\n".join(blocks(README, "python")))  # makes the agent
    [submit] = re.findall(r"^From a shell: `(.*)`$", README.read_text(), re.MULTILINE)
    as_jobs, on_the_machine, _shared_store = blocks(MEMORY_PAGE, "sh")
    assert "stoker agent" in as_jobs
    run(["bash", "-eu", "-o", "pipefail"], f"{submit}\n{as_jobs}")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert "reviewer" in run(["bash", "-eu", "-o", "pipefail"], on_the_machine)


def test_the_javascript_runs(run, node_folder):
    [block] = blocks(PAGE, "js")
    assert run(["node", "--input-type=module"], block, node_folder).splitlines()[-1] == "false"
