"""The doctor's checks of a store: what they find, and that they leave it as it was."""

import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from stoker_worker.doctor import store_folder
from stoker_worker.doctor.check import Finding, Status
from stoker_worker.memory.database import NAME
from stoker_worker.memory.schema import FORMAT
from stoker_worker.memory.store import AgentCacheStore


def found_in(folder: Path) -> dict[str, Finding]:
    return {check.name: check.made() for check in store_folder.checks(folder)}


def statuses(folder: Path) -> dict[str, Status]:
    return {name: finding.status for name, finding in found_in(folder).items() if name != "store disk"}


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    assert set(statuses(tmp_path / "a" / "b").values()) == {Status.OK}
    assert not list(tmp_path.iterdir())


def test_a_store_in_use_is_looked_at_beside_its_worker(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with closing(AgentCacheStore(folder)):
        before = sorted(folder.rglob("*"))
        found = found_in(folder)
        assert sorted(folder.rglob("*")) == before
    assert found["store lock"].status == Status.WARN
    assert f"pid {os.getpid()} on " in found["store lock"].line
    assert found["store format"].figures == {"format": FORMAT}
    assert found_in(folder)["store lock"].status == Status.OK


def test_a_store_that_others_can_read_is_found(tmp_path: Path) -> None:
    with closing(AgentCacheStore(tmp_path / "store")):
        (tmp_path / "store").chmod(0o755)
    assert "chmod 700" in found_in(tmp_path / "store")["store folder"].advice


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [(NAME, bytes(8192), "stoker-worker memory restore")],
)
def test_a_store_that_the_worker_would_refuse_is_found(tmp_path: Path, file: str, content: bytes, says: str) -> None:
    with closing(AgentCacheStore(tmp_path)):
        pass
    (tmp_path / file).write_bytes(content)
    found = found_in(tmp_path)["store format"]
    assert found.status == Status.FAIL
    assert says in found.line


def test_a_disk_that_is_nearly_full_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    for free, status in ((2**20, Status.FAIL), (2**30, Status.WARN), (2**40, Status.OK)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert store_folder.disk(tmp_path).status == status
