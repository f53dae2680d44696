"""Models with window or recurrent layers: they resume exactly where a snapshot was taken, or not at all."""

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.worker.memory.agents import (
    HYBRID,
    SNAPSHOT_SPECS,
    Agent,
    cache_of,
    cut,
    files_below,
    ids,
    make_model,
    make_transcript,
    make_turn,
    only,
    open_store,
    problems_of,
    reopen,
    snapshots_of,
)
from tests.worker.memory.test_damage import DAMAGES

from stoker_worker.memory.blocks import BlockChain
from stoker_worker.ports import SequenceCache
from stoker_worker.ports.memory import common_length

LONG = ids(1000)
ANSWER = ids(60, seed=1)


@pytest.fixture(params=SNAPSHOT_SPECS)
def agent(request: pytest.FixtureRequest, tmp_path: Path) -> Agent:
    """An agent of each kind of model, that has yet to take its first turn."""
    return Agent(open_store(tmp_path), model=make_model(request.param, spec=SNAPSHOT_SPECS[request.param]))


@pytest.fixture
def hybrid(tmp_path: Path) -> Agent:
    """An agent with 760 tokens: two blocks and a tail, and snapshots after 699 and 760 tokens."""
    agent = Agent(open_store(tmp_path), model=HYBRID)
    agent.say(LONG[:700], ANSWER)
    return agent


HISTORY = (*LONG[:700], *ANSWER)
"""What `hybrid` has said."""


def pieces_in(folder: Path) -> list[str]:
    """Without the agent's part of the name."""
    return [path.name.partition("-")[2] for path in files_below(folder / "pieces")]


def test_a_version_has_files_of_its_own_and_the_previous_ones_are_removed(agent: Agent, tmp_path: Path) -> None:
    for version, length in enumerate((10, 300, 320), start=1):
        agent.say(LONG[:length], (1, 2))
        assert pieces_in(tmp_path) == [f"{version}-snapshot-{i}.safetensors" for i in (0, 1)]
    agent.say(LONG[:1])  # nothing is before the only token: one snapshot
    assert pieces_in(tmp_path) == ["4-snapshot-0.safetensors"]
    if not agent.model.spec.full_layers:
        assert all("-checkpoint" in path.name for path in files_below(tmp_path / "blocks"))


def test_a_turn_without_cache_drops_the_snapshots_and_the_next_turn_recovers(hybrid: Agent) -> None:
    hybrid.store.save(make_turn(hybrid, hybrid.open(), make_transcript((*HISTORY, 5)), None))
    assert pieces_in(hybrid.store.parts.path) == []
    assert hybrid.open().cache is not None  # the blocks serve on
    restored = hybrid.restore((*HISTORY, 5, 6))
    assert (restored.prefix, restored.miss_reason) == (None, None)
    hybrid.say((*HISTORY, 5, 6))
    assert hybrid.cached((*HISTORY, 5, 6, 7)) == 762


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(SNAPSHOT_SPECS)),
    st.lists(st.tuples(st.integers(0, 700), st.integers(1, 400), st.integers(0, 60)), min_size=1, max_size=5),
)
def test_any_run_of_turns_reuses_up_to_the_last_snapshot_on_the_way(
    tmp_path: Path, name: str, turns: list[tuple[int, int, int]]
) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    agent = Agent(open_store(folder), model=make_model(name, spec=SNAPSHOT_SPECS[name]))
    stands: list[int] = []
    checkpoints: dict[tuple[int, ...], tuple[int, ...]] = {}  # by the blocks before it: all tokens before it
    for seed, (keep, new, answer) in enumerate(turns):
        history = agent.tokens()
        kept = min(keep, len(history))
        prompt = (*history[:keep], *(50_000 + seed for _ in range(new)))
        own = [n for n in stands if n <= min(kept, len(prompt) - 1)]
        turn = agent.turn(prompt, ids(answer, seed=seed))
        shared = [len(all_) for all_ in checkpoints.values() if prompt[: len(all_)] == all_ != prompt]
        assert agent.cached(prompt) == max((*own, *shared), default=0)
        agent.store.save(turn)
        assert turn.cache is not None
        checkpoints |= {prompt[: one.n_tokens]: prompt[: one.n_tokens] for one in turn.cache.checkpoints}
        common = common_length(history, agent.tokens())
        for n in [n for n in stands if 256 <= n <= common][-1:]:
            checkpoints.setdefault(history[: n // 256 * 256], history[:n])
        stands = [len(prompt) - 1, len(prompt) + answer]
        agent.store = reopen(agent.store, folder)
        assert agent.tokens() == (*prompt, *ids(answer, seed=seed))
    assert agent.store.misses == {}
    assert problems_of(agent.store) == []
    agent.store.close()


# --- what does not belong to the transcript or to the model ---


def test_snapshots_that_are_not_the_transcripts_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path), model=HYBRID)
    layers = cache_of(LONG[:300], agent.model)

    def refuse(snapshots: object, match: str, stop: int = 300) -> None:
        cache = SequenceCache(stop, cut(layers, 0, stop), snapshots)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=match):
            agent.store.save(make_turn(agent, agent.open(), make_transcript(LONG[:300]), cache))
        assert files_below(tmp_path / "pieces") == files_below(tmp_path / "blocks") == []
        assert agent.open().number == 0

    good = snapshots_of(LONG, [20, 30, 40], agent.model)
    refuse(good, "at most 2")
    refuse(good[1::-1], "in order")
    refuse(good[1:2], "snapshots after", stop=20)
    refuse([dataclasses.replace(good[0], n_tokens=21)], "shapes and dtypes")
    keys, values = good[0].states[0]
    for wrong in ((keys.astype(np.float32), values), (keys,)):
        refuse([dataclasses.replace(good[0], states=(wrong, good[0].states[1]))], "shapes and dtypes")


