"""A full or failing disk costs cache, at worst a turn, never a conversation, and leaves no files behind."""

import errno
import os
import shutil
from contextlib import closing, suppress
from dataclasses import replace
from itertools import count
from math import inf
from pathlib import Path

import pytest
from tests.support.small_disk import SmallDisk
from tests.worker.memory.agents import (
    HYBRID,
    MODEL,
    Agent,
    FastDisk,
    call_of_session,
    disk_bytes,
    files_below,
    ids,
    open_store,
    problems_of,
    reopen,
    run_job,
    tidy,
)
from tests.worker.memory.faulty_files import FullFiles

from stoker_shared.errors import AgentTranscriptUnreadable, StoreUnusable
from stoker_worker.memory.admin.archive import export_agent
from stoker_worker.memory.agent_changes import fork_agent, roll_back
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.memory.store_parts import opened
from stoker_worker.memory.upkeep import cache_folders, orphans_in
from stoker_worker.ports import Delivery, LoadedModel, Turn

LONG = ids(900)


def on_full_disk(folder: Path, files: FullFiles) -> AgentCacheStore:
    return AgentCacheStore(folder, files=files, connector=files.connector, max_bytes=1 << 30)


def after_a_crash(folder: Path, into: Path) -> AgentCacheStore:
    """What a process that dies now leaves to the next one."""
    return open_store(shutil.copytree(folder, into, ignore=shutil.ignore_patterns("*-shm", "lock", "in-flight*")))


def orphans(store: AgentCacheStore) -> list[Path]:
    """Cache files without a row."""
    return [path for folder in cache_folders(store.parts) for path in orphans_in(store.parts, folder, before=inf)]


def pieces_in(folder: Path) -> list[Path]:
    return [path.relative_to(folder) for path in files_below(folder / "pieces")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "model", "number", "n_failures"),
    [
        (0, MODEL, errno.ENOSPC, 1),
        (0, MODEL, errno.ENOSPC, 1000),
        (400, HYBRID, errno.ENOSPC, 1000),
        (400, HYBRID, errno.EIO, 1),
    ],
)
def test_a_turn_that_finds_the_disk_full_happens_or_leaves_the_agent_where_it_was(
    quick_path: Path, stored: int, model: LoadedModel, number: int, n_failures: int
) -> None:
    base = open_store(quick_path / "base")
    if stored:
        Agent(base, model=model).say(LONG[:stored])
    Agent(base, "other").say(LONG[:300])
    base.close()
    for fail_at in range(1, 200):
        has_failed = False
        files, folder = FullFiles(), shutil.copytree(quick_path / "base", quick_path / str(fail_at))
        with closing(on_full_disk(folder, files)) as store:
            agent, other = Agent(store, model=model, jobs=count(100)), Agent(store, "other")
            before, pieces = agent.open(), pieces_in(folder)
            turn, beside = agent.turn(LONG[:700]), other.turn(LONG[:500])
            store.pin(frozenset({"agent", "other"}), frozenset())
            files.arm(fail_at, n_failures, number=number)
            try:
                result = store.save(turn)
            except OSError:
                has_failed = True
                expect_at(store, turn, before.number)
                if n_failures == 1:  # else SQLite may fail at this too
                    assert pieces_in(folder) == pieces
                    assert orphans(store) == []
                    store.save(beside)
                files.arm(10**9, 0)  # there is room again
                with closing(after_a_crash(folder, quick_path / f"{fail_at} after a crash")) as later:
                    # Whether a turn was written is unknown only on a disk that fails for good after all was written.
                    is_unknown = n_failures > 1 and later.open_agent("agent").number == turn.version
                    expect_at(later, turn, turn.version if is_unknown else before.number)
                if n_failures > 1:
                    store.save(beside)
                result = store.save(turn)
            expect_at(store, replace(turn, result=result), before.number + 1)
            if result != turn.result:
                assert os.strerror(number) in result["cache"]["save_error"]
                agent.say(LONG[:700])
            assert agent.cached((*LONG[:700], 1)) == 700
            assert files_below(folder / "tmp") == []
            assert problems_of(store) == []
            assert orphans(store) == []
        if not has_failed and not files.has_failed:
            break
    assert fail_at > 15


