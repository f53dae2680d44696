"""`stoker-worker demo`: what it removes before it begins, and what it leaves alone."""

import shlex
from contextlib import closing
from pathlib import Path

import pytest

from stoker_shared.errors import StoreUnusable
from stoker_worker.cli.demo import _next_steps, _remove_earlier
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