# --- damage ---


def exchange(path: Path) -> None:
    """Put a whole file of the same shape in its place: the same agent's snapshot of another conversation."""
    folder = path.parents[3] / "elsewhere"
    other = Agent(open_store(folder), model=HYBRID)
    other.say((*ids(700, seed=9),), ANSWER)
    shutil.copy(next(folder.rglob(path.name)), path)
    other.store.close()
    shutil.rmtree(folder)


SNAPSHOT_DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    **{name: (damage, "snapshot_corrupt") for name, damage in DAMAGES.items()},
    "removed": (Path.unlink, "snapshot_missing"),
    "another's": (exchange, "snapshot_foreign"),
}


@pytest.mark.parametrize("how", SNAPSHOT_DAMAGES)
def test_a_damaged_snapshot_is_a_named_miss_and_the_one_before_it_serves(
    hybrid: Agent, tmp_path: Path, how: str
) -> None:
    damage, reason = SNAPSHOT_DAMAGES[how]
    damage(only(tmp_path, "*-1-snapshot-1.*"))
    restored = hybrid.restore((*HISTORY, 1))
    assert restored.prefix is not None
    assert (restored.prefix.n_tokens, restored.miss_reason) == (699, reason)
    assert hybrid.store.misses == {reason: 1}
    damage(only(tmp_path, "*-1-snapshot-0.*"))
    restored = hybrid.restore((*HISTORY, 1))
    assert (restored.prefix, restored.source) == (None, "none")
    assert restored.miss_reason == "snapshot_missing"  # what is damaged is removed when it is met
    hybrid.say((*HISTORY, 1))
    assert hybrid.cached((*HISTORY, 1, 2)) == 761
    assert problems_of(hybrid.store) == []


def test_a_snapshot_in_the_place_of_the_other_is_foreign(hybrid: Agent, tmp_path: Path) -> None:
    shutil.copy(only(tmp_path, "*-1-snapshot-0.*"), only(tmp_path, "*-1-snapshot-1.*"))
    assert hybrid.restore((*HISTORY, 1)).miss_reason == "snapshot_foreign"
    assert hybrid.cached((*HISTORY, 1)) == 699


@pytest.mark.parametrize(("version", "left"), [(1, 699), (2, 0)])
def test_a_snapshot_needs_all_the_kv_before_it(tmp_path: Path, version: int, left: int) -> None:
    agent = Agent(open_store(tmp_path), model=HYBRID)
    # Snapshots after 699 and 900 tokens. The block before 768 is damaged first, then the one before 512.
    layers, snapshots = cache_of(LONG[:900], agent.model), snapshots_of(LONG, [699, 900], agent.model)
    agent.store.save(make_turn(agent, agent.open(), make_transcript(LONG[:900]), SequenceCache(900, layers, snapshots)))
    assert agent.cached((*LONG[:900], 1)) == 900
    blocks = BlockChain(HYBRID.fingerprint, None, LONG).paths(agent.store.parts.blocks.path_of)
    for index in (2, 1)[:version]:
        DAMAGES["data"](blocks[index])
    restored = agent.restore((*LONG[:900], 1))
    assert (restored.prefix.n_tokens if restored.prefix else 0) == left
    assert restored.miss_reason == "block_corrupt"
