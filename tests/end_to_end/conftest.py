"""Fixtures of most tests of real processes: a connection and a producer for the session's server, a store folder."""

from pathlib import Path

import pytest
from tests.server_fixture import connection, producer  # noqa: F401


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"
