"""The store's folder: one worker at a time, one known format, readable by the owner only."""

import os
import shutil
import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from tests.support.small_disk import SmallDisk
from tests.worker.memory.agents import Agent, ids, open_store

from stoker_shared.errors import StoreUnusable
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.memory.store_parts import opened


def test_a_second_worker_is_refused_and_told_the_holder(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(StoreUnusable, match=f"in use by pid {os.getpid()} on "):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path).close()


def test_a_second_worker_may_stand_by_until_the_first_one_has_ended(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    Agent(first).say(ids(10))
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(AgentCacheStore, tmp_path, wait=True)
        with pytest.raises(TimeoutError):
            second.result(timeout=0.3)
        Agent(first).say(ids(20))
        first.close()
        with closing(second.result(timeout=30)) as store:
            assert Agent(store).tokens() == ids(20)


def test_a_store_that_fails_while_it_is_opened_is_one_clear_error_and_is_closed_again(tmp_path: Path) -> None:
    with_an_agent(tmp_path)
    (tmp_path / "in-flight").unlink()
    (tmp_path / "in-flight").mkdir()
    with pytest.raises(StoreUnusable, match=r"the store folder .* cannot be used: .*in-flight"):
        open_store(tmp_path)
    assert not (tmp_path / "agents.db-wal").exists()  # the last process that closes a database removes its log
    (tmp_path / "in-flight").rmdir()
    with closing(sqlite3.connect(tmp_path / "agents.db")) as connection:
        connection.execute("UPDATE store SET cache_bytes = 'x'")
        connection.commit()
    with pytest.raises(StoreUnusable, match=r"the store folder .* cannot be used: "):
        open_store(tmp_path)
    assert not (tmp_path / "agents.db-wal").exists()


def with_an_agent(folder: Path) -> Path:
    with closing(open_store(folder)) as store:
        Agent(store).say(ids(300))
    return folder


@pytest.mark.parametrize("number", [0, 8, 10, 2**31 - 1])
def test_another_format_is_refused_and_left_alone(tmp_path: Path, number: int) -> None:
    with_an_agent(tmp_path)

    def set_format(to: int) -> None:
        with closing(sqlite3.connect(tmp_path / "agents.db")) as connection:
            connection.execute(f"PRAGMA user_version={to}")

    set_format(number)
    before = (tmp_path / "agents.db").read_bytes()
    with pytest.raises(StoreUnusable, match=f"has format {number}; this version of stoker reads format 9"):
        open_store(tmp_path)
    assert (tmp_path / "agents.db").read_bytes() == before
    set_format(9)
    with closing(open_store(tmp_path)) as store:
        assert Agent(store).tokens() == ids(300)


@pytest.mark.parametrize("lost", [["agents.db"], ["agents.db", "agents.commits"]])
def test_a_store_that_lost_its_database_is_refused_and_not_begun_anew(tmp_path: Path, lost: list[str]) -> None:
    with_an_agent(tmp_path)
    for name in lost:
        (tmp_path / name).unlink()
    with pytest.raises(StoreUnusable, match=r"memory restore BACKUP.* memory salvage"):
        open_store(tmp_path)
    assert not (tmp_path / "agents.db").exists()


@pytest.mark.parametrize("content", [b"", b"no database", bytes(4096), b"SQLite format 3\x00" + bytes(4080)])
def test_what_is_no_database_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    with_an_agent(tmp_path)
    (tmp_path / "agents.db").write_bytes(content)
    with pytest.raises(StoreUnusable, match=r"memory restore BACKUP.* memory salvage"):
        open_store(tmp_path)
    assert (tmp_path / "agents.db").read_bytes() == content


def test_there_is_no_store_for_a_command_where_no_worker_made_one(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match="there is no store at"), opened(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def crashed(folder: Path, into: Path) -> Path:
    """A store whose worker died with everything in the log."""
    with closing(open_store(folder)) as store:
        for length in (10, 20, 30):
            Agent(store).say(ids(length))
        shutil.copytree(folder, into, ignore=shutil.ignore_patterns("*-shm"))
    return into


def test_a_log_that_ends_early_is_noticed(tmp_path: Path) -> None:
    folder = crashed(tmp_path / "store", tmp_path / "copy")
    log = folder / "agents.db-wal"
    size = log.stat().st_size
    for kept in (size - 1, size // 2, 32, 0):
        os.truncate(log, kept)
        with pytest.raises(StoreUnusable, match=r"newest [0-9]+ transactions are missing.*memory restore"):
            open_store(folder)
        shutil.rmtree(folder)
        crashed(tmp_path / "store", folder)
    log.unlink()
    with pytest.raises(StoreUnusable, match=r"newest [0-9]+ transactions are missing"):
        open_store(folder)


@pytest.mark.parametrize("content", [None, b"", b"\xff", b"00000000000000099999 wrong\n"])
def test_a_store_without_a_sound_witness_opens_and_gets_one(tmp_path: Path, content: bytes | None) -> None:
    folder = crashed(tmp_path / "store", tmp_path / "copy")
    witness = folder / "agents.commits"
    before = witness.read_bytes()
    if content is None:
        witness.unlink()
    else:
        witness.write_bytes(content)
    with closing(open_store(folder)) as store:
        assert Agent(store).tokens() == ids(30)
        Agent(store).say(ids(40))
    assert witness.read_bytes() > before


def test_an_unusable_folder_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreUnusable, match=r"the store folder .* cannot be used: "):
            open_store(folder)


def test_a_read_only_disk_is_one_clear_error_for_workers_and_commands(small_disk: SmallDisk) -> None:
    folder = with_an_agent(small_disk.path / "store")
    with small_disk.read_only():
        with pytest.raises(StoreUnusable, match=r"cannot be used: .*([Rr]ead-only|unable to open)"):
            open_store(folder)
        with pytest.raises(StoreUnusable, match=r"cannot be used: .*([Rr]ead-?only|unable to open)"), opened(folder):
            pass
    with closing(open_store(folder)) as store:
        assert Agent(store).tokens() == ids(300)


def test_missing_parent_folders_are_made(tmp_path: Path) -> None:
    open_store(tmp_path / "a" / "b").close()


def test_only_the_owner_may_read_the_store_while_it_is_open_and_after(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = AgentCacheStore(tmp_path / "store")
        Agent(store).say(ids(300))
        while_open = modes(tmp_path / "store")
        store.close()
    finally:
        os.umask(before)
    assert {"agents.db", "agents.db-wal", "agents.db-shm", "agents.commits", "lock", "blocks"} <= while_open.keys()
    for found in (while_open, modes(tmp_path / "store")):
        assert set(found.values()) == {"drwx------", "-rw-------"}


def modes(folder: Path) -> dict[str, str]:
    return {path.name: stat.filemode(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
