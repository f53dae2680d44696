"""Every block of docs/producers.md and of the README's Python, as somebody pastes it: on a real server and worker."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.worker_process import running_worker

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "producers.md"
README = ROOT / "README.md"
PLAYED_REDIS_CLI = Path(__file__).with_name("played_redis_cli.py")
SHOWN_URL = "redis://127.0.0.1:6379"


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def run(redis_url, tmp_path):
    """Run a block with another server in place of the one it names."""
    with running_worker(redis_url, tmp_path / "store", "--scripted-steps-per-s", "2000") as worker:
        worker.wait_until_ready()

        def run(command, block, folder=tmp_path):
            path = f"{Path(sys.executable).parent}:{tmp_path}:{os.environ['PATH']}"
            done = subprocess.run(
                command, input=block.replace(SHOWN_URL, redis_url), cwd=folder, env={**os.environ, "PATH": path},
                capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
            return done.stdout

        yield run


def test_every_language_of_the_page_is_run():
    assert set(re.findall(r"^```(\w*)$", PAGE.read_text(), re.MULTILINE)) == {"", "python", "sh", "js"}


@pytest.mark.parametrize("page", [PAGE, README], ids=lambda page: page.name)
def test_the_python_blocks_run_one_after_the_other(run, page):
    script = "\n".join(blocks(page, "python"))
    assert run([sys.executable, "-W", "error"], script)


def test_the_shell_blocks_run(run, tmp_path):
    if not shutil.which("redis-cli"):
        stand_in = tmp_path / "redis-cli"
        stand_in.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).with_name("played_redis_cli.py")}" "$@"\n'
        )
        stand_in.chmod(0o755)
    for block in blocks(PAGE, "sh"):
        out = run(["bash", "-eu", "-o", "pipefail"], block)
        assert '"text": ' in out or '"text":"' in out


def test_the_javascript_runs(run, node_folder):
    [block] = blocks(PAGE, "js")
    assert run(["node", "--input-type=module"], block, node_folder).splitlines()[-1] == "false"
