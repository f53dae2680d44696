"""Agent memory as a user sees it: conversations survive, and a next turn costs only its new tokens."""

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.worker.memory.agents import (
    SPEC,
    Agent,
    cache_of,
    files_below,
    ids,
    make_model,
    make_transcript,
    make_turn,
    only,
    open_store,
    problems_of,
    reopen,
)

from stoker_shared.errors import AgentTranscriptUnreadable, AgentVersionConflict
from stoker_worker.memory import agent_table
from stoker_worker.memory.database import Connection
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.memory.store_parts import opened
from stoker_worker.ports import CacheSlice, CacheStorePort, Transcript

LONG = ids(1000)


def cache_store_port(store: AgentCacheStore) -> CacheStorePort:
    return store  # mypy says whether it is one


def test_a_conversation_and_its_results_survive_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    agent = Agent(store)
    turns = []
    for length in (10, 300, 305, 40, 900):
        turns.append(agent.turn(LONG[:length], (7, 8)))
        store.save(turns[-1])
    agent.store = reopen(agent.store, tmp_path)
    version = agent.open()
    assert version.number == 5
    assert version.transcript == turns[-1].transcript
    assert [agent.store.answer("agent", turn.delivery) for turn in turns] == [turn.result for turn in turns]


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "\U0001f600 \u200d", " ", ".", "x" * 200, "CON", "Agent"])
def test_an_agent_id_is_never_a_path(tmp_path: Path, name: str) -> None:
    agent = Agent(open_store(tmp_path / "store"), name)
    agent.say(LONG[:10])
    Agent(agent.store, name.lower() + "!").say(LONG[:20])
    assert agent.tokens() == LONG[:10]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 800), st.integers(0, 800), st.integers(0, 300))
def test_any_longest_common_prefix_is_reused(tmp_path: Path, stored: int, shared: int, new: int) -> None:
    agent = Agent(open_store(tmp_path / f"{stored}-{shared}-{new}"))
    agent.say(LONG[:stored])
    shared = min(shared, stored)
    prompt = LONG[:shared] + tuple(token + 50_000 for token in range(new))
    assert agent.cached(prompt) == max(0, min(shared, len(prompt) - 1))
    assert agent.restore(prompt).miss_reason is None
    agent.store.close()


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 700), st.integers(1, 400)), min_size=1, max_size=6), st.integers(0, 10**9))
def test_any_run_of_turns_keeps_the_transcript_and_its_cache(
    tmp_path: Path, turns: list[tuple[int, int]], run: int
) -> None:
    agent = Agent(open_store(tmp_path / str(run)))
    for seed, (keep, new) in enumerate(turns):
        history = agent.tokens()
        prompt = history[:keep] + ids(new, seed=seed)
        assert agent.cached(prompt) >= min(keep, len(history), len(prompt) - 1)
        agent.say(prompt, (seed,))
        assert agent.tokens() == (*prompt, seed)
        assert agent.cached((*prompt, seed, 1)) == len(prompt) + 1
    assert problems_of(agent.store) == []
    agent.store.close()


