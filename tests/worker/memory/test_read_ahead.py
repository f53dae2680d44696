"""Reading ahead: the first jobs after a restart find their caches in RAM, within the limit, and never a wrong one."""

import dataclasses
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.wait import wait_for
from tests.worker.memory.agents import (
    MODEL,
    SNAPSHOT_SPECS,
    SPEC,
    Agent,
    FastDisk,
    files_below,
    ids,
    make_model,
    make_transcript,
    make_turn,
    only,
    with_rooms,
)

from stoker_worker.memory.lookup import BlockLookup
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import LoadedModel

pytestmark = pytest.mark.slow

Opened = Callable[..., AgentCacheStore]
LONG = ids(1500)
PLENTY = 1 << 30
ROOM = 430 * SPEC.bytes_per_token
"""For one agent of 400 tokens; a few of them for as many, and not for one more."""
TIMEOUT_S = 30.0
MODELS = {
    "full": MODEL,
    "q8": make_model("q", spec=dataclasses.replace(SPEC, store_dtype="q8")),
    **{name: make_model(name, spec=spec) for name, spec in SNAPSHOT_SPECS.items()},
}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Opens the store anew, as a worker that was restarted does."""
    stores: list[AgentCacheStore] = []

    def open_store(memory_max_bytes: int = PLENTY) -> AgentCacheStore:
        for store in stores:
            store.close()
        stores[:] = [AgentCacheStore(tmp_path / "store", files=FastDisk(), memory_max_bytes=memory_max_bytes)]
        return stores[0]

    yield open_store
    for store in stores:
        store.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def settle(store: AgentCacheStore) -> None:
    """Wait until there is nothing more to read."""
    ahead = store._read_ahead

    def is_settled() -> bool:
        with ahead._changed:
            known = ahead._tried | {name for name, size in ahead._sizes.items() if not size}
            is_idle = not ahead._fills and ahead._reading is None
            return is_idle and all(name in known or name in store.ram_cache for name in ahead._order)

    wait_for(is_settled, TIMEOUT_S)


def read(store: AgentCacheStore, order: Sequence[str]) -> None:
    """Read ahead, to the end, when these agents' jobs are next."""
    store.read_ahead(order)
    settle(store)


def say_all(store: AgentCacheStore, names: str, n_tokens: int = 400) -> None:
    """One turn of each agent, in this order."""
    for name in names:
        Agent(store, name).say(ids(n_tokens, seed=ord(name)))


def in_ram(store: AgentCacheStore, names: Iterable[str]) -> str:
    return "".join(name for name in names if name in store.ram_cache)


def counted_bytes(store: AgentCacheStore) -> int:
    return sum(entry.n_bytes for entry in store.ram_cache._entries.values())


def test_what_is_read_ahead_goes_to_the_engine_without_a_copy(opened: Opened) -> None:
    model = with_rooms(MODEL)
    Agent(opened(), model=model).say(LONG[:300])
    agent = Agent(opened(), model=model)
    agent.store.model_loaded(model)
    read(agent.store, ["agent"])
    room = agent.store.ram_cache._entries["agent"].cache.room
    restored = agent.restore((*LONG[:300], 1, 2))
    assert restored.source == "memory"
    assert restored.prefix is not None
    assert restored.prefix.room is room
    assert not in_ram(agent.store, ["agent"])


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("is_named", "n_tokens"), [(True, 1), (False, 255), (True, 256), (False, 300), (True, 700)])
def test_after_a_restart_a_turn_reads_no_file(
    opened: Opened, tmp_path: Path, model: LoadedModel, is_named: bool, n_tokens: int
) -> None:
    Agent(opened(), model=model, salt="salt").say(LONG[:n_tokens], (7, 8, 9))
    agent = Agent(opened(), model=model, salt="salt")
    read(agent.store, ["nobody", "agent"] if is_named else [])
    agent.store.model_loaded(model)
    for folder in ("blocks", "pieces"):
        (tmp_path / "store" / folder).rename(tmp_path / folder)
    restored = agent.restore((*agent.tokens(), 1, 2))
    assert restored.source == "memory"
    assert restored.prefix is not None
    assert restored.prefix.n_tokens == n_tokens + 3
    same_prompt = agent.restore(LONG[:n_tokens])
    assert same_prompt.source == ("memory" if n_tokens > 1 else "none")
    assert (same_prompt.prefix.n_tokens if same_prompt.prefix else 0) == n_tokens - 1
    for folder in ("blocks", "pieces"):
        (tmp_path / folder).rename(tmp_path / "store" / folder)


def test_agents_are_read_in_the_queues_order_and_then_those_used_last(opened: Opened) -> None:
    say_all(opened(), "abcdef")
    for order, n_rooms, wanted in (("b", 3, "bef"), ("ba", 2, "ab"), ("ba", 1, "b"), ("", 2, "ef"), ("xyz", 1, "f")):
        store = opened(n_rooms * ROOM)
        read(store, order)
        assert in_ram(store, "abcdef") == wanted
        assert counted_bytes(store) == store.ram_cache.n_bytes <= store.ram_cache.max_bytes


