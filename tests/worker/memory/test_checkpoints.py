"""Checkpoints: prompts resume at the exact end of a known system prompt, and those of models with window or recurrent
layers at other places that prompts have in common, whoever computed them."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.worker.memory.agents import (
    HYBRID,
    MODEL,
    SNAPSHOT_SPECS,
    SPEC,
    Agent,
    FastDisk,
    call_of_session,
    disk_bytes,
    files_below,
    ids,
    make_model,
    open_store,
    problems_of,
    rows,
    run_job,
    sequence_cache,
    walk,
)
from tests.worker.memory.test_damage import DAMAGES

from stoker_worker.memory.admin.backup import back_up, restore
from stoker_worker.memory.blocks import BlockChain
from stoker_worker.memory.checkpoints import LEAST_APART, MOST_REGULAR, checkpoint_places
from stoker_worker.memory.eviction import CHECKPOINT_SHARE
from stoker_worker.memory.lookup import AgentBlocks, BlockLookup, find_prefix
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import LoadedModel
from stoker_worker.ports.cache_spec import ArraySpec, LayerKind, LayerSpec, ModelCacheSpec

KINDS = {"plain": SPEC, **SNAPSHOT_SPECS}
SYSTEM = ids(600, seed=100)
N = 512
"""Tokens of it in full blocks."""


def prompt(seed: int, n_tokens: int = 100) -> tuple[int, ...]:
    return (*SYSTEM, *ids(n_tokens, seed=seed))


Team = Callable[..., Agent]


@pytest.fixture(params=SNAPSHOT_SPECS)
def team(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Team]:
    """Agents of one store, for each kind of model that resumes only where a snapshot was taken."""
    with closing(open_store(tmp_path)) as store:
        yield team_of(store, request.param)


@pytest.fixture(params=KINDS)
def any_team(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Team]:
    """The same for every kind of model."""
    with closing(open_store(tmp_path)) as store:
        yield team_of(store, request.param)


def team_of(store: AgentCacheStore, kind: str) -> Team:
    model = make_model(kind, spec=KINDS[kind])
    return lambda name, **about: Agent(store, name, **{"model": model, **about})


def checkpoint_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*-checkpoint.*"))


def ticks(store: AgentCacheStore) -> None:
    store._notes.write()


def left_by(agent: Agent, prompt: tuple[int, ...]) -> list[int]:
    """Take a turn; returns the tokens after which it has left checkpoints."""
    turn = agent.turn(prompt)
    agent.store.save(turn)
    assert turn.cache is not None
    return [one.n_tokens for one in turn.cache.checkpoints]


def test_a_use_counts_once_though_two_threads_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(open_store(tmp_path)) as store:
        team = team_of(store, "plain")
        team("first", system_tokens=600).say(prompt(1))
        assert team("second", system_tokens=600).cached(prompt(2)) == 600
        commit, other = store.parts.database.commit, threading.Thread(target=ticks, args=(store,))

        def commit_at_last(run: Any) -> Any:
            monkeypatch.undo()
            other.start()
            other.join(0.2)  # until it is done, or waits
            return commit(run)

        monkeypatch.setattr(store.parts.database, "commit", commit_at_last)
        ticks(store)
        other.join()
        assert rows(store, "SELECT checkpoint_uses FROM blocks WHERE checkpoint_bytes > 0") == [(1,)]


def test_the_second_agent_goes_on_exactly_where_the_first_ones_system_prompt_ended(
    any_team: Team, tmp_path: Path
) -> None:
    first = any_team("first", system_tokens=600)
    assert left_by(first, prompt(1)) == [600]
    first.say((*prompt(1), 1))
    assert len(checkpoint_files(tmp_path)) == 1
    first.store.close()
    with closing(open_store(tmp_path)) as store:
        second, stateless = (Agent(store, name, first.model, system_tokens=600) for name in ("second", "stateless"))
        restored = second.restore(prompt(2))
        assert restored.prefix is not None
        assert (restored.prefix.n_tokens, restored.source, restored.miss_reason) == (600, "disk", None)
        assert left_by(second, prompt(2)) == []
        assert stateless.cached((*SYSTEM, 1)) == 600
        assert Agent(store, "other", first.model, "theirs").cached(prompt(2)) == 0
        assert store.misses == {}
        ticks(store)
        assert store.budget.total_bytes == disk_bytes(tmp_path)
        assert problems_of(store) == []


def test_a_prompt_that_leaves_within_the_end_of_a_system_prompt_does_not_use_it(any_team: Team, tmp_path: Path) -> None:
    any_team("first", system_tokens=600).say(prompt(1))
    other = (*SYSTEM[:590], *ids(100, seed=3))
    is_plain = not any_team("x").model.spec.snapshot_layers
    assert any_team("other").cached(other) == (N if is_plain else 0)
    # A model that cannot be cut gets a checkpoint that both may use.
    any_team("other", system_tokens=605).say(other)
    assert [any_team("x").cached(one) for one in (other, prompt(2))] == ([605, N] if is_plain else [N, N])
    any_team("second", system_tokens=600).say(prompt(2))
    assert [any_team("x").cached(one) for one in (other, prompt(3))] == ([N, 600] if is_plain else [N, N])
    assert left_by(any_team("third", system_tokens=600), prompt(3)) == []  # its state would be thrown away
    assert len(checkpoint_files(tmp_path)) == 1
    assert problems_of(any_team("x").store) == []


def test_the_third_agent_goes_on_where_the_first_two_parted(team: Team, tmp_path: Path) -> None:
    assert left_by(team("first"), prompt(1)) == []
    assert left_by(team("second"), prompt(2)) == [N]
    third = team("third").restore(prompt(3))
    assert third.prefix is not None
    assert (third.prefix.n_tokens, third.source, third.miss_reason) == (N, "disk", None)
    assert left_by(team("third"), prompt(3)) == []
    assert team("third").cached((*prompt(3), 1, 2)) == 700  # its own snapshot is later
    assert len(checkpoint_files(tmp_path)) == 1


def test_the_second_agent_goes_on_near_the_end_of_a_first_prompt_of_which_nothing_is_known(team: Team) -> None:
    system = ids(2000)
    assert 1792 in left_by(team("first", system_tokens=25), (*system, *ids(60, seed=1)))
    assert team("second").cached((*system, *ids(60, seed=2))) == 1792


def test_an_edited_prompt_goes_on_from_the_last_checkpoint_before_the_edit(team: Team) -> None:
    agent, said = team("a"), ids(4 * 1024 + 10)
    assert left_by(agent, said)[-3:] == [3072, 3584, 3840]
    edited = (*said[:3300], 7, *said[3301:])
    assert 4096 in left_by(agent, edited)
    assert agent.cached((*said[:3300], 8, *said[3301:])) == 3072
    other = Agent(agent.store, "b", agent.model)
    assert other.cached(edited) == 4096
    assert other.cached((*said[:3600], 8)) == 3584
    assert problems_of(agent.store) == []


def test_an_edited_conversation_goes_on_at_the_end_of_the_turn_before_the_edit(team: Team, tmp_path: Path) -> None:
    agent, ends, said = team("a"), list[int](), ids(0)
    for seed in range(6):
        said = (*said, *ids(400, seed=seed), *ids(20, seed=50 + seed))
        agent.say(said[:-20], said[-20:])
        ends.append(len(said))
    n_files = len(files_below(tmp_path))
    for seed, turn in enumerate((4, 2, 2, 1)):
        edited = (*said[: ends[turn]], *ids(400, seed=100 + seed), *said[ends[turn] + 400 :])
        assert agent.cached(edited) == ends[turn]
        agent.say(edited)
    assert agent.cached((*said[: ends[1] - 1], 1)) == ends[0]
    assert len(files_below(tmp_path)) < 2 * n_files
    ticks(agent.store)
    assert agent.store.misses == {}
    assert agent.store.budget.total_bytes == disk_bytes(tmp_path)
    assert problems_of(agent.store) == []


def test_the_end_of_a_turn_serves_other_agents_that_go_on_alike(team: Team) -> None:
    agent, said = team("a"), ids(2100)
    for n in (700, 1000, 1300):
        agent.say(said[:n])
    assert team("b").cached((*said[:1100], 1)) == 1000
    assert team("b").cached((*said[:1010], 1)) == 1000


@pytest.mark.parametrize("n_system", [0, 600])
def test_jobs_without_an_agent_and_sessions_have_checkpoints_too(any_team: Team, n_system: int) -> None:
    store, model = any_team("x").store, any_team("x").model

    def job(seed: int) -> int:
        restored = store.restore(prompt(seed), agent=None, model=model, salt=None, system_tokens=n_system)
        if restored.to_share:
            cache = sequence_cache(prompt(seed), [], restored.checkpoints_at, model)
            store.save_blocks(prompt(seed)[: restored.to_share], cache, model=model, salt=None)
        return restored.prefix.n_tokens if restored.prefix else 0

    assert [job(seed) for seed in range(3)] == [0, 0, n_system or N]
    for path in checkpoint_files(store.parts.path):
        path.unlink()
    assert [job(seed) for seed in range(3, 5)] == [0 if model.spec.snapshot_layers else N, n_system or N]
    assert call_of_session(store, prompt(5), model=model)[0] == (n_system or N)
    assert problems_of(store) == []


def test_a_rollback_leaves_what_the_checkpoints_before_it_serve(team: Team) -> None:
    agent = team("a")
    agent.say(ids(2100))
    agent.say((*ids(2100), *ids(100, seed=1)))
    run_job(agent.store, "rollback", "a")
    assert agent.cached((*ids(2100), 5)) == 2100


def test_forgetting_the_last_agent_of_a_block_removes_its_checkpoint(any_team: Team, tmp_path: Path) -> None:
    store, model = any_team("x").store, any_team("x").model
    n_tokens = 300 if model.spec.full_layers else 100  # the second one has them in a block or in a piece
    for name in ("first", "second"):
        any_team(name, system_tokens=600).say(prompt(ord(name[0]), n_tokens))
    for name, n_left in (("first", 1), ("second", 0)):
        run_job(store, "forget", name)
        assert len(checkpoint_files(tmp_path)) == n_left
    assert files_below(tmp_path / "blocks") == files_below(tmp_path / "pieces") == []
    assert problems_of(store) == []


def test_no_tokens_of_a_forgotten_agent_stay_beside_a_block_that_others_share(any_team: Team, tmp_path: Path) -> None:
    any_team("other").say((*SYSTEM[:N], *ids(50, seed=9)))
    agent = any_team("forgotten", system_tokens=600)
    agent.say(prompt(1))
    run_job(agent.store, "forget", agent.name)
    assert checkpoint_files(tmp_path) == []
    assert any_team("other").cached((*SYSTEM[:N], *ids(50, seed=9), 1)) == 562
    ticks(agent.store)
    assert agent.store.budget.total_bytes == disk_bytes(tmp_path)
    assert problems_of(agent.store) == []


@pytest.mark.parametrize("model", [MODEL, HYBRID], ids=["plain", "hybrid"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_a_miss_with_a_name_and_is_written_again(
    tmp_path: Path, damage: str, model: LoadedModel
) -> None:
    store = open_store(tmp_path)
    Agent(store, "first", model, system_tokens=600).say(prompt(1))
    DAMAGES[damage](*checkpoint_files(tmp_path))
    second = Agent(store, "second", model, system_tokens=600)
    restored = second.restore(prompt(2))
    assert (restored.prefix.n_tokens if restored.prefix else 0) == (N if model is MODEL else 0)
    assert (restored.miss_reason or "none").split("_")[0] in ("checkpoint", "none")
    second.say(prompt(2))
    assert Agent(store, "third", model).cached(prompt(3)) == 600
    ticks(store)
    assert problems_of(store) == []


def test_a_checkpoint_that_is_replaced_during_a_lookup_stays_and_a_damaged_block_is_named_once(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    path_of, chain = store.parts.blocks.path_of, BlockChain(MODEL.fingerprint, None, prompt(2))
    Agent(store, "first", MODEL, system_tokens=600).say(prompt(1))
    (path,) = checkpoint_files(tmp_path)
    before = path.read_bytes()
    Agent(store, "other", MODEL, system_tokens=605).say((*SYSTEM[:590], *ids(100, seed=3)))
    after = path.read_bytes()
    path.write_bytes(before)
    lookup = BlockLookup(chain, len(chain.token_ids) - 1, SPEC, AgentBlocks(), path_of, 1)

    def replacing() -> None:
        path.write_bytes(after)

    found = find_prefix(replace(lookup, before_each=replacing))
    assert (found.cache.n_tokens, found.faults) == (N, ())
    path.write_bytes(before)
    DAMAGES["data"](chain.paths(path_of)[1])
    found = find_prefix(lookup)
    assert (found.cache.n_tokens, [one.kind for one in found.faults]) == (256, ["block"])


def test_the_index_of_checkpoints_is_made_anew_from_conversations(any_team: Team, tmp_path: Path) -> None:
    agent = any_team("first", system_tokens=600)
    agent.say(prompt(1))
    back_up(agent.store.parts, tmp_path / "copy")
    agent.store.close()
    restore(tmp_path, tmp_path / "copy")
    with closing(open_store(tmp_path)) as store:
        known = rows(store, "SELECT checkpoint_saves FROM blocks WHERE checkpoint_bytes > 0")
        assert known == [(N if agent.model.spec.snapshot_layers else 256,)]
        assert Agent(store, "second", agent.model).cached(prompt(2)) == 600
        assert problems_of(store) == []


def test_a_lost_checkpoint_leaves_the_index_and_one_without_a_row_comes_into_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    Agent(store, "first", HYBRID, system_tokens=600).say(prompt(1))
    (path,) = checkpoint_files(tmp_path)
    aside = path.rename(tmp_path / "aside")
    for file, n_known in ((None, 0), (aside, 1)):
        if file is not None:
            file.rename(path)
        walk(store)
        ticks(store)
        assert rows(store, "SELECT count(*) FROM blocks WHERE checkpoint_bytes > 0") == [(n_known,)]
    assert store.budget.total_bytes == disk_bytes(tmp_path)


# --- how many, and which go ---


def test_regular_checkpoints_are_few_and_take_half_of_the_bytes_of_the_blocks_at_most() -> None:
    state = LayerSpec(LayerKind.RECURRENT, arrays=(ArraySpec((1 << 20,), "float32"),))
    full = LayerSpec(LayerKind.FULL, n_kv_heads=2, key_dim=64, value_dim=64)
    for spec in (ModelCacheSpec((state, full), "float32"), *SNAPSHOT_SPECS.values()):
        for n_prompt in (1, 255, 1024, 1025, 10_000, 131_073):
            unknown = checkpoint_places(spec, n_prompt=n_prompt, n_restored=0)
            places = checkpoint_places(spec, n_prompt=n_prompt, n_restored=1)
            assert len(unknown) <= 1 + len(places) <= MOST_REGULAR
            assert unknown[-1:] == ((n_prompt // 256 * 256 - 256,) if n_prompt > 1280 else ())
            assert all(n % (LEAST_APART * 256) == 0 and n < n_prompt for n in places)
            if spec.full_layers:
                assert 2 * len(places) * spec.snapshot_bytes(n_prompt) <= n_prompt * spec.bytes_per_token
    ends = checkpoint_places(HYBRID.spec, n_prompt=1000, n_restored=300, ends=(999, 300, 0))
    assert ends == (768,)  # nothing can be taken before what was restored
    those = partial(checkpoint_places, n_prompt=1000, ends=(700,))
    assert those(SPEC, n_restored=0) == those(SPEC, n_restored=600, system_tokens=600) == ()
    assert those(SPEC, n_restored=512, system_tokens=600) == (600,)
    assert those(HYBRID.spec, n_restored=0, system_tokens=600) == (512, 600)
    assert those(HYBRID.spec, n_restored=512, system_tokens=600) == ()
    for spec in (SPEC, HYBRID.spec):
        assert checkpoint_places(spec, n_prompt=1000, n_restored=0, system_tokens=255) == ()
    assert checkpoint_places(SPEC, n_prompt=1000, n_restored=0, system_tokens=512) == ()


LARGE = make_model(
    "large", spec=replace(HYBRID.spec, layers=(*HYBRID.spec.layers, replace(HYBRID.spec.layers[0], key_dim=256)))
)
"""Its states are as large as three blocks."""

AGENTS = int(os.environ.get("AGENTS", "40"))


@pytest.mark.parametrize("model", [LARGE, MODEL], ids=["large", "plain"])
def test_checkpoints_of_many_agents_take_their_share_and_the_one_that_is_used_stays(
    tmp_path: Path, model: LoadedModel
) -> None:
    store = AgentCacheStore(tmp_path, files=FastDisk(), max_bytes=60_000 * AGENTS)
    for seed in range(AGENTS):
        member = Agent(store, f"member-{seed}", model, system_tokens=600)
        restored = store.restore(prompt(seed), agent=member.open(), model=model, salt=None, system_tokens=600)
        assert (restored.prefix.n_tokens if restored.prefix else 0) == (600 if seed else 0)
        member.say(prompt(seed, 1))
        Agent(store, f"loner-{seed}", model, system_tokens=600).say(ids(620, seed=1000 + seed))
        store._notes.write()
    store.budget.make_room()
    sql = "SELECT sum(checkpoint_bytes), count(*) FROM blocks WHERE checkpoint_bytes > 0"
    ((n_bytes, n_files),) = rows(store, sql)
    assert n_files == len(checkpoint_files(tmp_path)) > 1
    assert n_bytes <= CHECKPOINT_SHARE * store.budget.max_bytes
    assert store.budget.total_bytes == disk_bytes(tmp_path) <= store.budget.max_bytes
    assert problems_of(store) == []
