"""What most tests of real processes use: a connection and a producer for the session's server, a folder for a store."""

from pathlib import Path

import pytest
from tests.server_fixture import connection, producer  # noqa: F401


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"
