"""Agent memory as a user sees it: conversations survive, and a next turn costs only its new tokens."""

import dataclasses
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
from stoker_worker.memory.store import AgentStore
from stoker_worker.ports import CacheSlice, CacheStorePort, Transcript

LONG = ids(1000)


def cache_store_port(store: AgentStore) -> CacheStorePort:
    return store  # mypy says whether it is one


def test_an_agent_nobody_has_heard_of_is_at_version_0(tmp_path: Path) -> None:
    agent = open_store(tmp_path).open_agent("nobody")
    assert (agent.number, agent.transcript, dict(agent.results)) == (0, None, {})


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


def test_save_returns_the_number_and_the_result_it_remembered(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    turn = agent.turn(LONG[:10])
    number, result = agent.store.save(turn)
    assert (number, result) == (1, turn.result_of(1))
    assert agent.open().results[turn.delivery] == result


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "\U0001f600 \u200d", " ", ".", "x" * 200, "CON", "Agent"])
def test_an_agent_id_is_never_a_path(tmp_path: Path, name: str) -> None:
    agent = Agent(open_store(tmp_path / "store"), name)
    agent.say(LONG[:10])
    Agent(agent.store, name.lower() + "!").say(LONG[:20])
    assert agent.tokens() == LONG[:10]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("prompt_tokens", [1, 2, 255, 256, 257, 511, 512, 513, 700])
@pytest.mark.parametrize("answer_tokens", [0, 1, 60, 256])
def test_the_next_turn_prefills_only_what_is_new(tmp_path: Path, prompt_tokens: int, answer_tokens: int) -> None:
    agent = Agent(open_store(tmp_path))
    agent.say(LONG[:prompt_tokens], ids(answer_tokens, seed=1))
    history = agent.tokens()
    restored = agent.restore((*history, 1, 2, 3))
    assert restored.prefix is not None
    assert restored.prefix.n_tokens == len(history)
    assert (restored.source, restored.miss_reason) == ("disk", None)
    assert restored.saved_blocks == len(history) // 256


@pytest.mark.parametrize("n_tokens", [1, 2, 256, 257, 512, 600])
def test_an_identical_prompt_leaves_out_only_its_last_token(tmp_path: Path, n_tokens: int) -> None:
    agent = Agent(open_store(tmp_path))
    agent.say(LONG[:n_tokens])
    assert agent.cached(LONG[:n_tokens]) == n_tokens - 1
    assert agent.restore(LONG[:n_tokens]).saved_blocks == n_tokens // 256
    assert agent.restore(LONG[:n_tokens]).miss_reason is None


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 800), st.integers(0, 800), st.integers(0, 300))
def test_what_is_reused_is_the_longest_common_prefix(tmp_path: Path, stored: int, shared: int, new: int) -> None:
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


def test_a_prompt_that_turns_away_in_mid_block_uses_the_blocks_first_part(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    agent.say(LONG[:600])
    assert agent.cached((*LONG[:400], 1, 2, 3)) == 400
    agent.say((*LONG[:400], 1, 2, 3))
    assert agent.tokens() == (*LONG[:400], 1, 2, 3)
    assert agent.cached((*LONG[:400], 1, 2, 3, 4)) == 403


def test_agents_share_the_blocks_of_a_common_prompt(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    Agent(store, "first").say(LONG[:600])
    second = Agent(store, "second")
    assert second.cached((*LONG[:560], 9)) == 512
    second.say((*LONG[:560], 9))
    assert len(files_below(tmp_path / "blocks")) == 2


def test_agents_of_different_salt_share_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    Agent(store, "first", salt="one").say(LONG[:600])
    for salt in (None, "two"):
        restored = Agent(store, "second", salt=salt).restore(LONG[:600])
        assert (restored.prefix, restored.source, restored.miss_reason) == (None, "none", None)
    assert Agent(store, "second", salt="one").cached(LONG[:600]) == 512


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


def test_a_turn_without_cache_keeps_the_transcript_and_the_blocks_it_still_stands_on(tmp_path: Path) -> None:
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


def test_the_engine_may_hand_over_only_the_part_that_is_not_on_disk(tmp_path: Path) -> None:
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


def test_a_head_changed_behind_the_stores_back_is_not_answered_from_memory(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    agent.say(LONG[:300])
    head = only(tmp_path, "HEAD")
    first = head.read_bytes()
    agent.say(LONG[:310])
    assert agent.open().number == 2
    head.write_bytes(first)
    assert agent.open().number == 1


def test_what_the_engine_gets_is_not_what_the_engine_gave(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    turn = agent.turn(LONG[:300])
    agent.store.save(turn)
    assert turn.cache is not None
    for keys, values in turn.cache.layers:
        keys[:], values[:] = 0, 0
    assert agent.cached(LONG[:300]) == 299
