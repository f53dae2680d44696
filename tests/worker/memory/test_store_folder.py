"""The store's folder: one process at a time, one known format, nobody else's eyes."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.worker.memory.agents import Agent, ids, open_store

from stoker_shared.errors import StoreUnusable
from stoker_worker.memory.store import AgentStore


def test_a_second_opener_is_refused_and_told_who_was_first(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(StoreUnusable, match=f"in use by pid {os.getpid()} on "):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path).close()


def test_a_dead_process_leaves_no_lock(tmp_path: Path) -> None:
    script = (
        "import os, sys, pathlib, stoker_worker.memory.store as s; s.AgentStore(pathlib.Path(sys.argv[1])); os._exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", script, tmp_path], check=False).returncode == 7
    open_store(tmp_path)


@pytest.mark.parametrize("content", ['{"format": 2}', '{"format": "1"}', "{}", "[]", "", "\x00\xff", None])
def test_an_unknown_format_is_refused_and_left_alone(tmp_path: Path, content: str | None) -> None:
    store = open_store(tmp_path)
    Agent(store).say(ids(10))
    store.close()
    if content is None:
        (tmp_path / "store.json").unlink()
    else:
        (tmp_path / "store.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(StoreUnusable, match=r"store.json says format .* reads format 1 only"):
        open_store(tmp_path)
    (tmp_path / "store.json").write_text('{"format": 1}')
    assert Agent(open_store(tmp_path)).tokens() == ids(10)


def test_a_folder_that_cannot_be_used_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreUnusable, match=r"the store folder .* cannot be used: "):
            open_store(folder)


def test_missing_folders_above_are_made(tmp_path: Path) -> None:
    open_store(tmp_path / "a" / "b").close()


def test_nobody_else_may_read_anything(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = AgentStore(tmp_path / "store")
        Agent(store).say(ids(300))
        store.close()
    finally:
        os.umask(before)
    paths = [tmp_path / "store", *(tmp_path / "store").rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()} == {0o600}


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    (tmp_path / "tmp" / "0.tmp").write_bytes(b"half")
    Agent(open_store(tmp_path)).say(ids(10))
    assert list((tmp_path / "tmp").iterdir()) == []