def test_with_the_first_restore_only_the_next_jobs_agents_are_read(opened: Opened) -> None:
    say_all(opened(), "abcd")
    store = opened()
    assert Agent(store, "a").restore((*ids(400, seed=ord("a")), 1)).source == "disk"
    read(store, "c")
    assert in_ram(store, "abcd") == "ac"
    read(store, "d")
    assert in_ram(store, "abcd") == "acd"


def test_an_agent_makes_room_only_for_one_whose_turn_is_sooner(opened: Opened) -> None:
    say_all(opened(), "abcdefg")
    store = opened(4 * ROOM)
    read(store, "abcd")
    store.pin(frozenset("a"), frozenset("bcdefg"))
    entries = dict(store.ram_cache._entries)
    for order, wanted in (
        ("bcde", "abcd"),  # e is the last of them
        ("ebcd", "abce"),  # d is the last of them
        ("efg", "aefg"),  # b and c wait too, but behind those
        ("bcd", "abcd"),
    ):
        read(store, order)
        assert in_ram(store, "abcdefg") == wanted
        if order == "ebcd":
            assert all(store.ram_cache._entries[name] is entries[name] for name in "abc")  # not read a second time
    store.pin(frozenset("abcd"), frozenset("efg"))
    read(store, "efg")
    assert in_ram(store, "abcdefg") == "abcd"
    store.pin(frozenset("bcd"), frozenset("efg"))
    read(store, "fg")  # nothing is waiting for a any more
    assert in_ram(store, "abcdefg") == "bcdf"


def test_at_hand_is_what_needs_no_file_and_everything_while_ram_holds_nothing(opened: Opened) -> None:
    say_all(opened(), "abc")
    store = opened(2 * ROOM)
    store._read_ahead._fills = False
    assert all(map(store.is_at_hand, "abcn"))
    read(store, "an")
    assert [store.is_at_hand(name) for name in "abcn"] == [True, False, False, True]
    store.ram_cache.drop("a")
    assert all(map(store.is_at_hand, "abcn"))


def test_an_agent_that_did_not_fit_is_tried_again_and_a_smaller_one_passes_it(opened: Opened) -> None:
    say_all(opened(), "a", 800)
    say_all(opened(), "bc")
    store = opened(2 * ROOM)
    store.pin(frozenset("b"), frozenset("ac"))
    read(store, "b")
    read(store, "ac")
    assert in_ram(store, "abc") == "bc"
    store.pin(frozenset(), frozenset("ac"))
    read(store, "a")
    assert in_ram(store, "abc") == "a"


def test_caches_of_another_model_than_the_loaded_one_are_dropped_and_read_no_more(opened: Opened) -> None:
    store, other = opened(), make_model("b", spec=SNAPSHOT_SPECS["hybrid"])
    say_all(store, "ab")
    for name in "cd":
        Agent(store, name, model=other).say(LONG[:400])
    store = opened()
    read(store, "ac")
    assert in_ram(store, "abcd") == "abcd"
    store.model_loaded(other)
    assert in_ram(store, "abcd") == "cd"
    read(store, "abd")
    assert in_ram(store, "abcd") == "cd"
    assert counted_bytes(store) == store.ram_cache.n_bytes
    assert Agent(store, "d", model=other).restore((*LONG[:400], 1)).source == "memory"
    assert Agent(store, "a", model=other).restore((*LONG[:400], 1)).miss_reason == "other_model"


@pytest.mark.parametrize("piece", ["block", "tail", "snapshot"])
@pytest.mark.parametrize("damage", ["corrupt", "missing"])
def test_a_damaged_file_is_left_for_the_restore_to_name(
    opened: Opened, tmp_path: Path, piece: str, damage: str
) -> None:
    model = MODELS["hybrid"] if piece == "snapshot" else MODEL
    agent = Agent(opened(), model=model)
    agent.say(LONG[:300])
    if piece == "block":
        file = only(tmp_path / "store" / "blocks", "*.safetensors")
    else:
        file = max((tmp_path / "store" / "pieces").rglob(f"*-{piece}*"))
    if damage == "corrupt":
        content = bytearray(file.read_bytes())
        content[-9] ^= 4
        file.write_bytes(content)
    else:
        file.unlink()
    store = opened()
    before = files_below(tmp_path / "store" / "blocks") + files_below(tmp_path / "store" / "pieces")
    read(store, ["agent"])
    assert "agent" not in store.ram_cache
    assert store.ram_cache.n_bytes == 0
    assert files_below(tmp_path / "store" / "blocks") + files_below(tmp_path / "store" / "pieces") == before
    assert not store.misses
    assert Agent(store, model=model).restore((*LONG[:300], 1)).miss_reason == f"{piece}_{damage}"


@pytest.mark.parametrize("cache", ["float32|full:9999999:4:2", "float32|full:2:4:2", "rubbish", None])
def test_a_wrong_layout_in_the_database_costs_only_time(opened: Opened, cache: str | None) -> None:
    agent = Agent(opened())
    agent.say(LONG[:300])
    sql = "DELETE FROM models" if cache is None else "UPDATE models SET cache = ?"
    agent.store.parts.database.commit(lambda connection: connection.execute(sql, (cache,) if cache else ()) and None)
    store = opened()
    read(store, ["agent"])
    assert "agent" not in store.ram_cache
    assert Agent(store).restore((*LONG[:300], 1)).source == "disk"


