"""A full disk costs a turn, never a conversation, and leaves no files behind."""

import os
import shutil
from pathlib import Path

import pytest
from tests.small_disk import SmallDisk
from tests.worker.memory.agents import MODEL, SNAPSHOT_SPECS, Agent, files_below, ids, make_model, open_store, reopen
from tests.worker.memory.faulty_files import FullFiles

from stoker_shared.errors import AgentTranscriptUnreadable
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import AgentVersion, LoadedModel

LONG = ids(900)
HYBRID = make_model("hybrid", spec=SNAPSHOT_SPECS["hybrid"])


@pytest.mark.slow
@pytest.mark.parametrize("n_failures", [1, 3, 1000])
@pytest.mark.parametrize("stored", [0, 400])
@pytest.mark.parametrize("model", [MODEL, HYBRID], ids=["full", "hybrid"])
def test_a_turn_that_finds_the_disk_full_leaves_the_agent_where_it_was(
    tmp_path: Path, stored: int, n_failures: int, model: LoadedModel
) -> None:
    base = open_store(tmp_path / "base")
    if stored:
        Agent(base, model=model).say(LONG[:stored])
    base.close()
    for fail_at in range(1, 100):
        folder = shutil.copytree(tmp_path / "base", tmp_path / str(fail_at))
        files = FullFiles()
        agent = Agent(AgentCacheStore(folder, files=files), model=model)
        before, pieces = agent.open(), pieces_in(folder)
        turn = agent.turn(LONG[:700])
        files.arm(fail_at, n_failures)
        try:
            agent.store.save(turn)
        except OSError:
            expect_unchanged_or_refused(agent, before.number)
            if n_failures == 1:  # else taking it back may fail as well
                assert pieces_in(folder) == pieces
        else:
            break
        assert files_below(folder / "tmp") == []
        files.arm(10**9, 0)  # there is room again
        agent.store = reopen(agent.store, folder)
        expect_unchanged_or_refused(agent, before.number)
        agent.store.close()
    assert not files.has_failed
    assert fail_at > 10
    assert agent.open().number == before.number + 1


def pieces_in(folder: Path) -> list[Path]:
    return [path.relative_to(folder) for path in files_below(folder / "agents") if path.suffix == ".safetensors"]


def expect_unchanged_or_refused(agent: Agent, number: int) -> None:
    """Refused only when the turn was written whole and could then not be taken back; never the turn itself."""
    found: AgentVersion | AgentTranscriptUnreadable
    try:
        found = agent.open()
    except AgentTranscriptUnreadable as error:
        found = error
    if isinstance(found, AgentVersion):
        assert found.number == number
        assert agent.store.verify() == []
    else:
        assert "not saved" in str(found)
        assert found.usable.number in (number, number + 1)


def test_the_same_turn_can_be_saved_when_there_is_room_again(tmp_path: Path) -> None:
    files = FullFiles()
    agent = Agent(AgentCacheStore(tmp_path, files=files))
    agent.say(LONG[:400])
    turn = agent.turn(LONG[:700])
    for fail_at in range(1, 100):
        files.arm(fail_at, 1)
        try:
            number, _ = agent.store.save(turn)
            break
        except OSError:
            files.arm(10**9, 0)
        assert agent.tokens() == LONG[:400]
        assert agent.cached((*LONG[:400], 1)) == 400
    assert fail_at > 10
    assert number == 2
    assert agent.cached((*LONG[:700], 1)) == 700


@pytest.mark.parametrize("stored", [0, 400])
def test_a_turn_that_was_not_saved_can_be_marked_on_a_full_disk(tmp_path: Path, stored: int) -> None:
    files = FullFiles()
    agent = Agent(AgentCacheStore(tmp_path, files=files))
    if stored:
        agent.say(LONG[:stored])
    files.arm(1, 1000)
    agent.store.mark_unsaved("agent")
    with pytest.raises(AgentTranscriptUnreadable):
        agent.open()
    if stored:  # for an agent without a folder there is nothing to rename: the mark lives as long as the worker
        agent.store = reopen(agent.store, tmp_path)
        with pytest.raises(AgentTranscriptUnreadable):
            agent.open()


@pytest.mark.parametrize("small_disk", [600_000], indirect=True)
@pytest.mark.parametrize("model", [MODEL, HYBRID], ids=["full", "hybrid"])
def test_a_disk_that_is_really_full_leaves_whole_files_and_a_right_usage(
    small_disk: SmallDisk, model: LoadedModel
) -> None:
    folder = small_disk.path / "store"
    store = AgentCacheStore(folder, max_bytes=1 << 30, memory_max_bytes=1 << 20)
    said: dict[str, tuple[int, ...]] = {}
    small_disk.ballast.write_bytes(bytes(300_000))

    def say(agent: Agent, new: int) -> bool:
        prompt = said.get(agent.name, ()) + ids(new, seed=len(said))
        try:
            agent.say(prompt)
        except OSError:
            return False
        finally:
            assert store.budget.total_bytes == sum(x.lstat().st_blocks * 512 for x in (folder, *folder.rglob("*")))
        said[agent.name] = prompt
        return True

    agents = [Agent(store, str(number), model) for number in range(40)]
    assert say(agents[0], 700)
    saved = [say(agent, 700) for agent in agents]
    assert not all(saved)
    assert files_below(folder / "tmp") == []
    for agent in agents:
        assert agent.tokens() == said.get(agent.name, ())
    assert store.verify() == []
    small_disk.free()
    failed = next(agent for agent, was_saved in zip(agents, saved, strict=True) if not was_saved)
    assert say(failed, 700)
    assert say(agents[0], 300)
    store = reopen(store, folder)
    for agent in (failed, agents[0]):
        agent.store = store
        assert agent.cached((*said[agent.name], 1)) == len(said[agent.name])
    store.close()


@pytest.mark.parametrize("small_disk", [400_000], indirect=True)
def test_what_a_failed_turn_wrote_takes_no_space_from_the_turns_after_it(small_disk: SmallDisk) -> None:
    store = AgentCacheStore(small_disk.path / "store", max_bytes=1 << 30)
    small, large = Agent(store, "small"), Agent(store, "large")
    small.say(LONG[:10])
    small_disk.fill()
    os.truncate(small_disk.ballast, small_disk.ballast.stat().st_size - 60_000)
    store.pin(frozenset({"small", "large"}))
    with pytest.raises(OSError, match="No space left"):
        large.say(LONG[:800])  # its first two blocks fit
    small.say(LONG[:11])
    assert small.tokens() == LONG[:11]
    store.close()
