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
    reopen,
)

from stoker_shared.errors import AgentVersionConflict
from stoker_worker.memory.store import AgentCacheStore
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
    assert version.results == {turn.delivery: turn.result_of(number) for number, turn in enumerate(turns, start=1)}


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "\U0001f600 \u200d", " ", ".", "x" * 200, "CON", "Agent"])
def test_an_agent_id_is_never_a_path(tmp_path: Path, name: str) -> None:
    agent = Agent(open_store(tmp_path / "store"), name)
    agent.say(LONG[:10])
    Agent(agent.store, name.lower() + "!").say(LONG[:20])
    assert agent.tokens() == LONG[:10]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 800), st.integers(0, 800), st.integers(0, 300))
def test_any_longest_common_prefix_is_reused(tmp_path: Path, stored: int, shared: int, new: int) -> None:
    agent = Agent(open_store(tmp_path / f"{stored}-{shared}-{new}"))
    agent.say(LONG[:stored])
    shared = min(shared, stored)
    prompt = LONG[:shared] + tuple(token + 50_000 for token in range(new))
    assert agent.cached(prompt) == max(0, min(shared, len(prompt) - 1))
    assert agent.restore(prompt).miss_reason is None
    agent.store.close()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    assert agent.store.verify() == []
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
    only(tmp_path, "tail-*").unlink()
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
    agent.store.save(make_turn(agent, 1, transcript, None))
    agent.store = reopen(agent.store, tmp_path)
    assert agent.open().transcript == transcript
    restored = agent.restore(LONG[:800])
    assert restored.prefix is not None
    assert (restored.prefix.n_tokens, restored.miss_reason) == (512, None)
    assert not list(tmp_path.rglob("tail-*"))
    for path in files_below(tmp_path / "blocks"):
        path.unlink()
    assert agent.restore(LONG[:800]).miss_reason == "block_missing"


def test_text_conversations_are_kept_too(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    for number, text in enumerate(["Once", "Once upon", "Twice \U0001f600"]):
        transcript = Transcript((1, number), "tok", None, text, "stop", carry_text="\n")
        agent.store.save(make_turn(agent, number, transcript, None))
        agent.store = reopen(agent.store, tmp_path)
        assert agent.open().transcript == transcript


def test_a_turn_is_not_saved_twice(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    turn = agent.turn(LONG[:300])
    agent.store.save(turn)
    before = {path: path.read_bytes() for path in files_below(tmp_path)}
    for _ in range(2):
        with pytest.raises(AgentVersionConflict, match="is at version 1, the turn continues 0"):
            agent.store.save(turn)
        agent.store = reopen(agent.store, tmp_path)
    assert {path: path.read_bytes() for path in files_below(tmp_path)} == before


def test_a_cache_that_is_not_the_transcripts_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    layers = cache_of(LONG[:300])
    for start, stop, arrays in ((0, 301, layers), (10, 300, layers), (0, 299, layers), (0, 300, layers[:1])):
        turn = make_turn(agent, 0, make_transcript(LONG[:300]), CacheSlice(start, stop, arrays))
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
        assert only(tmp_path, "tail-*")
    agent.say(LONG[:512])
    assert not list(tmp_path.rglob("tail-*"))


def test_reopening_an_agent_does_not_read_its_records_again(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    agent.say(LONG[:300])
    agent.say(LONG[:310])
    only(tmp_path, "00000001.json").unlink()
    assert agent.tokens() == LONG[:310]


def test_an_agent_is_read_once_after_a_restart(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    agent.say(LONG[:300])
    agent.store = reopen(agent.store, tmp_path)
    assert agent.tokens() == LONG[:300]
    only(tmp_path, "00000001.json").unlink()
    assert agent.tokens() == LONG[:300]


def test_blocks_that_are_there_are_not_written_again(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    agent.say(LONG[:600])
    before = {path: path.stat().st_ino for path in files_below(tmp_path / "blocks")}
    layers = cache_of(LONG[:700])
    agent.store.save(make_turn(agent, 1, make_transcript(LONG[:700]), CacheSlice(0, 700, layers)))
    assert {path: path.stat().st_ino for path in files_below(tmp_path / "blocks")} == before


def test_a_head_changed_by_another_process_is_read_again(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    agent.say(LONG[:300])
    head = only(tmp_path, "HEAD")
    first = head.read_bytes()
    agent.say(LONG[:310])
    assert agent.open().number == 2
    head.write_bytes(first)
    assert agent.open().number == 1


def test_the_saved_cache_is_a_copy(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    turn = agent.turn(LONG[:300])
    agent.store.save(turn)
    assert turn.cache is not None
    for keys, values in turn.cache.layers:
        keys[:], values[:] = 0, 0
    assert agent.cached(LONG[:300]) == 299
