"""Fixtures of most tests of real processes: a connection and a producer for the session's server, a store folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.restarting_server import RestartingServer
from tests.support.server_fixture import connection, producer, require_server_program  # noqa: F401

if TYPE_CHECKING:
    from tests.worker.memory.replica.sharing import Share


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RestartingServer]:
    require_server_program()
    server = RestartingServer(tmp_path / "redis")
    yield server
    server.stop()


@pytest.fixture(params=["folder", "bucket"])
def share(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["Share"]:
    """A shared store, twice: a folder, and a bucket of an S3 server."""
    from tests.worker.memory.replica.sharing import SharedBucket, SharedFolder

    if request.param == "bucket":
        pytest.importorskip("localbucket")
    share = SharedFolder(tmp_path) if request.param == "folder" else SharedBucket(monkeypatch)
    yield share
    share.close()
