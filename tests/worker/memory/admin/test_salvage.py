"""`memory salvage`: every agent that can be proved comes back, and no other is begun anew."""

import errno
import os
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.worker.memory.agents import Agent, AgentCacheStore, files_below, ids, open_store
from tests.worker.memory.flips import FRAME, PAGE, Truth, open_unsynced

from stoker_shared.errors import AgentTranscriptUnreadable, StoreUnusable
from stoker_worker.memory import cache_index
from stoker_worker.memory.admin.salvage import salvage
from stoker_worker.memory.admin.verify import verify_store
from stoker_worker.memory.agent_changes import forget_agent, roll_back
from stoker_worker.memory.store_parts import opened

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """A store of 40 agents whose worker was killed: the newest turns are in the log alone."""
    return Truth.make(tmp_path_factory.mktemp("salvage") / "truth", 40)


@pytest.fixture
def folder(truth: Truth, tmp_path: Path) -> Path:
    return Path(shutil.copytree(truth.folder, tmp_path / "store"))


def refused(folder: Path, truth: Truth) -> set[str]:
    """The agents for which `append` is refused. All others, and their answers, are as they were."""
    found = set()
    with closing(open_unsynced(folder)) as store:
        for name, version in truth.versions.items():
            try:
                assert store.open_agent(name) == version
                delivery, result = truth.answers[name]
                assert store.answer(name, delivery) == result
            except AgentTranscriptUnreadable:
                found.add(name)
    return found


def roots(folder: Path) -> dict[str, int]:
    with closing(sqlite3.connect(folder / "agents.db")) as connection:
        return dict(connection.execute("SELECT name, rootpage FROM sqlite_schema").fetchall())


