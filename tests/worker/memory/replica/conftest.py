"""A shared store: a folder, and for tests that are marked with `BOTH` a bucket as well."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.worker.memory.replica.sharing import Machine, Share, SharedBucket, SharedFolder

from stoker_worker import events
from stoker_worker.memory.replica import bucket


@pytest.fixture(autouse=True)
def short_outages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer after an outage is believed sooner; a slow machine has more time."""
    monkeypatch.setattr(events, "_QUIET_S", 0.1)
    monkeypatch.setattr(bucket, "COMMIT_LIMIT_S", 5.0)


@pytest.fixture
def share(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Share]:
    pytest.importorskip("obstore")
    is_bucket = getattr(request, "param", "folder") == "bucket"
    if is_bucket:
        pytest.importorskip("localbucket")
    share = SharedBucket(monkeypatch) if is_bucket else SharedFolder(tmp_path)
    yield share
    share.close()


@pytest.fixture
def machine(tmp_path: Path, share: Share) -> Iterator[Callable[..., Machine]]:
    """A machine by its name; one of a name that was closed is started again with its disk."""
    machines: list[Machine] = []

    def start(name: str, **options: int) -> Machine:
        machines.append(Machine(tmp_path / name, share, **options))
        return machines[-1]

    yield start
    for one in machines:
        one.store.close()
