"""`memory backup` and `memory restore`: a copy beside a worker at work, and the way back."""

import os
import shutil
import sqlite3
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from operator import methodcaller
from pathlib import Path

import pytest
from tests.support.small_disk import SmallDisk
from tests.worker.memory.agents import (
    MODEL,
    SNAPSHOT_SPECS,
    Agent,
    AgentCacheStore,
    files_below,
    ids,
    make_model,
    open_store,
    problems_of,
)

from stoker_shared.errors import StoreUnusable
from stoker_worker.memory import cache_index
from stoker_worker.memory.admin import backup as backup_module
from stoker_worker.memory.admin.backup import Backup, back_up, restore
from stoker_worker.memory.agent_changes import forget_agent
from stoker_worker.memory.store_parts import opened
from stoker_worker.ports import LoadedModel


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AgentCacheStore]:
    with closing(open_store(tmp_path / "store")) as store:
        for n in range(5):
            Agent(store, f"agent-{n}").say(ids(300 + n, seed=n))
        yield store


def copied(store: AgentCacheStore, file: Path) -> Backup:
    with opened(store.parts.path) as parts:  # as the shell does, beside the worker
        return back_up(parts, file)


def allocated(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in files_below(folder))


def test_a_backup_is_one_private_file(store: AgentCacheStore, tmp_path: Path) -> None:
    done = copied(store, tmp_path / "backup")
    assert (done.agents, done.n_bytes) == (5, (tmp_path / "backup").stat().st_size)
    assert stat.S_IMODE((tmp_path / "backup").stat().st_mode) == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"store", "backup"}  # nothing beside it


@pytest.mark.parametrize("model", [MODEL, make_model(spec=SNAPSHOT_SPECS["hybrid"])], ids=["full", "hybrid"])
def test_a_store_is_sound_after_the_restore_of_an_id_that_was_used_again(tmp_path: Path, model: LoadedModel) -> None:
    with closing(open_store(tmp_path / "store")) as store:
        Agent(store, "used again", model).say(ids(300))
        Agent(store, "used again", model).say(ids(301))
        Agent(store, "other", model).say(ids(310))
        copied(store, tmp_path / "backup")
        with opened(store.parts.path) as parts:
            forget_agent(parts, "used again")
        for length in (270, 280):
            Agent(store, "used again", model).say(ids(length, seed=1))
    restore(tmp_path / "store", tmp_path / "backup")
    with closing(open_store(tmp_path / "store")) as store:
        assert problems_of(store) == []
        assert Agent(store, "used again", model).tokens() == ids(301)
        assert Agent(store, "used again", model).cached((*ids(301), 1)) in (0, 256, 300)
        assert Agent(store, "other", model).cached((*ids(310), 1)) == 310


def test_a_restored_store_has_every_agent_as_it_was(store: AgentCacheStore, tmp_path: Path) -> None:
    before = {f"agent-{n}": store.open_agent(f"agent-{n}") for n in range(5)}
    copied(store, tmp_path / "backup")
    Agent(store, "agent-0").say((*ids(300), 1, 2))
    Agent(store, "new").say((1, 2))
    cache = before["agent-4"].cache
    assert cache is not None
    store.parts.blocks.path_of(cache.model, cache.last_block).unlink()
    store.close()
    kept_by_then = (store.parts.path / "agents.db").read_bytes()
    done = restore(store.parts.path, tmp_path / "backup")
    assert (done.agents, done.blocks) == (5, 4)
    assert done.kept is not None
    assert Path(done.kept).read_bytes() == kept_by_then  # never deleted
    with closing(open_store(store.parts.path)) as again:
        for name, version in before.items():
            assert again.open_agent(name) == version
        assert again.open_agent("new").number == 0
        n_cached = [Agent(again, f"agent-{n}").cached((*ids(300 + n, seed=n), 1)) for n in range(5)]
        assert n_cached == [256, 301, 302, 303, 0]  # the tail of the turn that is undone has gone
        # What a turn that is undone has left behind is found by the upkeep.
        of_agents = [x for name, version in before.items() for x in again.parts.pieces.paths(name, version.number)]
        n_bytes = allocated(again.parts.path / "blocks") + sum(
            x.stat().st_blocks * 512 for x in of_agents if x.exists()
        )
        with again.parts.database.snapshot() as connection:
            assert cache_index.cache_bytes(connection) == n_bytes
        assert Agent(again, "agent-0").say((*ids(300), 3)) == 2


