"""Files that cannot be read: a named miss for `full`, a refusal for `append`.

Permissions do not stop root, so some faults are simulated; the others are real ones of the file system.
"""

import errno
import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest
from tests.worker.memory.agents import Agent, ids, open_store
from tests.worker.memory.faulty_files import unreadable

from stoker_shared.errors import AgentTranscriptUnreadable
from stoker_worker.memory.database import Database, DatabaseFailed

LONG = ids(700)
NEXT = (*LONG, 1, 2, 3)


@contextmanager
def instead(path: Path, make: Callable[[Path], object]) -> Iterator[None]:
    """Something else where `path` was."""
    aside = path.with_name("aside")
    path.rename(aside)
    make(path)
    yield
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    aside.rename(path)


KINDS: dict[str, Callable[[Path], AbstractContextManager[None]]] = {
    "no permission": lambda path: unreadable(path, errno.EACCES),
    "I/O error": lambda path: unreadable(path, errno.EIO),
    "a loop": lambda path: instead(path, lambda place: place.symlink_to(place.name)),
    "a file": lambda path: instead(path, Path.touch),
    "a folder": lambda path: instead(path, Path.mkdir),
}
FAULTS = [
    (place, kind)
    for place, kind in itertools.product(("tail", "pieces", "blocks"), KINDS)
    if kind != ("a file" if place == "tail" else "a folder")  # what it is anyway
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with closing(open_store(tmp_path / "store")) as store:
        for name in ("agent", "neighbour"):
            for length in (300, 700):
                Agent(store, name).say(LONG[:length])
    return tmp_path / "store"


@pytest.mark.parametrize(("place", "kind"), FAULTS)
def test_cache_that_cannot_be_read_is_a_named_miss(folder: Path, place: str, kind: str) -> None:
    with closing(open_store(folder)) as store:
        agent = Agent(store)
        tail = store.parts.pieces.paths("agent", 2)[0]
        with KINDS[kind]({"tail": tail, "pieces": folder / "pieces", "blocks": folder / "blocks"}[place]):
            assert agent.tokens() == LONG
            reason = "block_unreadable" if place == "blocks" else "tail_unreadable"
            assert agent.restore(NEXT).miss_reason == reason
            assert store.misses == {reason: 1}
            if place == "tail":
                assert Agent(store, "neighbour").cached(NEXT) == len(LONG)


def test_a_database_that_cannot_be_read_is_a_refusal_and_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_store(folder)) as store:
        agent = Agent(store)

        @contextmanager
        def failing(self: Database) -> Iterator[None]:
            raise DatabaseFailed("disk I/O error")
            yield

        with monkeypatch.context() as broken:
            broken.setattr(Database, "snapshot", failing)
            with pytest.raises(AgentTranscriptUnreadable, match=r"'agent'.*disk I/O error") as caught:
                agent.open()
            usable = caught.value.usable
            assert usable.transcript is None
            turn = agent.turn(NEXT, agent=usable)
            with pytest.raises(OSError, match="could not be read"):
                store.save(turn)
        # The disk is well again, and what was there is not replaced by a conversation that knew nothing of it.
        with pytest.raises(OSError, match="could not be read"):
            store.save(turn)
        assert agent.tokens() == LONG
        assert agent.cached(NEXT) == len(LONG)
