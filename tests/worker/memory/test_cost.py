"""The cost of a turn, in bytes written and records read: its own tokens, however long the conversation is."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.worker.memory.agents import Agent, FastDisk, ids, make_model, make_turn, open_store, reopen

from stoker_worker.memory.files import Chunk
from stoker_worker.memory.recent_agents import RecentAgents
from stoker_worker.memory.record import AgentState
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import AgentVersion, Transcript
from stoker_worker.ports.cache_spec import ArraySpec, LayerKind, LayerSpec, ModelCacheSpec


class CountingDisk(FastDisk):
    """Counts the bytes it is given to write."""

    def __init__(self) -> None:
        self.n_bytes = 0

    def write(self, path: Path, chunks: Iterable[Chunk]) -> None:
        pieces = list(chunks)
        self.n_bytes += sum(memoryview(piece).nbytes for piece in pieces)
        super().write(path, pieces)


def bytes_of(disk: CountingDisk, agent: Agent, prompt: tuple[int, ...], answer: tuple[int, ...]) -> int:
    before = disk.n_bytes
    agent.say(prompt, answer)
    return disk.n_bytes - before


@pytest.mark.parametrize("stored", [4096, 4096 + 200, 4096 + 255])
def test_adding_64_tokens_to_4096_writes_64_tokens_and_at_most_a_block(tmp_path: Path, stored: int) -> None:
    spec = ModelCacheSpec((LayerSpec(LayerKind.FULL, 2, 32, 32),) * 4, "float32")
    disk = CountingDisk()
    agent = Agent(AgentCacheStore(tmp_path, files=disk), model=make_model(spec=spec))
    agent.say(ids(stored))
    written = bytes_of(disk, agent, ids(stored), ids(64, seed=1))
    assert written < 1.25 * (64 + 256) * spec.bytes_per_token


def test_a_hybrid_models_turn_writes_its_tokens_and_its_snapshots(tmp_path: Path) -> None:
    full, window = LayerSpec(LayerKind.FULL, 2, 32, 32), LayerSpec(LayerKind.WINDOW, 2, 32, 32, window_tokens=128)
    state = LayerSpec(LayerKind.RECURRENT, arrays=(ArraySpec((16, 64), "float32"),))
    spec = ModelCacheSpec((full, window, state) * 2, "float32")
    disk = CountingDisk()
    agent = Agent(AgentCacheStore(tmp_path, files=disk), model=make_model(spec=spec))
    agent.say(ids(4096 + 200))
    written = bytes_of(disk, agent, ids(4096 + 200), ids(64, seed=1))
    assert written < 1.25 * ((64 + 256) * spec.bytes_per_token + 2 * spec.snapshot_bytes(5000))


@pytest.mark.slow
def test_a_turns_record_does_not_grow_with_the_number_of_turns(tmp_path: Path) -> None:
    disk = CountingDisk()
    agent = Agent(AgentCacheStore(tmp_path, files=disk))
    shares = []
    for number in range(500):
        base = agent.open().transcript
        text = (base.text or "" if base else "") + "what is next? "
        transcript = Transcript((*(base.token_ids if base else ()), *ids(20, seed=number)), "tok", None, text, "eos")
        turn = make_turn(agent, number, transcript, None)
        before = disk.n_bytes
        agent.store.save(turn)
        shares.append(disk.n_bytes - before)
    assert max(shares[490:]) < 1.05 * max(shares[3:8])
    agent.store = reopen(agent.store, tmp_path)
    version = agent.open()
    assert version.transcript == transcript
    assert (version.number, len(version.results)) == (500, 500)


def test_a_shared_system_prompt_is_written_once(tmp_path: Path) -> None:
    disk = CountingDisk()
    store = AgentCacheStore(tmp_path, files=disk)
    system = ids(2048)
    first = bytes_of(disk, Agent(store, "first"), system, (1,))
    second = bytes_of(disk, Agent(store, "second"), system, (2,))
    assert second < first / 4


def test_only_recently_used_agents_are_held_in_memory() -> None:
    held = RecentAgents(max_record_bytes=100)
    blank = AgentState(AgentVersion("", 1, None), record_bytes=40)
    states = {
        name: dataclasses.replace(blank, version=dataclasses.replace(blank.version, agent_id=name)) for name in "abcd"
    }
    for name in "ab":
        held.put(states[name])
    assert held.get("a") is states["a"]
    held.put(states["c"])
    assert [held.get(name) is not None for name in "abc"] == [True, False, True]
    held.put(dataclasses.replace(states["d"], record_bytes=500))
    assert [held.get(name) is not None for name in "abcd"] == [False, False, False, True]
    held.put(states["d"])
    held.put(states["a"])
    held.drop("d")
    held.put(states["b"])
    assert [held.get(name) is not None for name in "abcd"] == [True, True, False, False]


def test_an_agent_dropped_from_memory_is_read_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store._recent = RecentAgents(1)
    agents = [Agent(store, name) for name in "abc"]
    for length in (100, 200):
        for agent in agents:
            agent.say(ids(length))
    for agent in agents:
        assert agent.tokens() == ids(200)
        assert agent.cached(ids(300)) == 200
