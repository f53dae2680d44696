"""The stores that a test has made are closed behind it."""

from collections.abc import Iterator

import pytest
from tests.worker.pipeline.stages import PlayedStore


@pytest.fixture(autouse=True)
def stores_are_closed() -> Iterator[None]:
    yield
    PlayedStore.close_all()
