"""The contract of an agent store: alone, with caches in RAM, and with a shared store."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.worker.memory.agents import (
    MODEL,
    SNAPSHOT_SPECS,
    SPEC,
    AgentOf,
    FastDisk,
    ask,
    cache_of,
    call_of_session,
    checked,
    delivery,
    ids,
    make_model,
    make_transcript,
    make_turn,
    run_job,
    tidy,
)

from stoker_shared.errors import (
    AgentExists,
    AgentNotFound,
    AgentTranscriptUnreadable,
    AgentVersionConflict,
    VersionTaken,
)
from stoker_worker.memory.replica.bucket import Bucket
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import CacheStorePort, LoadedModel, SequenceCache, Turn
from stoker_worker.ports.cache_spec import LayerKind, LayerSpec, ModelCacheSpec
from stoker_worker.ports.model import ServingMode


def shared_store(folder: Path) -> CacheStorePort:
    """With a shared store that nobody else uses."""
    share = folder.with_name("share")
    share.mkdir()
    return AgentCacheStore(folder, files=FastDisk(), shared=Bucket(share.as_uri()))


LONG = ids(1400)
STORES: dict[str, Callable[[Path], CacheStorePort]] = {
    "disk": lambda folder: AgentCacheStore(folder, files=FastDisk()),
    "disk and RAM": lambda folder: AgentCacheStore(folder, files=FastDisk(), memory_max_bytes=2**30),
    "shared": shared_store,
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CacheStorePort]:
    store = STORES[request.param](tmp_path / "store")
    yield store
    store.close()


def lose_a_turn(store: CacheStorePort) -> None:
    """A job of the agent finishes without its turn."""
    if isinstance(store, AgentCacheStore) and store.shared_id():
        pytest.skip("with a shared store, no job finishes without its turn")
    store.mark_unsaved("agent")


def saved_late(store: CacheStorePort, turn: Turn) -> Mapping[str, Any] | None:
    """Save a turn whose base is not the newest version any more; ``None``: it is refused."""
    try:
        return store.save(turn)
    except (AgentVersionConflict, VersionTaken):
        return None


# --- turns ---


def test_every_turn_is_the_next_version_and_answers_its_delivery(store: CacheStorePort) -> None:
    agent = AgentOf(store)
    turns = []
    for length in (10, 300, 305, 40, 900):
        turns.append(agent.turn(LONG[:length], (7, 8)))
        assert store.answer("agent", turns[-1].delivery) is None
        store.save(turns[-1])
    version = agent.open()
    assert (version.number, version.transcript) == (5, turns[-1].transcript)
    assert [store.answer("agent", turn.delivery) for turn in turns] == [turn.result for turn in turns]


def test_another_delivery_is_not_answered(store: CacheStorePort) -> None:
    """A job id that is used again and another request are deliveries of their own."""
    agent = AgentOf(store)
    turn = agent.turn(LONG[:10])
    store.save(turn)
    AgentOf(store, "other").say(LONG[:5])
    for changes in ({"created_at": "2025"}, {"request": "other"}, {"job_id": "job-11"}):
        assert store.answer("agent", replace(turn.delivery, **changes)) is None  # type: ignore[arg-type]
    assert store.answer("other", turn.delivery) == {"job_id": "job-1", "version": 1}  # its own first job
    assert store.answer("third", turn.delivery) is None


def test_a_turn_is_not_saved_twice(store: CacheStorePort) -> None:
    agent = AgentOf(store)
    turn = agent.turn(LONG[:300])
    store.save(turn)
    for _ in range(2):
        assert saved_late(store, turn) in (None, turn.result)
    assert agent.open().number == 1
    assert (agent.cached(LONG[:300]), store.answer("agent", turn.delivery)) == (299, turn.result)


def test_a_turn_does_not_continue_a_version_that_only_has_the_same_number(store: CacheStorePort) -> None:
    """The agent was forgotten and made anew while its job ran."""
    agent = AgentOf(store)
    agent.say(LONG[:10])
    late = agent.turn(LONG[:20])
    run_job(store, "forget")
    assert saved_late(store, late) is None
    number = agent.say(LONG[:12])
    assert saved_late(store, late) is None
    assert (agent.open().number, agent.tokens()) == (number, LONG[:12])
    assert store.answer("agent", late.delivery) is None


def test_an_answer_is_kept_until_its_job_has_ended_and_for_its_time_after_that(store: CacheStorePort) -> None:
    agent = AgentOf(store)
    turns = []
    for length in (10, 20, 30):
        turns.append(agent.turn(LONG[:length]))
        store.save(turns[-1])
    over, kept, running = (turn.delivery for turn in turns)
    store.ended("agent", over, remember_s=-1)
    store.ended("agent", kept, remember_s=3600)
    tidy(store)
    assert [store.answer("agent", one) for one in (kept, running)] == [turns[1].result, turns[2].result]
    with pytest.raises(AgentTranscriptUnreadable, match="forgotten"):  # it made a turn: never one more
        store.answer("agent", over)
    assert (agent.open().number, agent.tokens()) == (3, LONG[:30])


def test_a_cache_that_is_not_the_transcripts_is_refused(store: CacheStorePort) -> None:
    agent = AgentOf(store)
    layers = cache_of(LONG[:300])
    for n_tokens, arrays in ((301, layers), (299, layers), (300, layers[:1])):
        with pytest.raises(ValueError, match="cache"):
            store.save(make_turn(agent, agent.open(), make_transcript(LONG[:300]), SequenceCache(n_tokens, arrays)))
    assert agent.open().number == 0


def test_a_look_and_a_closed_number_change_nothing_of_an_agent(store: CacheStorePort) -> None:
    agent = AgentOf(store)
    agent.say(LONG[:300])
    assert store.look("agent")
    store.close_number("agent")
    assert (agent.tokens(), agent.cached((*LONG[:300], 1)) >= 256) == (LONG[:300], True)
    number = agent.open().number
    assert agent.say(LONG[:310]) == number + 1


# --- prefixes ---


@pytest.mark.parametrize("answer_tokens", [0, 1, 60, 256])
def test_the_next_turn_prefills_only_what_is_new(store: CacheStorePort, answer_tokens: int) -> None:
    for n_tokens in (1, 2, 255, 256, 257, 511, 512, 513, 700):
        agent = alone(store, n_tokens)
        agent.say(LONG[:n_tokens], ids(answer_tokens, seed=1))
        history = agent.tokens()
        restored = agent.restore((*history, 1, 2, 3))
        assert restored.prefix is not None
        assert restored.prefix.n_tokens == len(history)
        assert (restored.source in ("memory", "disk"), restored.miss_reason) == (True, None)


def alone(store: CacheStorePort, number: int) -> AgentOf[CacheStorePort]:
    """An agent that shares no cache with those of other numbers."""
    return AgentOf(store, str(number), salt=str(number))


def test_the_last_token_of_a_prompt_never_comes_from_the_cache(store: CacheStorePort) -> None:
    for n_tokens in (1, 2, 256, 257, 512, 600):
        agent = alone(store, n_tokens)
        agent.say(LONG[:n_tokens])
        assert agent.cached(LONG[:n_tokens]) == n_tokens - 1
        assert agent.restore(LONG[:n_tokens]).miss_reason is None


def test_the_longest_common_prefix_is_reused(store: CacheStorePort) -> None:
    for shared in (0, 1, 200, 256, 400, 599, 600):
        agent = alone(store, shared)
        agent.say(LONG[:600])
        prompt = (*LONG[:shared], *ids(100, seed=2))
        assert agent.cached(prompt) == shared
        agent.say(prompt)
        assert agent.cached((*prompt, 1)) == shared + 100


def test_agents_of_one_salt_share_the_blocks_of_a_common_beginning(store: CacheStorePort) -> None:
    AgentOf(store, "first", salt="one").say(LONG[:600])
    second = AgentOf(store, "second", salt="one")
    assert second.cached((*LONG[:560], 9)) == 512
    second.say((*LONG[:560], 9))
    assert second.cached((*LONG[:560], 9, 10)) == 561
    for salt in (None, "two"):
        restored = AgentOf(store, "third", salt=salt).restore(LONG[:600])
        assert (restored.prefix, restored.source, restored.miss_reason) == (None, "none", None)


def test_another_agents_longer_prefix_wins_over_the_agents_own(store: CacheStorePort) -> None:
    AgentOf(store, "first").say(LONG[:1300])
    second = AgentOf(store, "second")
    second.say(LONG[:600])
    assert second.cached(LONG[:1300]) == 1280


def test_a_cache_of_another_model_tokenizer_or_salt_is_a_named_miss(store: CacheStorePort) -> None:
    agent = AgentOf(store)
    agent.say(LONG[:300])
    for reason, changes in {
        "other_model": {"model": make_model("b")},
        "other_tokenizer": {"model": make_model("a", tokenizer="new")},
        "other_salt": {"salt": "salt"},
    }.items():
        other: AgentOf[CacheStorePort] = replace(agent, **changes)  # type: ignore[arg-type]
        assert other.restore((*LONG[:300], 1)).miss_reason == reason
    assert agent.cached((*LONG[:300], 1)) == 300


def test_a_turn_without_cache_keeps_the_blocks_of_the_tokens_that_stay(store: CacheStorePort) -> None:
    agent = AgentOf(store)
    agent.say(LONG[:600])
    store.save(make_turn(agent, agent.open(), make_transcript(LONG[:700]), None))
    assert agent.cached(LONG[:800]) == 512
    assert agent.say(LONG[:800]) == 3
    assert agent.cached(LONG[:900]) == 800


@pytest.mark.parametrize("kind", SNAPSHOT_SPECS)
def test_a_snapshot_is_used_exactly_where_it_was_taken(store: CacheStorePort, kind: str) -> None:
    agent = AgentOf(store, model=make_model(kind, spec=SNAPSHOT_SPECS[kind]))
    agent.say(LONG[:600], LONG[600:610])
    for prompt, n_tokens in (
        ((*LONG[:610], 1), 610),
        ((*LONG[:605], 1), 599),
        (LONG[:600], 599),
        ((*LONG[:599], 1), 599),
        (LONG[:599], 0),
    ):
        assert agent.cached(prompt) == n_tokens
    agent.say((*LONG[:610], *ids(40, seed=3)))
    assert agent.cached((*LONG[:610], *ids(40, seed=3), 1)) == 650
    assert AgentOf(store, "other", model=agent.model).cached(LONG[:600]) == 0
    store.save(make_turn(agent, agent.open(), make_transcript(LONG[:700], tokenizer="tok"), None))
    assert agent.cached(LONG[:800]) in (0, 610)  # without full attention, what the first turn left needs no tail


@pytest.mark.parametrize("why", ["unknown layer", "mode"])
def test_a_model_without_memory_leaves_transcripts_only(store: CacheStorePort, why: str) -> None:
    if why == "mode":
        model = replace(MODEL, mode=ServingMode(memory=False))
    else:
        model = make_model(spec=ModelCacheSpec((*SPEC.layers, LayerSpec(LayerKind.UNKNOWN)), "float32"))
    agent = AgentOf(store, model=model)
    AgentOf(store).say(LONG[:300])
    assert agent.restore(LONG[:400]).miss_reason is None
    store.save(make_turn(agent, agent.open(), make_transcript(LONG[:350]), None))
    assert agent.tokens() == LONG[:350]
    restored = agent.restore(LONG[:400])
    assert (restored.prefix, restored.source, restored.miss_reason) == (None, "none", None)


def test_arrays_are_copies_on_both_sides(store: CacheStorePort) -> None:
    agent = AgentOf(store)
    turn = agent.turn(LONG[:300])
    store.save(turn)
    if not isinstance(store, AgentCacheStore) or not store.ram_cache.max_bytes:  # there they are lent, not copied
        assert turn.cache is not None
        for keys, values in turn.cache.layers:
            keys[:], values[:] = 0, 0
    assert agent.cached(LONG[:300]) == 299


def test_jobs_without_an_agent_share_the_blocks_that_two_of_them_begin_with(store: CacheStorePort) -> None:
    first = store.restore(LONG[:700], agent=None, model=MODEL, salt=None)
    assert (first.prefix, first.source, first.to_share) == (None, "none", 0)
    second = store.restore((*LONG[:600], 5), agent=None, model=MODEL, salt=None)
    assert (second.prefix, second.to_share) == (None, 512)
    store.save_blocks(LONG[:512], SequenceCache(600, cache_of(LONG[:600])), model=MODEL, salt=None)
    third = checked(store.restore((*LONG[:600], 6), agent=None, model=MODEL, salt=None), LONG[:600])
    assert third.to_share == 0
    assert third.prefix is not None
    assert third.prefix.n_tokens == 512
    assert store.restore(LONG[:600], agent=None, model=MODEL, salt="other").to_share == 0
    assert AgentOf(store).cached(LONG[:600]) == 512


def test_a_call_of_a_session_finds_all_of_the_call_that_it_goes_on_with(store: CacheStorePort) -> None:
    def cached(
        prompt: tuple[int, ...], salt: str | None = None, session: str | None = "s", model: LoadedModel = MODEL
    ) -> int:
        restored = store.restore(prompt, agent=None, model=model, salt=salt, session=session)
        return restored.prefix.n_tokens if restored.prefix else 0

    other = ids(100, seed=5)
    assert call_of_session(store, LONG[:600], LONG[600:650])[0] == 0
    assert call_of_session(store, other, (1, 2, 3))[0] == 0
    assert call_of_session(store, LONG[:700], LONG[700:720])[0] == 650
    assert call_of_session(store, (*other, 1, 2, 3, 4))[0] == 103
    assert cached(LONG[:800]) == 720
    assert cached(LONG[:800], session="t") == cached(LONG[:800], session=None) == 512
    assert cached(LONG[:800], salt="other") == cached(LONG[:800], model=make_model("b")) == 0
    assert store.open_agent("s").number == 0


# --- jobs about an agent's memory ---


def test_info_changes_nothing_and_knows_the_versions_behind_the_newest(store: CacheStorePort) -> None:
    nothing = run_job(store, "info")
    assert (nothing.exists, nothing.version) == (False, 0)
    agent = AgentOf(store)
    agent.say(LONG[:300])
    agent.say(LONG[:600])
    AgentOf(store, "other").say((*LONG[:256], *ids(300, seed=5)))
    info = run_job(store, "info")
    assert (info.exists, info.version, info.tokens, info.messages, info.cached_tokens) == (True, 2, 600, 1, 600)
    assert (info.state, info.problem) == ("ok", None)
    assert info.own_bytes > 0 < info.block_bytes
    assert [(x.version, x.tokens, x.job_id) for x in info.versions] == [(1, 300, "job-1")]
    lose_a_turn(store)
    unsaved = run_job(store, "info")
    assert (unsaved.state, unsaved.problem) == ("unsaved", "its last turn was not saved")


def test_a_rollback_is_a_new_version_with_an_earlier_conversation(store: CacheStorePort) -> None:
    agent = AgentOf(store)
    agent.say(LONG[:600])
    agent.say(LONG[:1000])
    before = agent.open().transcript
    agent.say(ids(50, seed=3))
    back = run_job(store, "rollback")
    assert (back.version, back.to_version, back.from_version, back.tokens) == (4, 2, 3, 1000)
    assert (agent.open().number, agent.open().transcript) == (4, before)
    assert agent.cached((*LONG[:1000], 7)) == 768
    assert run_job(store, "rollback", version=1).tokens == 600
    for version in (6, 9):
        with pytest.raises(AgentNotFound, match=f"no version {version}"):
            run_job(store, "rollback", version=version)
    with pytest.raises(AgentNotFound, match="no agent 'nobody'"):
        run_job(store, "rollback", "nobody")


@pytest.mark.parametrize("kind", SNAPSHOT_SPECS)
def test_a_rollback_never_gives_another_versions_snapshot(store: CacheStorePort, kind: str) -> None:
    agent = AgentOf(store, model=make_model(kind, spec=SNAPSHOT_SPECS[kind]))
    agent.say(LONG[:300], LONG[300:310])
    agent.say(LONG[:600], LONG[600:610])
    run_job(store, "rollback")
    agent.cached((*LONG[:310], 1))  # `restore` compares what it gets with what it should be
    assert agent.say(LONG[:400]) == 4
    assert agent.cached((*LONG[:400], 1)) == 400


def test_a_fork_has_its_own_future_and_no_other_deliveries(store: CacheStorePort) -> None:
    agent, fork = AgentOf(store), AgentOf(store, "fork")
    turn = agent.turn(LONG[:700])
    store.save(turn)
    made = run_job(store, "fork", target="fork")
    assert (made.version, made.from_version, made.tokens) == (1, 1, 700)
    assert (fork.open().number, fork.cached((*LONG[:700], 1))) == (1, 700)
    assert store.answer("agent", turn.delivery) is not None
    assert store.answer("fork", turn.delivery) is None
    fork.say(LONG[:800])
    agent.say(LONG[:750])
    assert (fork.tokens(), agent.tokens()) == (LONG[:800], LONG[:750])
    for target in ("fork", "agent"):
        with pytest.raises(AgentExists):
            run_job(store, "fork", target=target)
    with pytest.raises(AgentNotFound):
        run_job(store, "fork", "nobody", target="other")
    lose_a_turn(store)
    with pytest.raises(AgentTranscriptUnreadable):
        run_job(store, "fork", target="other")


def test_a_fork_and_the_first_turn_of_its_target_do_not_overwrite_each_other(store: CacheStorePort) -> None:
    agent, target = AgentOf(store), AgentOf(store, "target")
    agent.say(LONG[:10])
    in_flight = target.turn(ids(5, seed=9))
    run_job(store, "fork", target="target")
    assert saved_late(store, in_flight) is None
    assert target.tokens() == LONG[:10]


def test_a_forgotten_agent_leaves_only_the_blocks_of_others(store: CacheStorePort) -> None:
    agent, other = AgentOf(store), AgentOf(store, "other")
    agent.say(LONG[:600])
    agent.say((*LONG[:300], *ids(500, seed=4)))  # the blocks of its older version are its own too
    other.say((*LONG[:300], *ids(300, seed=5)))
    gone = run_job(store, "forget")
    assert (gone.existed, gone.version, gone.blocks, gone.shared_blocks) == (True, 2, 3, 1)
    assert (agent.open().known_number, agent.open().transcript) == (0, None)
    assert other.cached((*other.tokens(), 1)) == 600
    assert agent.cached(LONG[:600]) == 256
    assert agent.say(LONG[:20]) == agent.open().number
    assert run_job(store, "forget", "nobody").existed is False


def test_a_turn_that_was_restored_from_blocks_that_have_gone_meanwhile_brings_them_back(store: CacheStorePort) -> None:
    agent, other = AgentOf(store), AgentOf(store, "other")
    agent.say(LONG[:600])
    turn = other.turn(LONG[:700])
    gone = run_job(store, "forget")
    assert (gone.blocks, gone.shared_blocks) == (2, 0)
    store.save(turn)
    assert other.cached((*LONG[:700], 1)) == 700


@pytest.mark.parametrize(
    ("action", "fields"), [("forget", {}), ("fork", {"target": "fork"}), ("rollback", {"version": 1})]
)
def test_a_second_delivery_is_answered_and_changes_nothing(
    store: CacheStorePort, action: str, fields: dict[str, Any]
) -> None:
    agent, by, jobs = AgentOf(store), delivery(), store.agent_jobs
    agent.say(LONG[:300])
    agent.say(LONG[:600])
    request = ask(action, **fields)
    assert jobs.answer(request, by) is None
    first = jobs.run(request, by)
    agent.say(ids(30, seed=6))
    number = agent.open().number
    assert jobs.answer(request, by) == first
    assert jobs.answer(request, delivery()) is None
    assert (agent.open().number, agent.tokens()) == (number, ids(30, seed=6))
    store.ended(request.changed_agent, by, remember_s=3600)
    assert jobs.answer(request, by) == first


@pytest.mark.parametrize("action", ["forget", "fork", "rollback"])
def test_an_agent_that_went_on_meanwhile_is_left_as_it_is(store: CacheStorePort, action: str) -> None:
    agent = AgentOf(store)
    agent.say(LONG[:10])
    agent.say(LONG[:20])
    fields = {"target": "new"} if action == "fork" else {}
    with pytest.raises(AgentVersionConflict, match="is at version 2, not 1"):
        run_job(store, action, expect_version=1, **fields)
    assert (agent.open().number, agent.tokens()) == (2, LONG[:20])
    run_job(store, action, expect_version=2, **fields)
