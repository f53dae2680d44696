"""The disk budget of an open store: eviction, pinning, and a usage that equals the disk."""

import logging
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.worker.memory.agents import (
    HYBRID,
    MODEL,
    Agent,
    FastDisk,
    disk_bytes,
    files_below,
    ids,
    make_model,
    open_store,
    problems_of,
    squeeze,
)

from stoker_worker.memory import eviction
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import LoadedModel, Turn
from stoker_worker.ports.cache_spec import LayerKind, LayerSpec, ModelCacheSpec

LONG = ids(1300)
BIG = make_model("big", spec=ModelCacheSpec((LayerSpec(LayerKind.FULL, 2, 32, 32),) * 4, "float32"))
"""Its blocks take half a megabyte: more than the transaction that notes their eviction."""


def du(folder: Path) -> int:
    said = subprocess.run(["du", "-sk", folder], capture_output=True, check=True, text=True)
    return 1024 * int(said.stdout.split()[0])


def settled_bytes(store: AgentCacheStore) -> int:
    """What the store takes without its write-ahead log, which goes before any cache does."""
    store.parts.database.empty_log()
    return store.budget.total_bytes


def test_the_usage_is_what_du_counts(tmp_path: Path) -> None:
    for memo in ("model-digests.json", "model-proofs.json"):
        (tmp_path / memo).write_text("{}")
    store = open_store(tmp_path)
    for name, length in (("a", 700), ("b", 900), ("a", 1300)):
        Agent(store, name).say(ids(length, seed=ord(name)))
        assert store.budget.total_bytes == du(tmp_path)
    store.close()
    on_disk = du(tmp_path)
    (tmp_path / "redis").mkdir()
    (tmp_path / "redis" / "dump").write_bytes(bytes(100_000))
    store = open_store(tmp_path)
    log = sum(path.stat().st_blocks * 512 for path in tmp_path.glob("agents.db-*"))
    assert store.budget.total_bytes == on_disk + log


def test_the_default_limit_is_80_percent_of_the_stores_and_the_free_bytes(tmp_path: Path) -> None:
    limit = open_store(tmp_path).budget.max_bytes
    assert limit == pytest.approx(0.8 * shutil.disk_usage(tmp_path).free, rel=0.05)


def test_a_store_stays_within_its_limit_and_keeps_the_agents_used_last(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_bytes=1_800_000)
    for number in range(20):
        Agent(store, f"agent {number}").say(ids(600, seed=number), ids(30, seed=100 + number))
        assert store.budget.total_bytes <= 1_800_000
    for number in range(20):
        assert Agent(store, f"agent {number}").tokens() == ids(600, seed=number) + ids(30, seed=100 + number)
    assert Agent(store, "agent 19").cached((*ids(600, seed=19), *ids(30, seed=119), 1)) == 630
    assert Agent(store, "agent 0").restore((*ids(600), *ids(30, seed=100), 1)).miss_reason == "evicted"
    assert store.misses["evicted"] == 1
    assert problems_of(store) == []


def test_an_evicted_agent_continues_and_its_next_turn_is_cached_again(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path, memory_max_bytes=1 << 30))
    agent.say(LONG[:700])
    squeeze(agent.store)
    assert files_below(tmp_path / "blocks") == []
    assert list(tmp_path.rglob("*-tail.safetensors")) == []
    restored = agent.restore(LONG[:800])
    assert (restored.prefix, restored.miss_reason) == (None, "evicted")
    agent.say(LONG[:800])
    assert agent.restore(LONG[:900]).miss_reason is None
    agent.store.close()
    agent.store = open_store(tmp_path)
    assert agent.cached(LONG[:900]) == 800
    assert agent.open().number == 2


def test_eviction_leaves_the_start_of_a_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "KEEP_UNUSED_S", 0.0)
    agent = Agent(open_store(tmp_path), model=BIG)
    agent.say(LONG[:1100])
    squeeze(agent.store, settled_bytes(agent.store) - 1)
    left = agent.cached(LONG[:1200])
    assert left % 256 == 0
    assert 0 < left < 1100
    agent.store.budget.make_room()  # the agent still uses the rest
    assert agent.cached(LONG[:1200]) == left


