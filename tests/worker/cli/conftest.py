"""Fixtures of the tests of `stoker-worker memory ...`: the command, a store's folder, a store with two agents."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.worker.memory.agents import FastDisk, ids, using

from stoker_worker.cli.main import main
from stoker_worker.memory import store_parts

LONG = ids(1300)
Command = Callable[..., Result]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_parts, "Disk", FastDisk)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def command(folder: Path) -> Command:
    def run(*arguments: str | Path, store: Path = folder, ok: bool = True, **options: Any) -> Result:
        name, *rest = map(str, arguments)
        result = CliRunner().invoke(main, ["memory", name, "--store", str(store), *rest], **options)
        assert (result.exit_code == 0) is ok, result.output
        return result

    return run


@pytest.fixture
def two_agents(folder: Path) -> Path:
    """`a` has 1000 tokens and `b` 900; they share the first two blocks."""
    with using(folder) as agent:
        agent("a").say(LONG[:700])
        agent("a").say(LONG[:1000])
        agent("b").say((*LONG[:600], *ids(300, seed=1)))
    return folder
