"""Folders for tests of the memory."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """As `tmp_path`, in RAM where that is possible: for thousands of small files that are made and removed."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)
