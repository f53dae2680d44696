"""Unreadable files and folders: a named miss for `full`, a refusal for `append`.

Permissions do not stop root, so some faults are simulated; the others are real ones of the file system.
"""

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from tests.worker.memory.agents import Agent, files_below, ids, open_store
from tests.worker.memory.faulty_files import unreadable

from stoker_shared.errors import AgentTranscriptUnreadable
from stoker_worker.memory.access import look_at
from stoker_worker.ports import AgentVersion

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


def a_loop(path: Path) -> None:
    path.symlink_to(path.name)


KINDS: dict[str, Callable[[Path], AbstractContextManager[None]]] = {
    "no permission": lambda path: unreadable(path, errno.EACCES),
    "I/O error": lambda path: unreadable(path, errno.EIO),
    "a loop": lambda path: instead(path, a_loop),
    "a file": lambda path: instead(path, Path.touch),
    "a folder": lambda path: instead(path, Path.mkdir),
}
PLACES = {
    "agents": lambda folder: folder.parents[1],
    "half": lambda folder: folder.parent,
    "agent": lambda folder: folder,
    "HEAD": lambda folder: folder / "HEAD",
    "record": lambda folder: folder / "00000002.json",
    "tail": lambda folder: folder / "tail-0.safetensors",
    "blocks": lambda folder: folder.parents[2] / "blocks",
}
FOLDERS = {"agents", "half", "agent", "blocks"}
OF_ALL = {"agents", "blocks"}
OF_THE_TRANSCRIPT = {"agents", "half", "agent", "HEAD", "record"}
FAULTS = [
    (place, kind, is_warm)
    for place, kind, is_warm in itertools.product(PLACES, KINDS, (True, False))
    if kind != ("a folder" if place in FOLDERS else "a file")  # what it is anyway
    and (is_warm or place not in OF_ALL)  # a worker does not start on such a store
    and (not is_warm or place != "record")  # it is read once
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    opened = open_store(tmp_path / "store")
    for name in ("agent", "neighbour"):
        for length in (300, 700):
            Agent(opened, name).say(LONG[:length])
    opened.close()
    return tmp_path / "store"


def opened_for_full(agent: Agent) -> AgentVersion:
    """As the loader does."""
    try:
        return agent.open()
    except AgentTranscriptUnreadable as error:
        usable: AgentVersion = error.usable
        return usable


@pytest.mark.parametrize(("place", "kind", "is_warm"), FAULTS)
def test_full_loses_its_cache_and_append_is_refused(store: Path, place: str, kind: str, is_warm: bool) -> None:
    path = PLACES[place](look_at(store).agent("agent").path)
    opened = open_store(store)
    if is_warm:
        Agent(opened).restore(NEXT)
    else:
        opened.close()
    with KINDS[kind](path):
        opened = opened if is_warm else open_store(store)
        agent = Agent(opened)
        if place in OF_THE_TRANSCRIPT:
            with pytest.raises(AgentTranscriptUnreadable, match="agent"):
                agent.open()
        reason = "transcript_unreadable" if place in OF_THE_TRANSCRIPT else f"{place.rstrip('s')}_unreadable"
        assert agent.restore(NEXT, opened_for_full(agent)).miss_reason == reason
        assert opened.misses[reason] == 1
        if place not in OF_ALL:
            assert Agent(opened, "neighbour").cached(NEXT) == len(LONG)
    opened.close()


SAVES = [
    *itertools.product(["half", "agent"], ["no permission", "I/O error", "a loop", "a file"]),
    ("agent", "no names"),
]


@pytest.mark.parametrize(("place", "kind"), SAVES)
def test_a_turn_that_cannot_be_saved_changes_nothing_and_is_marked(store: Path, place: str, kind: str) -> None:
    """Also where the folder can be written and only not listed: its records would be replaced, from the first on."""
    folder = look_at(store).agent("agent").path
    before = {path: path.read_bytes() for path in files_below(folder)}
    opened = open_store(store)
    agent = Agent(opened)
    faults = {**KINDS, "no names": unlisted}
    with faults[kind](PLACES[place](folder)):
        version = opened_for_full(agent)
        with pytest.raises(OSError):
            agent.say(NEXT, agent=version)
        opened.mark_unsaved("agent")
    with pytest.raises(AgentTranscriptUnreadable, match="not saved"):
        agent.open()
    after = {path.with_name(path.name.removesuffix(".unsaved")): path.read_bytes() for path in files_below(folder)}
    assert after == before
    opened.close()


@contextmanager
def unlisted(folder: Path) -> Iterator[None]:
    listdir = os.listdir

    def failing(path: str | Path) -> list[str]:
        if Path(path) == folder:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return listdir(path)

    with patch.object(os, "listdir", failing):
        yield
