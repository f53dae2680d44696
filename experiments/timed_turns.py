"""Turns that are restored and run as in a worker, and timed token by token: for EXP-006 to EXP-008. No results.

A turn goes through the product's `build_prompt`, through `AgentCacheStore.restore`, which reads into the arrays that
the model goes on in, and through the engine as a worker puts it together. MLX is imported after the BLAS library is
loaded.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench import Bench, Prepared

from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import CompletedGeneration

COLD: Final = "no cache"
DISK, RAM = "disk", "memory"
"""Where the cache comes from, as a result's `cache.source` names it."""


@dataclass(frozen=True)
class TimedTurn:
    """
    Attributes:
        token_s: seconds from the request to each token that was waited for.
        restore_s: of them, until the prompt was encoded and its cache was in memory.
    """

    prepared: Prepared
    completion: CompletedGeneration
    token_s: list[float]
    restore_s: float


class Turns:
    """A worker's engine without its threads, over two stores that get the same agents: one has a RAM cache.

    Attributes:
        folder: of the store without a RAM cache.
    """

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.bench = bench.with_room().endless()
        self.engine: Any = self.bench.worker_engine(8, max_step_s=0.5)
        self.folder = folder / DISK
        self.stores = {
            DISK: AgentCacheStore(self.folder),
            RAM: AgentCacheStore(folder / RAM, memory_max_bytes=4 << 30),
        }

    def remember(self, fields: Mapping[str, Any]) -> TimedTurn:
        """A new agent's first turn, whose cache is saved in both stores."""
        turn = self.answer(self.stores[DISK], {**fields, "cache": "readwrite"})
        for store in self.stores.values():
            agent = store.open_agent(turn.prepared.request.agent_id)
            self.bench.save(store, replace(turn.prepared, agent=agent), turn.completion)
        return turn

    def run(self, source: str, fields: Mapping[str, Any], n_tokens: int | None = None) -> TimedTurn:
        """The same prompt again, by an agent that both stores know; nothing is saved.

        Args:
            n_tokens: cancel it after so many tokens; ``None``: let it end, and hand its cache over.
        """
        store = self.stores.get(source, self.stores[DISK])
        if source == RAM:
            self._read_ahead(fields["agent_id"])
        turn = self.answer(store, {**fields, "cache": "off" if source == COLD else "readwrite"}, n_tokens)
        found, n_cached = turn.prepared.restored, turn.prepared.cached
        wanted = ("none", 0) if source == COLD else (source, len(turn.prepared.prompt.ids) - 1)
        if (found.source, n_cached) != wanted:
            raise RuntimeError(f"restored {n_cached} tokens from {found.source}, not {wanted}")
        return turn

    def _read_ahead(self, agent_id: str) -> None:
        """Into RAM as before a worker's job: a turn goes on in the memory that it finds there, and only a save gives it
        back."""
        store = self.stores[RAM]
        while agent_id not in store.ram_cache:
            store.read_ahead([agent_id])
            time.sleep(0.01)
        store.read_ahead([])

    def answer(self, store: AgentCacheStore, fields: Mapping[str, Any], n_tokens: int | None = None) -> TimedTurn:
        """A turn that is not saved yet; `n_tokens` as for `run`."""
        import mlx.core as mx

        begin = time.perf_counter()
        prepared = self.bench.prepare(store, fields)
        restore_s = time.perf_counter() - begin
        uid = self.engine.submit(prepared.work)
        token_s: list[float] = []
        done = None
        while done is None:
            ended = self.engine.step()
            now = time.perf_counter() - begin
            n = len(ended[0].generated_ids) if ended else self.engine.progress()[uid].tokens
            token_s += [now] * (n - len(token_s))
            done = ended[0] if ended else self.engine.cancel(uid) if n == n_tokens else None
        mx.synchronize()  # what is left of a cancelled turn disturbs the next one no more
        return TimedTurn(prepared, done, token_s, restore_s)

    def close(self) -> None:
        self.engine.close()
        for store in self.stores.values():
            store.close()