def test_the_copy_ends_and_is_one_state_while_a_worker_writes(
    store: AgentCacheStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that began anew with each turn would never end."""
    monkeypatch.setattr(backup_module, "_PAGES", 1)
    first, second = Agent(store, "agent-0"), Agent(store, "agent-1")
    has_begun, is_over = threading.Event(), threading.Event()

    def work() -> None:
        while not is_over.is_set():
            for agent in (first, second):
                agent.say((*agent.tokens(), 7))
            has_begun.set()

    with ThreadPoolExecutor(1) as threads:
        writer = threads.submit(work)
        assert has_begun.wait(30)
        try:
            for n in range(3):
                copied(store, tmp_path / f"backup-{n}")
        finally:
            is_over.set()
        writer.result()
    store.close()
    for n in range(3):
        restore(tmp_path / f"restored-{n}", tmp_path / f"backup-{n}")
        with closing(open_store(tmp_path / f"restored-{n}")) as again:
            versions = [again.open_agent(f"agent-{x}").number for x in (0, 1)]
            assert versions[0] - versions[1] in (0, 1)


def test_nothing_is_overwritten(store: AgentCacheStore, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    with pytest.raises(FileExistsError, match="there"):
        copied(store, tmp_path / "there")
    assert (tmp_path / "there").read_text() == "mine"


def test_a_damaged_database_is_not_copied(store: AgentCacheStore, tmp_path: Path) -> None:
    """A backup that nobody can use would be found out on the wrong day."""
    store.close()
    damage(store.parts.path / "agents.db")
    with pytest.raises(StoreUnusable, match=r"memory salvage"):
        copied(store, tmp_path / "backup")
    assert {path.name for path in tmp_path.iterdir()} == {"store"}


def test_a_damaged_row_is_copied_and_named(store: AgentCacheStore, tmp_path: Path) -> None:
    changes = ("turns SET new_text = 'x' WHERE agent = 2", "agents SET head = x'00' WHERE number = 4")
    for change in (*changes, "deliveries SET result = '{}' WHERE agent = 5"):
        store.parts.database.commit(methodcaller("execute", f"UPDATE {change}"))
    assert copied(store, tmp_path / "backup").problems == (
        "agent 'agent-1': version 1 is unusable: its checksum does not match",
        "agent 'agent-3': the checksum of its row does not match",
        "agent number 5: the answer to this delivery is damaged",
    )
    restore(tmp_path / "new", tmp_path / "backup")
    with closing(open_store(tmp_path / "new")) as again:
        assert again.open_agent("agent-0").transcript == store.open_agent("agent-0").transcript


def damage(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'agents_by_key'").fetchone()
    with open(path, "r+b") as file:
        file.seek((page - 1) * 4096 + 9)
        file.write(b"\xff")


BAD = {
    "another database": "CREATE TABLE more (name)",
    "other tables": "DROP TABLE models",
    "another format": "PRAGMA user_version=77",
    "no count": "UPDATE store SET commits = 'many'",
}


@pytest.mark.parametrize("how", ["damaged", "cut short", "empty", "text", *BAD])
def test_a_bad_backup_changes_nothing_and_makes_no_store(store: AgentCacheStore, tmp_path: Path, how: str) -> None:
    file = tmp_path / "backup"
    copied(store, file)
    store.close()
    if how == "damaged":
        damage(file)
    elif how == "cut short":
        os.truncate(file, file.stat().st_size - 4096)
    elif how in BAD:
        with closing(sqlite3.connect(file)) as connection, connection:
            connection.execute(BAD[how])
    else:
        file.write_text("" if how == "empty" else "no database")
    names = {path.name for path in store.parts.path.iterdir()}
    with pytest.raises(StoreUnusable, match=r"backup .* cannot be used, and nothing has changed"):
        restore(store.parts.path, file)
    assert {path.name for path in store.parts.path.iterdir()} == names
    assert not list((store.parts.path / "tmp").iterdir())
    with closing(open_store(store.parts.path)) as again:
        assert again.open_agent("agent-1").number == 1
    with pytest.raises(StoreUnusable):
        restore(tmp_path / "new" / "store", file)
    assert not (tmp_path / "new").exists()


def test_a_store_with_a_worker_is_not_restored(store: AgentCacheStore, tmp_path: Path) -> None:
    copied(store, tmp_path / "backup")
    with pytest.raises(StoreUnusable, match=r"in use by pid"):
        restore(store.parts.path, tmp_path / "backup")


def test_a_restore_can_be_undone(store: AgentCacheStore, tmp_path: Path) -> None:
    """The kept database may have its newest turns in its log alone, as a worker that was killed leaves them."""
    copied(store, tmp_path / "backup")
    Agent(store, "agent-0").say((*ids(300), 1, 2))
    shutil.copytree(store.parts.path, tmp_path / "killed")
    kept = restore(tmp_path / "killed", tmp_path / "backup").kept
    assert kept is not None
    restore(tmp_path / "killed", Path(kept))
    with closing(open_store(tmp_path / "killed")) as again:
        assert again.open_agent("agent-0").number == 2


def test_a_new_database_with_transactions_in_its_log_alone_replaces_nothing(
    store: AgentCacheStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that is nearly full. Here, a reader keeps the log from being moved into the database."""
    copied(store, tmp_path / "backup")
    store.close()
    temp = store.parts.path / "tmp"
    with ExitStack() as readers:

        def recount(*_: object, **__: object) -> int:
            [draft] = temp.glob("*-database/agents.db")
            reader = readers.enter_context(closing(sqlite3.connect(draft, isolation_level=None)))
            reader.execute("BEGIN")
            reader.execute("SELECT commits FROM store").fetchall()
            return 0

        monkeypatch.setattr(backup_module, "recount", recount)
        with pytest.raises(OSError, match=r"is the disk full\?"):
            restore(store.parts.path, tmp_path / "backup")
    assert not list(temp.iterdir())
    assert not list(store.parts.path.glob("agents.db.*"))
    with closing(open_store(store.parts.path)) as again:
        assert again.open_agent("agent-1").number == 1


def test_a_full_disk_is_told_by_the_file_that_could_not_be_written(
    store: AgentCacheStore, tmp_path: Path, small_disk: SmallDisk
) -> None:
    copied(store, tmp_path / "backup")
    other = small_disk.path / "store"
    open_store(other).close()
    small_disk.fill()
    with pytest.raises(OSError, match=f"disk is full: '{small_disk.path}/backup'"):
        copied(store, small_disk.path / "backup")
    with pytest.raises(OSError, match=f"disk is full: '{other}/tmp/.*/agents.db'"):
        restore(other, tmp_path / "backup")
    small_disk.free()
    assert not (small_disk.path / "backup").exists()
    assert restore(other, tmp_path / "backup").agents == 5


def test_an_older_database_in_the_place_of_a_restored_one_is_still_refused(
    store: AgentCacheStore, tmp_path: Path
) -> None:
    copied(store, tmp_path / "backup")
    Agent(store, "agent-0").say((*ids(300), 1, 2))
    store.close()
    restore(store.parts.path, tmp_path / "backup")
    with closing(open_store(store.parts.path)) as again:
        Agent(again, "agent-1").say((1, 2, 3))
    shutil.copy(tmp_path / "backup", store.parts.path / "agents.db")
    with pytest.raises(StoreUnusable, match=r"newest [0-9]+ transactions are missing"):
        open_store(store.parts.path)