def expect_at(store: AgentCacheStore, turn: Turn, number: int) -> None:
    """The agent is at this version, with the turn's answer if it is the turn's."""
    agent = Agent(store, turn.agent_id, turn.model)
    assert agent.open().number == number
    if number == turn.version:
        assert agent.tokens() == turn.transcript.token_ids
    else:
        assert agent.tokens() == (turn.base.transcript.token_ids if turn.base.transcript else ())
    assert store.answer(turn.agent_id, turn.delivery) == (turn.result if number == turn.version else None)


@pytest.mark.slow
def test_a_store_that_cannot_be_made_for_lack_of_space_is_made_when_there_is_some(quick_path: Path) -> None:
    for fail_at in range(1, 100):
        files, folder = FullFiles(), quick_path / str(fail_at)
        files.arm(fail_at, 1000)
        with suppress(StoreUnusable):
            on_full_disk(folder, files).close()
        if not files.has_failed:
            break
        with closing(open_store(folder)) as store:
            Agent(store).say(LONG[:300])
            assert problems_of(store) == []
    assert fail_at > 10


def lose_a_turn(folder: Path, sqlite: FullFiles, *, stored: int) -> AgentCacheStore:
    """The database takes neither the agent's second turn nor the mark that it is missing."""
    store = AgentCacheStore(folder, connector=sqlite.connector, max_bytes=1 << 30)
    if stored:
        Agent(store).say(LONG[:stored])
    turn = Agent(store).turn(LONG[:500])
    sqlite.arm(1, 10**9, number=errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        store.save(turn)
    store.mark_unsaved("agent")
    return store


@pytest.mark.parametrize("stored", [0, 400])
def test_a_lost_turn_that_the_database_refuses_too_is_remembered_across_a_restart(tmp_path: Path, stored: int) -> None:
    sqlite, folder = FullFiles(), tmp_path / "later"
    with closing(lose_a_turn(tmp_path / "store", sqlite, stored=stored)):
        after_a_crash(tmp_path / "store", folder).close()
        sqlite.arm(1, 0)
    for _ in range(2):  # also once the database has it
        with closing(open_store(folder)) as store:
            with pytest.raises(AgentTranscriptUnreadable, match="not saved") as caught:
                store.open_agent("agent")
            assert caught.value.usable.number == bool(stored)
    with closing(open_store(folder)) as store:
        Agent(store).say(LONG[:600], agent=caught.value.usable)
    with closing(open_store(folder)) as store:
        assert Agent(store).tokens() == LONG[:600]


def test_the_next_turn_mends_an_agent_whose_lost_turn_the_database_never_heard_of(tmp_path: Path) -> None:
    sqlite = FullFiles()
    with closing(lose_a_turn(tmp_path / "store", sqlite, stored=10)) as store:
        sqlite.arm(1, 0)
        agent = Agent(store)
        with pytest.raises(AgentTranscriptUnreadable) as caught:
            agent.open()
        agent.say(LONG[:500], agent=caught.value.usable)
        assert agent.tokens() == LONG[:500]
        with closing(after_a_crash(tmp_path / "store", tmp_path / "after a crash")) as later:
            assert Agent(later).tokens() == LONG[:500]


def test_a_forget_that_the_database_refuses_leaves_the_note_of_the_lost_turn(tmp_path: Path) -> None:
    sqlite = FullFiles()
    with closing(lose_a_turn(tmp_path / "store", sqlite, stored=400)) as store:
        with pytest.raises(OSError, match="Input/output"):
            run_job(store, "forget")
        sqlite.arm(1, 0)
        with pytest.raises(AgentTranscriptUnreadable, match="not saved"):
            store.open_agent("agent")
        assert run_job(store, "forget").existed
        assert store.open_agent("agent").number == 0


@pytest.mark.parametrize("running", [frozenset[str](), frozenset({"agent"})])
def test_a_command_beside_the_worker_knows_of_a_lost_turn_that_the_database_refused(
    tmp_path: Path, running: frozenset[str]
) -> None:
    """It cannot put the note into the database while a job of the agent runs."""
    sqlite = FullFiles()
    with closing(lose_a_turn(tmp_path / "store", sqlite, stored=400)) as store:
        store.pin(running, frozenset())
        with opened(tmp_path / "store") as parts:
            with pytest.raises(AgentTranscriptUnreadable, match="not saved"):
                fork_agent(parts, "agent", "fork")
            with pytest.raises(AgentTranscriptUnreadable, match="not saved"):
                export_agent(parts, "agent", tmp_path / "exported")
        sqlite.arm(1, 0)


def test_a_lost_turn_that_a_command_has_dealt_with_is_missed_no_more_and_the_next_one_is(tmp_path: Path) -> None:
    sqlite, folder = FullFiles(), tmp_path / "store"
    with closing(lose_a_turn(folder, sqlite, stored=400)) as store:
        sqlite.arm(1, 0)
        with opened(folder) as parts:
            roll_back(parts, "agent", 1)
        assert Agent(store).tokens() == LONG[:400]
        store.mark_unsaved("agent")
        with pytest.raises(AgentTranscriptUnreadable, match="not saved"):
            store.open_agent("agent")
        with closing(after_a_crash(folder, tmp_path / "later")) as later, pytest.raises(AgentTranscriptUnreadable):
            later.open_agent("agent")


def test_a_turn_that_nothing_can_remember_as_lost_is_an_error(tmp_path: Path) -> None:
    files = FullFiles()
    store = on_full_disk(tmp_path / "store", files)
    Agent(store).say(LONG[:400])
    files.arm(1, 10**9)
    with pytest.raises(OSError, match="No space"):
        store.mark_unsaved("agent")
    files.arm(1, 0)
    assert Agent(store).tokens() == LONG[:400]
    store = reopen(store, tmp_path / "store")
    assert Agent(store).tokens() == LONG[:400]
    store.close()


@pytest.mark.parametrize("small_disk", [600_000], indirect=True)
def test_a_mark_finds_space_on_a_full_disk_and_outlives_the_worker(small_disk: SmallDisk) -> None:
    store = AgentCacheStore(small_disk.path / "store", max_bytes=1 << 30)
    for name in "abc":
        Agent(store, name).say(LONG)
    small_disk.fill()
    for name in ("a", "new"):
        store.mark_unsaved(name)
    store = reopen(store, small_disk.path / "store")
    for name in ("a", "new"):
        with pytest.raises(AgentTranscriptUnreadable, match="not saved"):
            store.open_agent(name)
    assert Agent(store, "b").tokens() == LONG
    assert problems_of(store) == []
    store.close()


@pytest.mark.parametrize(
    ("small_disk", "max_bytes"),
    [(860_000, 1 << 30), (1_062_714, 1 << 30), (1_588_142, None), (1_850_856, 1 << 30)],
    indirect=["small_disk"],
)
@pytest.mark.parametrize("model", [MODEL, HYBRID], ids=["full", "hybrid"])
def test_on_a_small_disk_caches_go_before_a_turn_fails(
    small_disk: SmallDisk, model: LoadedModel, max_bytes: int | None
) -> None:
    folder = small_disk.path / "store"
    small_disk.ballast.write_bytes(bytes(200_000))
    store = AgentCacheStore(folder, max_bytes=max_bytes, memory_max_bytes=1 << 20)
    said: dict[str, tuple[int, ...]] = {}

    def say(agent: Agent, new: int) -> str | None:
        """Why its cache is not saved."""
        prompt = said.get(agent.name, ()) + ids(new, seed=len(said))
        result = store.save(agent.turn(prompt))
        said[agent.name] = prompt
        error: str | None = result.get("cache", {}).get("save_error")
        return error

    agents = [Agent(store, str(number), model) for number in range(40)]
    for agent in agents:
        assert (error := say(agent, 700)) is None or "space" in error or "full" in error
    small_disk.fill()

    def say_until_it_fails() -> None:
        for number in range(40, 100):  # one of them finds neither space nor a cache to evict
            agents.append(Agent(store, str(number), model))
            say(agents[-1], 10)
            small_disk.fill()

    with pytest.raises(OSError, match=r"No space left|is full"):
        say_until_it_fails()
    assert pieces_in(folder) == files_below(folder / "blocks") == []
    assert files_below(folder / "tmp") == []
    for agent in agents:
        assert agent.tokens() == said.get(agent.name, ())
    assert problems_of(store) == []
    small_disk.free()
    store = reopen(store, folder)
    for agent in agents[:2]:
        agent.store = store
        assert say(agent, 300) is None
        assert agent.cached((*said[agent.name], 1)) == len(said[agent.name])
    store.close()


@pytest.mark.parametrize("n_logs", [9, 100])  # of less than 10, a settling empties the log first
def test_caches_make_room_for_what_a_long_log_brings_into_the_database(small_disk: SmallDisk, n_logs: int) -> None:
    store = AgentCacheStore(small_disk.path / "store", max_bytes=1 << 30)
    for number in range(4):
        Agent(store, f"idle {number}").say(ids(5000, seed=number))
    store.parts.database.empty_log()
    turns = [Agent(store, str(number)).turn(ids(2000, seed=number)).without_cache("") for number in range(40)]
    for turn in turns[1:]:
        store.save(turn)
    store.budget.max_bytes = n_logs * store.parts.database.log_bytes()
    small_disk.fill()
    store.save(turns[0])
    assert Agent(store, "0").tokens() == ids(2000)
    store.close()


def test_a_log_that_is_only_being_read_costs_no_cache(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        Agent(store).say(ids(5000))
        with store.parts.database.snapshot() as reader:
            reader.execute("SELECT count(*) FROM agents").fetchone()
            for number in range(40):
                store.save(Agent(store, str(number)).turn(ids(2000, seed=number)).without_cache(""))
            before = len(files_below(tmp_path / "blocks"))
            store.budget.free(1000)
        assert len(files_below(tmp_path / "blocks")) >= before - 2


def test_a_snapshot_that_cannot_become_a_checkpoint_does_not_count(tmp_path: Path) -> None:
    class Full(FastDisk):
        def rename(self, source: Path, target: Path) -> None:
            if "-snapshot-" in source.name:
                refused.append(target)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().rename(source, target)

    refused: list[Path] = []
    with closing(AgentCacheStore(tmp_path, files=Full())) as store:
        for length in (600, 900):
            Agent(store, model=HYBRID).say(LONG[:length])
            call_of_session(store, LONG[:length], model=HYBRID, salt="of its own")
        assert len(refused) == 2
        tidy(store)
        assert store.budget.total_bytes == disk_bytes(tmp_path)


@pytest.mark.parametrize("small_disk", [600_000], indirect=True)
def test_a_cache_that_is_too_large_for_the_disk_takes_no_space_from_the_turns_after_it(small_disk: SmallDisk) -> None:
    store = AgentCacheStore(small_disk.path / "store", max_bytes=1 << 30)
    small, large = Agent(store, "small"), Agent(store, "large")
    small.say(LONG[:10])
    small_disk.fill()
    os.truncate(small_disk.ballast, small_disk.ballast.stat().st_size - 100_000)
    store.pin(frozenset({"small", "large"}), frozenset())
    result = store.save(large.turn(ids(2000)))  # its first blocks fit
    assert "No space left" in result["cache"]["save_error"]
    assert large.tokens() == ids(2000)
    small.say(LONG[:11])
    assert small.tokens() == LONG[:11]
    assert small.cached((*LONG[:11], 1)) == 11
    store.close()


@pytest.mark.parametrize("model", [MODEL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("where", ["tmp", "blocks", "blocks/*", "blocks/*/*", "pieces", "pieces/*"])
@pytest.mark.parametrize("what", ["a file", "a dead link"])
def test_something_in_the_place_of_a_cache_folder_costs_the_cache(
    tmp_path: Path, where: str, what: str, model: LoadedModel
) -> None:
    with closing(AgentCacheStore(tmp_path, files=FastDisk(), memory_max_bytes=1 << 20, max_bytes=1 << 30)) as store:
        agent = Agent(store, model=model)
        agent.say(LONG[:300])
        places = list(tmp_path.glob(where))
        for path in places:
            shutil.rmtree(path, ignore_errors=True)
            path.touch() if what == "a file" else path.symlink_to("/nowhere/at/all")
        for length in (600, 900):
            result = store.save(agent.turn(LONG[:length]))
            if where != "blocks/*/*":  # else the next block may belong to another folder
                assert "its cache is not saved" in result["cache"]["save_error"]
            assert store.answer("agent", Delivery(result["job_id"], "2024-01-01T00:00:00Z")) == result
            assert agent.tokens() == LONG[:length]
            assert agent.cached((*LONG[:length], 1)) == length  # in RAM
        tidy(store)
        store.budget.max_bytes = 1
        store.budget.make_room()
        assert agent.tokens() == LONG
        for path in places:
            path.unlink()
        store.budget.max_bytes = 1 << 30
        assert "cache" not in store.save(agent.turn((*LONG, 1)))
        store.ram_cache.drop("agent")
        assert agent.cached((*LONG, 1, 2)) == 901
        assert problems_of(store) == []


def test_a_temp_folder_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        agent = Agent(store)
        agent.say(LONG[:300])
        (tmp_path / "tmp").rmdir()
        assert "cache" not in store.save(agent.turn(LONG[:600]))
        assert agent.cached((*LONG[:600], 1)) == 600


def test_a_file_system_without_inodes_costs_the_cache(small_disk: SmallDisk) -> None:
    store = AgentCacheStore(small_disk.path / "store", max_bytes=1 << 30)
    agent, other = Agent(store), Agent(store, "other")
    agent.say(LONG[:600])
    store.pin(frozenset({"agent"}), frozenset())
    disk = os.statvfs(small_disk.path)
    small_disk.remount(f"nr_inodes={disk.f_files - disk.f_ffree}")
    assert "No space left" in store.save(other.turn(LONG[:500]))["cache"]["save_error"]
    store.mark_unsaved("new")
    small_disk.remount("nr_inodes=1000")
    assert agent.tokens() == LONG[:600]
    assert other.tokens() == LONG[:500]
    store.close()


def test_notes_of_lost_turns_find_space_beyond_the_reserved_one_and_are_never_lost_silently(
    small_disk: SmallDisk,
) -> None:
    folder = small_disk.path / "store"
    sqlite = FullFiles()
    store = AgentCacheStore(folder, connector=sqlite.connector, max_bytes=1 << 30)
    Agent(store).say(LONG)
    sqlite.arm(1, 10**9, number=errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        Agent(store, "0").say(LONG[:10])
    small_disk.fill()
    noted: list[str] = []

    def note_until_it_fails() -> None:
        for number in range(1000):
            store.mark_unsaved(f"\U0001f600 {number} ")
            noted.append(f"\U0001f600 {number} ")

    with pytest.raises(OSError, match="No space left"):
        note_until_it_fails()
    assert len(noted) > 128
    small_disk.free()
    sqlite.arm(1, 0)
    store = reopen(store, folder)
    for name in noted:
        with pytest.raises(AgentTranscriptUnreadable, match="not saved"):
            store.open_agent(name)
    assert Agent(store).tokens() == LONG
    assert Agent(store, f"\U0001f600 {len(noted)} ").tokens() == ()
    store.close()
