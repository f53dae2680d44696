"""Caches in RAM: the same as from disk, within a limit, and never a wrong one."""

from pathlib import Path

import numpy as np
import pytest
from tests.worker.memory.agents import (
    MODEL,
    SNAPSHOT_SPECS,
    SPEC,
    Agent,
    ArrayRoom,
    FastDisk,
    ids,
    make_model,
    with_rooms,
)

from stoker_worker.memory.blocks import BlockChain, CachePiece
from stoker_worker.memory.ram_cache import RamCacheEntry
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import SequenceCache

LONG = ids(1500)
PLENTY = 1 << 30
TOKEN_BYTES = SPEC.bytes_per_token


def open_store(folder: Path, memory_max_bytes: int = PLENTY) -> AgentCacheStore:
    return AgentCacheStore(folder, files=FastDisk(), memory_max_bytes=memory_max_bytes)


def source_of(agent: Agent, prompt: tuple[int, ...]) -> tuple[str, int]:
    restored = agent.restore(prompt)
    return restored.source, restored.prefix.n_tokens if restored.prefix else 0


def test_a_cache_read_from_disk_stays_in_ram_without_a_copy(tmp_path: Path) -> None:
    first_store = open_store(tmp_path)
    Agent(first_store).say(LONG[:600])
    first_store.close()
    agent = Agent(open_store(tmp_path))
    first = agent.restore((*LONG[:600], 1))
    second = agent.restore((*LONG[:600], 1))
    assert (first.source, second.source) == ("disk", "memory")
    assert first.prefix is not None
    assert second.prefix is not None
    for ours, theirs in zip(first.prefix.layers, second.prefix.layers, strict=True):
        assert all(np.shares_memory(a, b) for a, b in zip(ours, theirs, strict=True))
    assert agent.store.ram_cache.n_bytes == 600 * TOKEN_BYTES


def test_memory_stays_within_its_limit_and_the_agent_used_last_stays(tmp_path: Path) -> None:
    store = open_store(tmp_path, 1000 * TOKEN_BYTES)
    agents = [Agent(store, name) for name in "abc"]
    for agent in agents[:2]:
        agent.say(ids(400, seed=ord(agent.name)))
    agents[0].restore(ids(400, seed=ord("a")))
    agents[2].say(ids(400, seed=ord("c")))
    assert store.ram_cache.n_bytes <= store.ram_cache.max_bytes
    assert [agent.name in store.ram_cache for agent in agents] == [True, False, True]
    Agent(store, "large").say(ids(1100, seed=5))
    assert [agent.name in store.ram_cache for agent in agents] == [True, False, True]
    assert "large" not in store.ram_cache


def test_an_agent_with_work_stays_in_ram(tmp_path: Path) -> None:
    store = open_store(tmp_path, 1100 * TOKEN_BYTES)
    store.pin(frozenset("a"), frozenset("b"))
    for name in "abc":
        Agent(store, name).say(ids(400, seed=ord(name)))
    assert [name in store.ram_cache for name in "abc"] == [True, True, False]
    store.pin(frozenset(), frozenset("b"))
    assert source_of(Agent(store, "c"), ids(400, seed=ord("c"))) == ("disk", 399)
    assert [name in store.ram_cache for name in "abc"] == [False, True, True]


def test_every_byte_kept_alive_is_counted() -> None:
    base = np.zeros((2, 1000, 4), np.float32)
    piece = (base[:, :100], base[:, 100:200])
    layers = (piece, (np.zeros((2, 100, 4), np.float32), piece[0]))
    cache = RamCacheEntry(1, BlockChain("m", None, tuple(range(100))), SequenceCache(100, layers))
    assert cache.n_bytes == base.nbytes + 2 * 100 * 4 * 4


def test_a_prompt_that_turns_away_early_and_is_never_saved_leaves_the_longer_cache(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    agent.say(LONG[:600])
    assert source_of(agent, (*LONG[:100], 1, 2)) == ("memory", 100)
    assert source_of(agent, (*LONG[:600], 1)) == ("memory", 600)


# --- an engine that restores into memory of its own ---


def test_a_prefix_is_restored_into_the_engines_memory_from_disk_and_from_ram(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path), model=with_rooms(MODEL))
    agent.say(LONG[:600])
    for source in ("memory", "disk"):
        for prompt in ((*LONG[:600], 1), (*LONG[:300], 1, 2), LONG[:256]):
            restored = agent.restore(prompt)
            assert restored.source == source
            assert restored.prefix is not None
            assert isinstance(restored.prefix.room, ArrayRoom)
        agent.store.ram_cache.drop("agent")


def test_a_block_that_the_prompt_ends_in_is_read_straight_into_the_engines_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, because there is a place for it: nothing is read beside that memory and copied."""
    agent = Agent(open_store(tmp_path, 0), model=with_rooms(MODEL))
    agent.say(LONG[:600])
    monkeypatch.setattr(CachePiece, "unpack", None)
    prefix = agent.restore(LONG[:512]).prefix  # compares every byte
    assert prefix is not None
    assert prefix.n_tokens == 511


@pytest.mark.parametrize(("n_prompt", "n_room", "n_left"), [(500, 500, 40), (900, 256, 0)])
def test_the_engines_memory_has_room_for_the_prompt_and_its_answer_unless_most_of_it_is_new(
    tmp_path: Path, n_prompt: int, n_room: int, n_left: int
) -> None:
    """A job may wait for its place in the batch, and no budget counts its room until then."""
    store, model = open_store(tmp_path), with_rooms(MODEL)
    Agent(store, model=model).say(LONG[:300])
    for agent in (store.open_agent("agent"), None):
        prefix = store.restore(LONG[:n_prompt], agent=agent, model=model, salt=None, max_tokens=40).prefix
        assert prefix is not None
        assert isinstance(prefix.room, ArrayRoom)
        assert prefix.room.n_left == n_left
        assert n_room <= prefix.room.layers()[0][0].shape[1] < n_room + 64


def test_ram_never_keeps_the_memory_that_the_engine_goes_on_in(tmp_path: Path) -> None:
    """The engine writes and moves it; a prompt that is never saved leaves a copy for the next one."""
    store, model = open_store(tmp_path), with_rooms(MODEL)
    Agent(store, model=model).say(LONG[:600])
    prompt, version = (*LONG[:600], 1), store.open_agent("agent")
    for is_saved in (True, False):
        store.ram_cache.drop("agent")
        found = [store.restore(prompt, agent=version, model=model, salt=None, is_saved=is_saved) for _ in range(2)]
        assert [one.source for one in found] == ["disk", "disk" if is_saved else "memory"]
        for one in found:
            assert one.prefix is not None
            assert one.prefix.room is not None
            for array in (array for pair in one.prefix.room.layers() for array in pair):
                array[:] = 0
        assert Agent(store, model=model).restore(prompt).prefix is not None  # compares every byte


def test_snapshots_count_towards_the_limit(tmp_path: Path) -> None:
    model = make_model("states", spec=SNAPSHOT_SPECS["recurrent"])
    store = open_store(tmp_path)
    Agent(store, model=model).say(LONG[:300], (1,))
    assert store.ram_cache.n_bytes == 2 * model.spec.snapshot_bytes(300)
