"""A full or failing disk costs a turn, never a conversation, and leaves no files behind."""

import errno
import os
import shutil
from contextlib import closing, suppress
from itertools import count
from math import inf
from pathlib import Path

import pytest
from tests.small_disk import SmallDisk
from tests.worker.memory.agents import MODEL, SNAPSHOT_SPECS, Agent, files_below, ids, make_model, open_store, reopen
from tests.worker.memory.faulty_files import FullFiles

from stoker_shared.errors import AgentTranscriptUnreadable, StoreUnusable
from stoker_worker.memory.admin.verify import verify_store
from stoker_worker.memory.fork import fork_agent
from stoker_worker.memory.orphans import cache_folders, orphans_in
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.memory.store_parts import opened
from stoker_worker.ports import LoadedModel, Turn

LONG = ids(900)
HYBRID = make_model("hybrid", spec=SNAPSHOT_SPECS["hybrid"])


def on_full_disk(folder: Path, files: FullFiles) -> AgentCacheStore:
    return AgentCacheStore(folder, files=files, connector=files.connector, max_bytes=1 << 30)


def after_a_crash(folder: Path, into: Path) -> AgentCacheStore:
    """What a process that dies now leaves to the next one."""
    return open_store(shutil.copytree(folder, into, ignore=shutil.ignore_patterns("*-shm", "lock", "in-flight*")))


def problems(store: AgentCacheStore) -> list[str]:
    return list(verify_store(store.parts))


def orphans(store: AgentCacheStore) -> list[Path]:
    """Cache files without a row."""
    return [path for folder in cache_folders(store.parts) for path in orphans_in(store.parts, folder, before=inf)]


def pieces_in(folder: Path) -> list[Path]:
    return [path.relative_to(folder) for path in files_below(folder / "pieces")]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "n_failures"), [(errno.ENOSPC, 1), (errno.ENOSPC, 1000), (errno.EIO, 1)])
@pytest.mark.parametrize(("stored", "model"), [(0, MODEL), (400, HYBRID)])
def test_a_turn_that_finds_the_disk_full_leaves_the_agent_where_it_was(
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
            files.arm(fail_at, n_failures, number=number)
            try:
                store.save(turn)
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
                store.save(turn)
            expect_at(store, turn, before.number + 1)
            assert agent.cached((*LONG[:700], 1)) == 700
            assert files_below(folder / "tmp") == []
            assert problems(store) == []
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
            assert problems(store) == []
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
    assert files_below(folder / "unsaved") == []
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


def test_a_command_beside_the_worker_knows_of_a_lost_turn_that_the_database_refused(tmp_path: Path) -> None:
    sqlite = FullFiles()
    with closing(lose_a_turn(tmp_path / "store", sqlite, stored=400)):
        with opened(tmp_path / "store") as parts, pytest.raises(AgentTranscriptUnreadable, match="not saved"):
            fork_agent(parts, "agent", "fork")
        sqlite.arm(1, 0)


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
    assert problems(store) == []
    store.close()


@pytest.mark.parametrize("small_disk", [850_000], indirect=True)
@pytest.mark.parametrize("model", [MODEL, HYBRID], ids=["full", "hybrid"])
def test_a_disk_that_is_really_full_leaves_whole_files_and_whole_conversations(
    small_disk: SmallDisk, model: LoadedModel
) -> None:
    folder = small_disk.path / "store"
    store = AgentCacheStore(folder, max_bytes=1 << 30, memory_max_bytes=1 << 20)
    said: dict[str, tuple[int, ...]] = {}
    small_disk.ballast.write_bytes(bytes(200_000))

    def say(agent: Agent, new: int) -> bool:
        prompt = said.get(agent.name, ()) + ids(new, seed=len(said))
        try:
            agent.say(prompt)
        except OSError:
            return False
        said[agent.name] = prompt
        return True

    agents = [Agent(store, str(number), model) for number in range(40)]
    assert say(agents[0], 700)
    saved = [say(agent, 700) for agent in agents]
    assert not all(saved)
    assert files_below(folder / "tmp") == []
    for agent in agents:
        assert agent.tokens() == said.get(agent.name, ())
    assert problems(store) == []
    small_disk.free()
    failed = next(agent for agent, was_saved in zip(agents, saved, strict=True) if not was_saved)
    assert say(failed, 700)
    assert say(agents[0], 300)
    store = reopen(store, folder)
    for agent in (failed, agents[0]):
        agent.store = store
        assert agent.cached((*said[agent.name], 1)) == len(said[agent.name])
    store.close()


@pytest.mark.parametrize("small_disk", [600_000], indirect=True)
def test_what_a_failed_turn_wrote_takes_no_space_from_the_turns_after_it(small_disk: SmallDisk) -> None:
    store = AgentCacheStore(small_disk.path / "store", max_bytes=1 << 30)
    small, large = Agent(store, "small"), Agent(store, "large")
    small.say(LONG[:10])
    small_disk.fill()
    os.truncate(small_disk.ballast, small_disk.ballast.stat().st_size - 100_000)
    store.pin(frozenset({"small", "large"}), frozenset())
    with pytest.raises(OSError, match=r"No space left|is full"):
        large.say(ids(2000))  # its first blocks fit
    small.say(LONG[:11])
    assert small.tokens() == LONG[:11]
    store.close()