def test_eviction_continues_to_the_low_water_mark(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(12):
        Agent(store, str(number)).say(ids(600, seed=number))
    total = settled_bytes(store)
    squeeze(store, total - 1)
    assert 0.8 * total < store.budget.total_bytes <= 0.9 * total


def test_a_waiting_agent_loses_its_cache_after_idle_ones_and_the_one_needed_last_first(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for name in ("soon", "latest", "running", "idle", "later"):
        Agent(store, name, model=BIG).say(ids(300, seed=ord(name[-1])))
    order = ["soon", "later", "latest", "running"]  # whose next job waits too
    store.pin(frozenset({"running"}), frozenset(order))
    store.order_by(lambda agent_id: (0, order.index(agent_id)))
    gone: list[str] = []
    for _ in range(20):
        store.budget.free(1)
        names = ("soon", "latest", "running", "idle", "later")
        gone += [name for name in names if name not in gone and store.open_agent(name).evicted]
    assert gone == ["idle", "latest", "later", "soon"]
    assert Agent(store, "running", model=BIG).restore((*ids(300, seed=ord("g")), 1)).miss_reason is None


def test_replaced_blocks_are_removed_after_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(open_store(tmp_path))
    agent.say(LONG[:700])
    first = files_below(tmp_path / "blocks")
    agent.say(ids(600, seed=1))
    agent.store.budget.make_room()
    assert set(first) <= set(files_below(tmp_path / "blocks"))  # it may come back
    later = time.time() + 3601
    monkeypatch.setattr(eviction, "time", SimpleNamespace(time=lambda: later))
    agent.say((*ids(600, seed=1), 1))
    agent.store.budget.make_room()
    assert not set(first) & set(files_below(tmp_path / "blocks"))
    assert agent.cached((*ids(600, seed=1), 1, 2)) == 601


def test_opening_evicts_down_to_the_limit_the_agents_saved_first(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for name in "zya":
        Agent(store, name, BIG).say(ids(600, seed=ord(name)))
    store.close()
    store = open_store(tmp_path, max_bytes=int(0.95 * disk_bytes(tmp_path)))
    left = [Agent(store, name, BIG).cached((*ids(600, seed=ord(name)), 1)) for name in "zya"]
    assert left[0] < 600
    assert left[1:] == [600, 600]


def test_a_budget_that_transcripts_alone_exceed_costs_all_cache_no_turn_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(open_store(tmp_path, max_bytes=10_000))
    with caplog.at_level(logging.WARNING, logger="stoker_worker.memory.eviction"):
        for length in (300, 600, 900):
            agent.say(LONG[:length])
            assert agent.tokens() == LONG[:length]
    assert files_below(tmp_path / "blocks") == []
    said = [record.getMessage() for record in caplog.records if record.name.endswith(".eviction")]
    assert len(said) == 1
    assert "nothing more can be evicted" in said[0]


def test_a_file_that_cannot_be_removed_costs_a_warning_and_no_turn(tmp_path: Path) -> None:
    class Sticky(FastDisk):
        def remove(self, path: Path) -> None:
            if path.suffix == ".safetensors" and path.parent.parent.parent.name == "blocks":
                raise OSError("not allowed")
            super().remove(path)

    agent = Agent(AgentCacheStore(tmp_path, files=Sticky(), max_bytes=1000))
    for length in (300, 600):
        agent.say(LONG[:length])
    assert agent.tokens() == LONG[:600]
    assert len(files_below(tmp_path / "blocks")) == 2


@pytest.mark.parametrize("model", [MODEL, HYBRID], ids=["full", "hybrid"])
def test_saves_loads_and_evictions_at_once_leave_whole_agents_and_a_right_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: LoadedModel
) -> None:
    monkeypatch.setattr(eviction, "KEEP_UNUSED_S", 0.0)
    max_bytes = 5_500_000
    store = open_store(tmp_path, max_bytes=max_bytes, memory_max_bytes=200_000)
    readers = [Agent(store, f"reader {number}", model) for number in range(3)]  # no agent has two jobs at once
    for reader in readers:
        reader.say((*LONG[:600], 1))
    done = threading.Event()

    def work(name: str) -> None:
        agent = Agent(store, name, model)
        for number in range(25):
            prompt = (*LONG[: 300 + 20 * number], *ids(200, seed=number % 5))
            agent.say(prompt)
            assert agent.tokens() == prompt

    def load() -> None:
        while not done.is_set():
            for reader in readers:
                assert reader.tokens() == (*LONG[:600], 1)
                reader.restore((*LONG[:600], 1, 2))

    with ThreadPoolExecutor(4) as threads:
        loader = threads.submit(load)
        try:
            list(threads.map(work, "abc"))
        finally:
            done.set()
        loader.result()
    store.budget.make_room()  # what was in use during the last save is in use no more
    assert problems_of(store) == []
    assert store.budget.total_bytes == disk_bytes(tmp_path)
    assert store.budget.total_bytes <= max_bytes


def test_a_failed_save_leaves_the_files_of_another_save_alone(tmp_path: Path) -> None:
    """Agent `slow` has staged its block when the save of `failing` breaks off and tidies up behind itself."""
    failing: list[Turn] = []
    results: list[Mapping[str, Any]] = []

    class Meeting(FastDisk):
        def rename(self, source: Path, target: Path) -> None:
            if target.suffix == ".safetensors" and failing:
                results.append(store.save(failing.pop()))
            elif target.suffix == ".safetensors" and not results:
                raise OSError("no")
            super().rename(source, target)

    store = AgentCacheStore(tmp_path, files=Meeting())
    slow = Agent(store, "slow")
    failing.append(Agent(store, "failing").turn(LONG[:20]))
    slow.say(LONG[:10])
    assert "save_error" in results[0]["cache"]
    assert slow.tokens() == LONG[:10]
    assert slow.cached((*LONG[:10], 1)) == 10
    assert files_below(tmp_path / "tmp") == []