def test_agents_share_the_blocks_of_a_common_prompt(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    Agent(store, "first").say(LONG[:600])
    second = Agent(store, "second")
    assert second.cached((*LONG[:560], 9)) == 512
    second.say((*LONG[:560], 9))
    assert len(files_below(tmp_path / "blocks")) == 2


def test_another_model_tokenizer_or_salt_is_a_named_miss_and_never_a_wrong_cache(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    agent = Agent(store)
    agent.say(LONG[:300])
    for change, reason in (
        ({"model": make_model("b")}, "other_model"),
        ({"model": make_model("a", tokenizer="new")}, "other_tokenizer"),
        ({"salt": "salt"}, "other_salt"),
    ):
        other = dataclasses.replace(agent, **change)
        restored = other.restore((*LONG[:300], 1))
        assert restored.miss_reason == reason
        if reason != "other_tokenizer":  # there the fingerprint of this test's model did not change
            assert restored.prefix is None
    assert store.misses == {"other_model": 1, "other_tokenizer": 1, "other_salt": 1}
    assert agent.cached((*LONG[:300], 1)) == 300


def test_a_store_that_is_closed_logs_how_many_misses_of_each_reason_there_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    agent = Agent(open_store(tmp_path))
    agent.say(LONG[:600])
    for model in (make_model("b"), make_model("b"), make_model("c")):
        dataclasses.replace(agent, model=model).restore(LONG[:700])
    only(tmp_path, "*-tail.*").unlink()
    agent.restore(LONG[:700])
    agent.store.close()
    assert "cache misses since the store was opened: 3 other_model, 1 tail_missing" in caplog.messages
    caplog.clear()
    open_store(tmp_path).close()
    assert not any("misses" in message for message in caplog.messages)


def test_an_agent_can_move_to_another_model(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    Agent(store).say(LONG[:300])
    moved = Agent(store, model=make_model("b"))
    moved.say(LONG[:300], (5,))
    assert moved.cached((*LONG[:300], 5, 6)) == 301


def test_bfloat16_caches_travel_as_uint16(tmp_path: Path) -> None:
    spec = dataclasses.replace(SPEC, dtype="bfloat16")
    agent = Agent(open_store(tmp_path), model=make_model(spec=spec))
    agent.say(LONG[:600])
    restored = agent.restore(LONG[:600])
    assert restored.prefix is not None
    assert {array.dtype for pair in restored.prefix.layers for array in pair} == {np.dtype(np.uint16)}


def test_a_turn_without_cache_keeps_the_transcript_and_its_common_blocks(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    agent.say(LONG[:600])
    transcript = make_transcript(LONG[:700])
    agent.store.save(make_turn(agent, agent.open(), transcript, None))
    agent.store = reopen(agent.store, tmp_path)
    assert agent.open().transcript == transcript
    restored = agent.restore(LONG[:800])
    assert restored.prefix is not None
    assert (restored.prefix.n_tokens, restored.miss_reason) == (512, None)
    assert not list(tmp_path.rglob("*-tail.*"))
    for path in files_below(tmp_path / "blocks"):
        path.unlink()
    assert agent.restore(LONG[:800]).miss_reason == "block_missing"


def test_text_conversations_are_kept_too(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    for number, text in enumerate(["Once", "Once upon", "Twice \U0001f600"]):
        transcript = Transcript((1, number), "tok", None, text, "stop", carry_text="\n")
        agent.store.save(make_turn(agent, agent.open(), transcript, None))
        agent.store = reopen(agent.store, tmp_path)
        assert agent.open().transcript == transcript


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


def test_an_agent_that_another_process_removed_is_made_anew(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    agent.say(LONG[:300])
    late = agent.turn(LONG[:310])
    remove_beside(tmp_path, "agent")
    assert (agent.open().number, agent.tokens()) == (0, ())
    with pytest.raises(AgentVersionConflict, match="is at version 0, the turn continues 1"):
        agent.store.save(late)
    assert agent.say(LONG[:5]) == 1


def remove_beside(folder: Path, agent_id: str) -> None:
    """As a command does while the worker runs."""
    with opened(folder) as parts:

        def change(connection: Connection) -> None:
            row = agent_table.find_agent(connection, agent_id)
            assert row is not None
            agent_table.delete_agent(connection, row)

        parts.database.commit(change)


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
    remove_beside(tmp_path, "agent")
    assert agent.open().number == 0
    assert agent.say(LONG[:5]) == 1


def test_a_lost_turn_is_remembered_by_the_worker_as_long_as_the_database_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(open_store(tmp_path))
    agent.say(LONG[:300])
    with monkeypatch.context() as patch:
        patch.setattr(agent.store.parts.database, "commit", raise_no_space)
        agent.store.mark_unsaved("agent")
    with pytest.raises(AgentTranscriptUnreadable, match="its last turn was not saved") as refused:
        agent.open()
    agent.say(LONG[:310], agent=refused.value.usable)
    assert agent.tokens() == LONG[:310]


def raise_no_space(change: object) -> None:
    raise OSError("no space")


def test_a_cache_that_is_not_the_transcripts_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    layers = cache_of(LONG[:300])
    for start, stop, arrays in ((0, 301, layers), (10, 300, layers), (0, 299, layers), (0, 300, layers[:1])):
        turn = make_turn(agent, agent.open(), make_transcript(LONG[:300]), CacheSlice(start, stop, arrays))
        with pytest.raises(ValueError, match="cache"):
            agent.store.save(turn)
    assert agent.open().number == 0
    assert files_below(tmp_path / "blocks") == []


def test_a_cache_may_begin_at_the_first_block_that_is_not_on_disk(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    agent.say(LONG[:600])
    turn = agent.turn(LONG[:1000])
    assert turn.cache is not None
    assert turn.cache.start == 512
    agent.store.save(turn)
    assert agent.cached((*LONG, 1)) == 1000


def test_the_previous_tail_is_removed(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    for length in (10, 20, 30):
        agent.say(LONG[:length])
        assert only(tmp_path, "*-tail.*")
    agent.say(LONG[:512])
    assert not list(tmp_path.rglob("*-tail.*"))


def test_blocks_that_are_there_are_not_written_again(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    agent.say(LONG[:600])
    before = {path: path.stat().st_ino for path in files_below(tmp_path / "blocks")}
    layers = cache_of(LONG[:700])
    agent.store.save(make_turn(agent, agent.open(), make_transcript(LONG[:700]), CacheSlice(0, 700, layers)))
    assert {path: path.stat().st_ino for path in files_below(tmp_path / "blocks")} == before


def test_the_saved_cache_is_a_copy(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    turn = agent.turn(LONG[:300])
    agent.store.save(turn)
    assert turn.cache is not None
    for keys, values in turn.cache.layers:
        keys[:], values[:] = 0, 0
    assert agent.cached(LONG[:300]) == 299