class Held:
    """Reads these agents' caches, and holds up the reading thread at each one, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: AgentCacheStore, order: str) -> None:
        self.is_reading, self.go_on = threading.Event(), threading.Event()
        run = BlockLookup.run

        def held(lookup: Any) -> Any:
            if threading.current_thread().name == "read-ahead":
                self.is_reading.set()
                assert self.go_on.wait(TIMEOUT_S)
            return run(lookup)

        monkeypatch.setattr(BlockLookup, "run", held)
        store.read_ahead(order)
        assert self.is_reading.wait(TIMEOUT_S)


def test_a_cache_that_is_being_read_when_another_model_was_loaded_is_not_kept(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_all(opened(), "a")
    store = opened()
    held = Held(monkeypatch, store, "a")
    store.model_loaded(make_model("b"))
    held.go_on.set()
    settle(store)
    assert in_ram(store, "a") == ""
    assert store.ram_cache.n_bytes == 0


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_version_that_was_saved_meanwhile_is_not_replaced_by_the_one_that_was_read(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    say_all(opened(), "a")
    store = opened()
    held = Held(monkeypatch, store, "a")
    with monkeypatch.context() as patched:
        patched.setattr(store._read_ahead, "_reading", None)  # no restore waits for it
        agent = Agent(store, "a")
        turn = agent.turn(agent.tokens(), (5, 6))
        if not is_kept:
            turn = make_turn(agent, turn.base, make_transcript(LONG[:300]), None)
        store.save(turn)
    held.go_on.set()
    settle(store)
    assert in_ram(store, "a") == ("a" if is_kept else "")
    assert counted_bytes(store) == store.ram_cache.n_bytes
    if is_kept:
        assert store.ram_cache._entries["a"].version == 2
        assert agent.restore((*agent.tokens(), 1)).source == "memory"


def test_a_restore_waits_for_its_own_agents_cache_and_no_file_is_read_twice(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_all(opened(), "ab")
    store = opened()
    held = Held(monkeypatch, store, "a")
    assert Agent(store, "b").restore((*ids(400, seed=ord("b")), 1)).source == "disk"
    found: list[str] = []
    agent = Agent(store, "a")
    thread = threading.Thread(target=lambda: found.append(agent.restore((*agent.tokens(), 1)).source))
    thread.start()
    thread.join(0.1)
    assert not found
    held.go_on.set()
    thread.join(TIMEOUT_S)
    assert found == ["memory"]


def test_a_store_closes_while_a_cache_is_read_and_reads_none_afterwards(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_all(opened(), "ab")
    store = opened()
    held = Held(monkeypatch, store, "ab")
    closing = threading.Thread(target=store.close)
    closing.start()
    wait_for(lambda: store._read_ahead._is_closing)
    held.go_on.set()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert in_ram(store, "ab") == ""
    store.read_ahead("b")


@pytest.mark.parametrize("seed", range(3))
def test_turns_beside_reading_ahead_get_the_right_cache(opened: Opened, seed: int) -> None:
    """Restores check every element of what they get (`AgentOf.restore`)."""
    chance = random.Random(seed)
    names, n_rooms = "abcdef", chance.choice((2, 4, 50))
    models = {name: chance.choice((MODEL, MODELS["hybrid"], MODELS["recurrent"])) for name in names}
    for is_restart in (False, True, True):
        store = opened(n_rooms * ROOM)
        agents = {name: Agent(store, name, model=models[name]) for name in names}
        for agent in agents.values() if not is_restart else ():
            agent.say(ids(chance.randint(1, 600), seed=chance.randint(0, 9)))
        for _ in range(60):
            store.read_ahead(chance.sample(names, chance.randint(0, 6)))
            running, agent = frozenset(chance.sample(names, 2)), agents[chance.choice(names)]
            store.pin(running, frozenset(names) - running)
            history, step = agent.tokens(), chance.random()
            if step < 0.3:
                agent.restore((*history[: chance.randint(0, len(history))], 1, 2))
            elif step < 0.8:
                agent.say((*history, *ids(chance.randint(0, 60), seed=chance.randint(0, 9))), (1, 2))
            elif step < 0.9:
                agent.say(history[: chance.randint(1, len(history))], (3,))
            else:
                agent.store.save(make_turn(agent, agent.open(), make_transcript((*history, 4)), None))
            assert store.ram_cache.n_bytes <= store.ram_cache.max_bytes
        read(store, names)
        assert counted_bytes(store) == store.ram_cache.n_bytes
        for name, entry in store.ram_cache._entries.items():
            assert entry.version == agents[name].open().number
        for agent in agents.values():
            kept = store.ram_cache._entries.get(agent.name)
            source = agent.restore((*agent.tokens(), 1, 2)).source
            assert source == "memory" or kept is None or kept.cache.n_tokens < len(agent.tokens())
