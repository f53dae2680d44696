"""After a power cut at any instant, an agent is whole, at the version before the turn or at the one after it."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.worker.memory.agents import (
    MODEL,
    SNAPSHOT_SPECS,
    Agent,
    files_below,
    ids,
    make_model,
    make_transcript,
    make_turn,
    open_store,
)
from tests.worker.memory.faulty_files import CutFiles, PowerCut, Survivors

from stoker_shared.errors import AgentTranscriptUnreadable
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import LoadedModel

pytestmark = pytest.mark.slow

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


HYBRID, RECURRENT = (make_model(name, spec=SNAPSHOT_SPECS[name]) for name in ("hybrid", "recurrent"))
Q8 = make_model("q8", spec=dataclasses.replace(MODEL.spec, store_dtype="q8"))


def state_of(folder: Path, model: LoadedModel = MODEL) -> tuple[object, ...]:
    """All that a user can see of the agent after a restart; the store must be clean."""
    store = open_store(folder)
    try:
        assert store.verify() == []
        assert files_below(folder / "tmp") == []
        agent = Agent(store, model=model)
        version = agent.open()
        cached = agent.cached((*agent.tokens(), 1)), agent.cached(agent.tokens())
        assert store.misses == {}
        assert len([*folder.rglob("tail-*"), *folder.rglob("snapshot-*")]) <= 6  # of two versions, at the very most
        return version.number, version.transcript, dict(version.results), cached
    finally:
        store.close()


def prepare(folder: Path, stored: int, model: LoadedModel = MODEL) -> Path:
    store = open_store(folder)
    if stored:
        Agent(store, model=model).say(LONG[: stored - 20])
        Agent(store, model=model).say(LONG[:stored])
    store.close()
    return folder


def run(folder: Path, turn: Callable[[Agent], None], files: CutFiles, cut_at: int, model: LoadedModel = MODEL) -> bool:
    """Take a turn in the store at `folder`; whether the power stayed on."""
    store = AgentCacheStore(folder, files=files)
    files.arm(cut_at)
    try:
        turn(Agent(store, model=model))
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
    cut_everywhere(tmp_path, stored, turn, survivors, MODEL)


@pytest.mark.parametrize("survivors", ["all", "none", "newest"])
@pytest.mark.parametrize("turn", [first_turn, turn_with_tail, turn_without_cache])
@pytest.mark.parametrize("model", [HYBRID, RECURRENT, Q8], ids=lambda model: model.name)
def test_the_same_holds_for_snapshots_and_for_quantised_blocks(
    tmp_path: Path, model: LoadedModel, turn: Callable[[Agent], None], survivors: Survivors
) -> None:
    cut_everywhere(tmp_path, 0 if turn is first_turn else 400, turn, survivors, model)


def cut_everywhere(
    tmp_path: Path, stored: int, turn: Callable[[Agent], None], survivors: Survivors, model: LoadedModel
) -> None:
    base = prepare(tmp_path / "base", stored, model)
    before, after = state_of(base, model), None
    found = []
    for cut_at in range(1, 200):
        folder = shutil.copytree(base, tmp_path / str(cut_at))
        files = CutFiles(survivors)
        if run(folder, turn, files, cut_at, model):
            files.cut()  # what `save` has returned for is there, whatever was not synced
            after = state_of(folder, model)
            break
        found.append((folder, state_of(folder, model)))
    assert after is not None
    assert after[0] == before[0] + 1  # type: ignore[operator]
    assert found[0][1] == before
    assert len(found) > 12
    for folder, state in found:
        assert state in (before, after), folder.name
        if state == before:
            assert run(folder, turn, CutFiles(), 1000, model)
            assert state_of(folder, model) == after


@pytest.mark.parametrize("survivors", ["all", "none", "newest"])
def test_a_power_cut_while_a_store_is_made_leaves_a_store_that_opens(tmp_path: Path, survivors: Survivors) -> None:
    for cut_at in range(1, 100):
        folder, files = tmp_path / str(cut_at), CutFiles(survivors)
        files.arm(cut_at)
        try:
            AgentCacheStore(folder, files=files).close()
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
