"""`stoker-worker demo`: what it removes before it begins, what it leaves alone, and how it ends."""

import errno
import logging
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner
from tests.support.server_fixture import require_server_program

from stoker_shared.errors import StoreUnusable
from stoker_worker.cli.demo import _next_steps, _remove_earlier
from stoker_worker.cli.main import main
from stoker_worker.memory.locks import StoreLock


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_an_earlier_demo_is_removed_but_its_model(tmp_path: Path) -> None:
    for name in ("store/lock", "store/agents.db", "store/redis/server.lock", "redis/server.lock", "Model/config.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    _remove_earlier(tmp_path)
    assert files(tmp_path) == {"Model/config.json"}
    _remove_earlier(tmp_path)


def test_the_store_of_a_worker_that_runs_is_not_removed(tmp_path: Path) -> None:
    """The demo's last lines tell how to start one."""
    with closing(StoreLock(tmp_path / "store")):
        with pytest.raises(StoreUnusable, match="in use by pid"):
            _remove_earlier(tmp_path)
        assert files(tmp_path) == {"store/lock"}


@pytest.mark.parametrize("name", ["store/prices.csv", "redis/redis.conf", "agents.db"])
def test_what_no_demo_made_is_not_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(StoreUnusable, match="another --folder"):
        _remove_earlier(tmp_path)
    assert files(tmp_path) == {name}


def test_the_commands_that_it_prints_can_be_copied_also_with_spaces_in_the_paths() -> None:
    [command] = [line for line in _next_steps(Path("my demo"), "my demo/m").splitlines() if " run " in line]
    options = ["--model", "my demo/m", "--redis", "embedded", "--store", "my demo/store"]
    assert shlex.split(command)[1:] == ["run", *options]


ENDED = """
import os, signal, sys
from stoker_worker.cli import demo
from stoker_worker.cli.main import main

def run(model, redis_url, folder):
    print(redis_url, flush=True)
    os.kill(os.getpid(), int(sys.argv[2]))

signal.signal(signal.SIGHUP, signal.SIG_DFL)
demo._run_worker = run
main(["demo", "--folder", sys.argv[1], "--model", "any"])
"""


@pytest.mark.server
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_ended_leaves_no_server_behind(tmp_path: Path, signum: signal.Signals) -> None:
    require_server_program()
    command = [sys.executable, "-c", ENDED, str(tmp_path), str(int(signum))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 128 + signum, done.stderr
    [url] = [line for line in done.stdout.splitlines() if line.startswith("redis://")]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", urlsplit(url).port or 0))


def test_a_folder_without_rights_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(logging.getLogger("stoker"), "setLevel", lambda level: None)
    done = CliRunner().invoke(main, ["demo", "--folder", str(tmp_path / "new")])
    refusal = f"Error: PermissionError: [Errno 13] Permission denied: '{tmp_path}/new'"
    assert (done.exit_code, done.output.splitlines()[-1]) == (1, refusal)
