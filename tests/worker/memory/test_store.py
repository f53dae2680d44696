"""Agent memory as a user sees it: conversations survive, and a next turn costs only its new tokens."""

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.worker.memory.agents import MODEL, Agent, files_below, ids, open_store, reopen

from stoker_shared.errors import AgentTranscriptUnreadable, AgentVersionConflict
from stoker_worker.memory.agent_changes import forget_agent
from stoker_worker.memory.lookup import n_readers
from stoker_worker.memory.store_parts import opened

LONG = ids(1000)


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "\U0001f600 \u200d", " ", ".", "x" * 200, "CON", "Agent"])
def test_an_agent_id_is_never_a_path(tmp_path: Path, name: str) -> None:
    agent = Agent(open_store(tmp_path / "store"), name)
    agent.say(LONG[:10])
    Agent(agent.store, name.lower() + "!").say(LONG[:20])
    assert agent.tokens() == LONG[:10]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_turn_that_comes_too_late_changes_no_file(tmp_path: Path) -> None:
    """The files of its version have the names of those that the agent has by now."""
    agent = Agent(open_store(tmp_path))
    late = agent.turn((*LONG[:290], *ids(10, seed=1)))
    agent.say(LONG[:300])
    before = {path: path.read_bytes() for path in files_below(tmp_path) if path.suffix == ".safetensors"}
    with pytest.raises(AgentVersionConflict, match="is at version 1, the turn continues 0"):
        agent.store.save(late)
    assert {path: path.read_bytes() for path in files_below(tmp_path) if path.suffix == ".safetensors"} == before
    assert agent.cached(LONG[:300]) == 299


def test_a_lost_turn_is_noted_in_the_store_and_not_in_the_worker(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    agent.say(LONG[:300])
    agent.store.mark_unsaved("agent")
    agent.store.mark_unsaved("unknown")
    agent.store = reopen(agent.store, tmp_path)
    for name, number in (("agent", 1), ("unknown", 0)):
        with pytest.raises(AgentTranscriptUnreadable, match="its last turn was not saved") as refused:
            agent.store.open_agent(name)
        assert refused.value.usable.number == number
    agent.store.mark_unsaved("agent")
    with opened(tmp_path) as parts:  # as a command does while the worker runs
        forget_agent(parts, "agent")
    assert agent.open().number == 0
    assert agent.say(LONG[:5]) == 1


def test_a_restore_beside_running_sequences_uses_half_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cores, alone, beside_others in ((None, 1, 1), (2, 2, 1), (16, 4, 4), (4, 4, 2)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert (n_readers(beside_others=False), n_readers(beside_others=True)) == (alone, beside_others)
    with closing(open_store(tmp_path)) as store:
        agent = Agent(store)
        agent.say(ids(1100))
        at_once = agent.restore((*ids(1100), 7))
        beside = store.restore((*ids(1100), 7), agent=agent.open(), model=MODEL, salt=None, beside_others=True)
        assert at_once.prefix is not None
        assert beside.prefix is not None
        for ours, theirs in zip(at_once.prefix.layers, beside.prefix.layers, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
