"""The power may go at any instant: an agent is then at the version before the turn or at the one after it, whole."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.worker.memory.agents import Agent, files_below, ids, make_transcript, make_turn, open_store
from tests.worker.memory.faulty_files import CutFiles, PowerCut, Survivors

from stoker_shared.errors import AgentTranscriptUnreadable
from stoker_worker.memory.store import AgentStore

LONG = ids(900)


def first_turn(agent: Agent) -> None:
    agent.say(LONG[:300])


def turn_with_tail(agent: Agent) -> None:
    agent.say(LONG[:420], (1, 2))


def turn_over_two_blocks(agent: Agent) -> None:
    agent.say(LONG[:900], (1, 2))


def turn_that_ends_on_a_block(agent: Agent) -> None:
    agent.say(LONG[:512])


def turn_without_cache(agent: Agent) -> None:
    agent.store.save(make_turn(agent, agent.open().number, make_transcript(LONG[:450]), None))


def new_conversation(agent: Agent) -> None:
    agent.say(ids(300, seed=8))


TURNS: dict[str, tuple[int, Callable[[Agent], None]]] = {
    turn.__name__: (stored, turn)
    for stored, turn in (
        (0, first_turn),
        (400, turn_with_tail),
        (400, turn_over_two_blocks),
        (400, turn_that_ends_on_a_block),
        (400, turn_without_cache),
        (400, new_conversation),
    )
}


def state_of(folder: Path) -> tuple[object, ...]:
    """All that a user can see of the agent after a restart; the store must be clean."""
    store = open_store(folder)
    try:
        assert store.verify() == []
        assert files_below(folder / "tmp") == []
        agent = Agent(store)
        version = agent.open()
        cached = agent.cached((*agent.tokens(), 1))
        assert store.misses == {}
        return version.number, version.transcript, dict(version.results), cached
    finally:
        store.close()


def prepare(folder: Path, stored: int) -> Path:
    store = open_store(folder)
    if stored:
        Agent(store).say(LONG[: stored - 20])
        Agent(store).say(LONG[:stored])
    store.close()
    return folder


def run(folder: Path, turn: Callable[[Agent], None], files: CutFiles, cut_at: int) -> bool:
    """Take a turn in the store at `folder`; whether the power stayed on."""
    store = AgentStore(folder, files=files)
    files.arm(cut_at)
    try:
        turn(Agent(store))
    except PowerCut:
        return False
    finally:
        store.close()
    return True


@pytest.mark.parametrize("survivors", ["all", "none", "newest"])
@pytest.mark.parametrize("name", TURNS)
def test_a_power_cut_leaves_the_version_before_or_the_one_after(
    tmp_path: Path, name: str, survivors: Survivors
) -> None:
    stored, turn = TURNS[name]
    base = prepare(tmp_path / "base", stored)
    before, after = state_of(base), None
    found = []
    for cut_at in range(1, 200):
        folder = shutil.copytree(base, tmp_path / str(cut_at))
        files = CutFiles(survivors)
        if run(folder, turn, files, cut_at):
            files.cut()  # what `save` has returned for is there, whatever was not synced
            after = state_of(folder)
            break
        found.append((folder, state_of(folder)))
    assert after is not None
    assert after[0] == before[0] + 1  # type: ignore[operator]
    assert found[0][1] == before
    assert len(found) > 12
    for folder, state in found:
        assert state in (before, after), folder.name
        if state == before:
            assert run(folder, turn, CutFiles(), 1000)
            assert state_of(folder) == after


@pytest.mark.parametrize("survivors", ["all", "none", "newest"])
def test_a_power_cut_while_a_store_is_made_leaves_one_that_opens(tmp_path: Path, survivors: Survivors) -> None:
    for cut_at in range(1, 100):
        folder, files = tmp_path / str(cut_at), CutFiles(survivors)
        files.arm(cut_at)
        try:
            AgentStore(folder, files=files).close()
        except PowerCut:
            state_of(folder)
        else:
            break
    assert cut_at > 8


@pytest.mark.parametrize("survivors", ["all", "none", "newest"])
def test_a_power_cut_while_damage_is_repaired_never_shows_a_shorter_conversation(
    tmp_path: Path, survivors: Survivors
) -> None:
    base = prepare(tmp_path / "base", 400)
    (record,) = base.rglob("00000001.json")
    record.unlink()
    n_refused = 0
    for cut_at in range(1, 100):
        folder = shutil.copytree(base, tmp_path / str(cut_at))
        if run(folder, replace_conversation, CutFiles(survivors), cut_at):
            break
        store = open_store(folder)
        try:
            assert store.open_agent("agent").transcript == make_transcript(LONG[:500])
        except AgentTranscriptUnreadable as error:
            n_refused += 1
            Agent(store).say(LONG[:500], agent=error.usable)
            assert Agent(store).tokens() == LONG[:500]
        finally:
            store.close()
    assert n_refused > 8


def replace_conversation(agent: Agent) -> None:
    with pytest.raises(AgentTranscriptUnreadable) as caught:
        agent.open()
    agent.say(LONG[:500], agent=caught.value.usable)
