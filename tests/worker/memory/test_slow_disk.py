"""An agent whose file system hangs: no other agent's save, restore or eviction waits for it."""

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.worker.memory.agents import HYBRID, MODEL, Agent, FastDisk, ids, problems_of

from stoker_worker.memory import eviction
from stoker_worker.memory.files import Chunk
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import LoadedModel

SHARED = ids(600)
MODELS = {"full": MODEL, "hybrid": HYBRID}
PATIENCE_S = 60
"""Only a hang is longer."""


class HangingDisk(FastDisk):
    """Writes of the thread ``slow`` do not return until they are let go, from the one named on."""

    def __init__(self) -> None:
        self.hangs_at = ""
        self.hanging, self.let_go = threading.Event(), threading.Event()

    def write(self, path: Path, chunks: Iterable[Chunk]) -> None:
        data = [bytes(chunk) for chunk in chunks]
        super().write(path, data)
        what = b"".join(data)[:4096].decode("latin-1")
        if threading.current_thread().name.startswith("slow") and self.hangs_at and re.search(self.hangs_at, what):
            self.hanging.set()
            assert self.let_go.wait(PATIENCE_S)


@contextmanager
def hanging_save(disk: HangingDisk, hangs_at: str, save: Callable[[], object]) -> Iterator[Future[object]]:
    """A save on a thread of its own that stands still inside."""
    disk.hangs_at = hangs_at
    with ThreadPoolExecutor(1, thread_name_prefix="slow") as thread:
        done = thread.submit(save)
        try:
            assert disk.hanging.wait(PATIENCE_S)
            yield done
        finally:
            disk.let_go.set()


HANGS_AT = {
    "a block": '"kind":"block"',
    "a piece of its own": '"after_tokens":|"kind":"tail"',
}


@pytest.mark.parametrize("memory_max_bytes", [0, 1 << 30])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("hangs_at", HANGS_AT.values(), ids=HANGS_AT)
def test_a_write_that_hangs_delays_no_other_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs_at: str, model: LoadedModel, memory_max_bytes: int
) -> None:
    monkeypatch.setattr(eviction, "KEEP_UNUSED_S", 0.0)
    disk = HangingDisk()
    store = AgentCacheStore(tmp_path, files=disk, memory_max_bytes=memory_max_bytes)
    agents = {name: Agent(store, name, model) for name in ("slow", "beside", "idle")}
    for seed, agent in enumerate(agents.values()):
        agent.say((*SHARED[:200], *ids(200, seed=seed + 10)))
    turn = agents["slow"].turn((*SHARED, 1))  # blocks of a beginning that the others write too

    def others() -> None:
        beside = agents["beside"]
        for answer in range(3):
            beside.say((*SHARED, 2), (answer,))
            assert beside.tokens() == (*SHARED, 2, answer)
            assert beside.cached((*SHARED, 2, answer, 1)) == 602
        newcomer = Agent(store, "newcomer", model)
        assert newcomer.tokens() == ()
        newcomer.say((*SHARED, 3))
        assert newcomer.cached((*SHARED, 3, 1)) == 601
        store.pin(frozenset({"beside"}), frozenset())
        store.budget.max_bytes = 1
        store.budget.make_room()
        assert agents["idle"].cached(agents["idle"].tokens()) == 0
        assert beside.cached((*SHARED, 2, 2, 1)) == 602
        store.pin(frozenset(), frozenset())
        store.budget.make_room()  # nobody but the slow turn counts on any block now
        store.budget.max_bytes = 1 << 30

    with ThreadPoolExecutor(1) as pool, hanging_save(disk, hangs_at, lambda: store.save(turn)) as saved:
        pool.submit(others).result(PATIENCE_S)
        assert not saved.done()
    saved.result()
    # Nothing of what the slow turn was about to rely on was evicted meanwhile.
    assert agents["slow"].tokens() == (*SHARED, 1)
    assert agents["slow"].cached((*SHARED, 1, 1)) == 601
    assert problems_of(store) == []
    store.close()
    store = AgentCacheStore(tmp_path, files=FastDisk(), max_bytes=1 << 30)
    assert Agent(store, "slow", model).cached((*SHARED, 1, 1)) == 601