def overwrite(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def in_one_file(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "agents.db")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def test_a_whole_store_is_salvaged_whole(folder: Path, truth: Truth) -> None:
    with closing(open_unsynced(Path(shutil.copytree(folder, folder.with_name("other"))))) as store:
        before = bytes_of_caches(store)
    kept_by_then = [(folder / name).read_bytes() for name in ("agents.db", "agents.db-wal")]
    done = salvage(folder)
    assert (done.whole, done.refused, done.lost) == (40, {}, {})
    assert done.kept is not None
    assert [Path(done.kept + end).read_bytes() for end in ("", "-wal")] == kept_by_then
    assert refused(folder, truth) == set()
    with closing(open_unsynced(folder)) as store:
        for name in list(truth.versions)[:8]:
            tokens = Agent(store, name).tokens()
            assert Agent(store, name).cached((*tokens, 1)) == len(tokens)
        assert bytes_of_caches(store) == before


def bytes_of_caches(store: AgentCacheStore) -> int:
    with store.parts.database.snapshot() as connection:
        return cache_index.cache_bytes(connection)


TABLES = ["agents", "turns", "deliveries", "blocks", "store", "sqlite_autoindex_agents_1", "agents_by_key"]


@pytest.mark.parametrize("table", [*TABLES, "sqlite_autoindex_turns_1"])
def test_a_lost_root_costs_at_most_what_was_in_that_page(folder: Path, truth: Truth, table: str) -> None:
    in_one_file(folder)
    page = roots(folder)[table]
    on_page = (folder / "agents.db").read_bytes()[(page - 1) * PAGE : page * PAGE].count(b"agent-0")
    overwrite(folder / "agents.db", (page - 1) * PAGE, bytes(PAGE))
    done = salvage(folder)
    left = refused(folder, truth)
    assert len(left) <= (on_page if table in ("agents", "turns", "deliveries") else 0)
    assert done.whole + len(done.refused) + len(done.lost) == 40


def test_a_page_that_the_disk_refuses_to_read_counts_as_lost(
    folder: Path, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_one_file(folder)
    bad_at, pread = (roots(folder)["blocks"] - 1) * PAGE, os.pread
    refusals: list[int] = []

    def failing(file: int, n_bytes: int, at: int) -> bytes:
        if (n_bytes, at) == (PAGE, bad_at):
            refusals.append(at)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(file, n_bytes, at)

    monkeypatch.setattr(os, "pread", failing)
    assert salvage(folder).whole == 40
    assert refusals
    assert refused(folder, truth) == set()


def test_a_lost_header_costs_nothing(folder: Path, truth: Truth) -> None:
    in_one_file(folder)
    overwrite(folder / "agents.db", 0, random.Random(1).randbytes(PAGE))
    with pytest.raises(StoreUnusable, match=r"memory salvage"):
        open_unsynced(folder)
    assert salvage(folder).whole == 40
    assert refused(folder, truth) == set()


def test_an_agent_whose_row_is_lost_refuses_until_a_rollback_or_a_full_turn(folder: Path, truth: Truth) -> None:
    in_one_file(folder)
    names = sorted(truth.versions)
    data = (folder / "agents.db").read_bytes()
    # The leaf of `agents` that has the most agents.
    pages = [at for at in range(0, len(data), PAGE) if data[at] == 13 and data[at : at + PAGE].count(b"agent-0") > 5]
    page = max(pages, key=lambda at: data[at : at + PAGE].count(b"agent-0"))
    overwrite(folder / "agents.db", page, bytes(PAGE))
    done = salvage(folder)
    left = refused(folder, truth)
    assert left
    assert left <= done.refused.keys() | done.lost.keys()
    with opened(folder) as parts:
        with_older = [name for name in names if name in done.refused]
        assert with_older
        roll_back(parts, with_older[0])
    with closing(open_unsynced(folder)) as store:
        was, now = truth.versions[with_older[0]], store.open_agent(with_older[0])
        assert now.transcript == was.transcript
        assert now.number > was.number
        full = Agent(store, with_older[1])
        with pytest.raises(AgentTranscriptUnreadable) as caught:
            full.open()
        full.say((1, 2, 3), agent=caught.value.usable)
        assert full.tokens() == (1, 2, 3)


@pytest.mark.parametrize("part", ["salt", "checksum", "data", "page number"])
@pytest.mark.parametrize("frame", ["first", "third", "header of the log"])
def test_a_damaged_log_loses_no_turn_behind_the_damage(folder: Path, truth: Truth, part: str, frame: str) -> None:
    at = {"first": 32, "third": 32 + 2 * FRAME, "header of the log": 0}[frame]
    offset = {"salt": 8, "checksum": 16, "data": 500, "page number": 3}[part]
    if frame == "header of the log":
        offset = {"salt": 16, "checksum": 24, "data": 8, "page number": 4}[part]
    log = folder / "agents.db-wal"
    overwrite(log, at + offset, bytes([log.read_bytes()[at + offset] ^ 0x10]))
    size = log.stat().st_size
    for _ in range(2):  # a refusal leaves the log as it is
        with pytest.raises(StoreUnusable, match=r"newest [0-9]+ transactions are missing.*memory salvage"):
            open_unsynced(folder)
        assert log.stat().st_size == size
    done = salvage(folder)
    assert done.whole >= 40 - (10 if part == "page number" else 1)  # of two pages, or of one row
    assert refused(folder, truth) <= done.refused.keys() | done.lost.keys()


@pytest.mark.parametrize("n_pages", [1, 1 << 31])
def test_a_damaged_size_in_the_log_hides_no_page_and_adds_none(folder: Path, truth: Truth, n_pages: int) -> None:
    log = folder / "agents.db-wal"
    data = log.read_bytes()
    frames = [at for at in range(32, len(data) - FRAME + 1, FRAME) if data[at + 8 : at + 16] == data[16:24]]
    overwrite(log, frames[-1] + 4, n_pages.to_bytes(4, "big"))
    assert salvage(folder).whole == 40
    assert refused(folder, truth) == set()


@pytest.mark.parametrize("how", ["no log", "an older database"])
def test_where_the_newest_turns_are_missing_no_agent_silently_goes_back(folder: Path, truth: Truth, how: str) -> None:
    if how == "no log":
        (folder / "agents.db-wal").unlink()
    else:
        shutil.copy(folder / "agents.db", folder / "older")
        in_one_file(folder)
        (folder / "older").rename(folder / "agents.db")
    with pytest.raises(StoreUnusable, match=r"newest [0-9]+ transactions are missing"):
        open_unsynced(folder)
    done = salvage(folder)
    assert done.whole == 0
    assert len(done.refused) + len(done.lost) == 40
    assert all("transactions of the database are missing" in reason for reason in done.refused.values())
    with closing(open_unsynced(folder)) as store:
        for name in truth.versions:
            with pytest.raises(AgentTranscriptUnreadable) as caught:
                store.open_agent(name)
            assert caught.value.usable.number > 0
            # Not even where the job that made the newest version it has comes again.
            store.answer(name, truth.answers[name][0])
            with pytest.raises(AgentTranscriptUnreadable):
                store.open_agent(name)


def test_agents_that_were_removed_do_not_come_back(tmp_path: Path) -> None:
    """Pages that are free now had their rows."""
    with closing(open_store(tmp_path / "store")) as store:
        for n in range(40):
            Agent(store, f"agent-{n}").say(ids(300, seed=n))
        for n in range(39):
            forget_agent(store.parts, f"agent-{n}")
    file = tmp_path / "store" / "agents.db"
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA freelist_count").fetchone()[0] > 3
    assert b"agent-3" not in file.read_bytes().replace(b"agent-39", b"")
    overwrite(file, 32, bytes(4))  # nor with the list of the free pages
    done = salvage(tmp_path / "store")
    assert (done.whole, done.refused, done.lost) == (1, {}, {})
    with closing(open_store(tmp_path / "store")) as store:
        assert store.open_agent("agent-3").number == 0
        assert store.open_agent("agent-39").number == 1


def test_nothing_is_made_where_no_store_is(tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(StoreUnusable, match="nothing to salvage"):
            salvage(folder)
    assert list(tmp_path.iterdir()) == []


def test_versions_that_cannot_be_read_any_more_do_not_stay(tmp_path: Path) -> None:
    """`verify` would name them until they are pruned."""
    with closing(open_store(tmp_path)) as store:
        for name in ("a", "b"):
            for length in range(10, 30, 5):
                Agent(store, name).say(ids(length))
        sql = "UPDATE turns SET new_text = 'x' WHERE agent = 1 AND version = 2"
        store.parts.database.commit(lambda connection: connection.execute(sql))
    assert salvage(tmp_path).refused == {"a": "version 4 is missing"}
    with opened(tmp_path) as parts:
        assert list(verify_store(parts)) == ["agent 'a': version 4 is missing"]
        roll_back(parts, "a", 1)
        assert list(verify_store(parts)) == []
    with closing(open_store(tmp_path)) as store:
        assert Agent(store, "a").tokens() == (*ids(10),)
        assert Agent(store, "b").tokens() == (*ids(25),)


def test_agents_whose_row_and_id_are_lost_are_not_begun_anew(folder: Path, truth: Truth) -> None:
    """Only the index by the hash of the id still knows them."""
    in_one_file(folder)
    file = folder / "agents.db"
    data = bytearray(file.read_bytes())
    index = roots(folder)["agents_by_key"]
    for at in range(PAGE, len(data), PAGE):
        if data[at : at + PAGE].count(b"agent-0") > 5:
            data[at : at + PAGE] = bytes(PAGE)
    assert any(data[(index - 1) * PAGE : index * PAGE])
    file.write_bytes(data)
    done = salvage(folder)
    assert len([name for name in done.lost if name.startswith("lost id ")]) > 5
    with closing(open_unsynced(folder)) as store:
        for name, version in truth.versions.items():
            try:
                assert store.open_agent(name) == version
            except AgentTranscriptUnreadable:
                continue


@pytest.mark.parametrize("how", ["none", "empty", "zeros", "no agents"])
def test_where_there_is_nothing_to_take_over_nothing_changes(tmp_path: Path, how: str) -> None:
    with closing(open_store(tmp_path)) as store:
        if how != "no agents":
            Agent(store).say(ids(300))
    if how == "none":
        (tmp_path / "agents.db").unlink()
    elif how != "no agents":
        (tmp_path / "agents.db").write_bytes(b"" if how == "empty" else bytes(5 * PAGE))
    before = {path: path.read_bytes() for path in files_below(tmp_path) if path.name != "lock"}
    with pytest.raises(StoreUnusable, match="restore a backup"):
        salvage(tmp_path)
    assert {path: path.read_bytes() for path in files_below(tmp_path) if path.name != "lock"} == before


def test_an_agent_whose_last_turn_was_not_saved_still_refuses(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        Agent(store).say(ids(30))
        store.mark_unsaved("agent")
    assert salvage(tmp_path).whole == 1
    with closing(open_store(tmp_path)) as store, pytest.raises(AgentTranscriptUnreadable, match="not saved"):
        store.open_agent("agent")


def test_a_store_with_a_worker_is_not_salvaged(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)), pytest.raises(StoreUnusable, match=f"in use by pid {os.getpid()}"):
        salvage(tmp_path)
