"""Any mix of operations on a store with a budget: the books are right, nothing true is lost, nothing wrong is given.

1,000 operations in the suite, the same each time; `make deep` runs many more, and shortens what fails.
"""

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from tests.worker.memory.agents import MODEL, Agent, FastDisk, files_below, ids

from stoker_worker.memory.access import hold
from stoker_worker.memory.block_paths import chain_paths
from stoker_worker.memory.fork import fork_agent
from stoker_worker.memory.removal import remove_agent
from stoker_worker.memory.store import AgentStore

DEEP = int(os.environ.get("DEEP", "0"))
"""How many runs of up to 100 operations, instead of what the suite does."""

EXAMPLES, STEPS, OPERATIONS = (DEEP, 100, 30 * DEEP) if DEEP else (32, 50, 1000)
PHASES = tuple(Phase) if DEEP else (Phase.generate,)  # finding the shortest mix that fails takes minutes
NAMES = st.sampled_from("abcd")
BASES = [ids(1500, seed=seed) for seed in range(2)]
PAGE = 4096


def disk_bytes(store: Path) -> int:
    """As `du -s` says."""
    paths = [store, *(path for path in store.rglob("*") if store / "redis" not in (path, *path.parents))]
    return sum(path.lstat().st_blocks * 512 for path in paths)


class Budget(RuleBasedStateMachine):
    done: ClassVar[Counter[str]] = Counter()
    """How often each operation ran, in all examples together."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="budget-"))
        self.transcripts: dict[str, tuple[int, ...]] = {}
        self.damaged: set[Path] = set()
        self.protected: frozenset[str] = frozenset()
        self.max_bytes: int | None = None
        self.open()

    def open(self) -> None:
        self.store = AgentStore(
            self.folder, files=FastDisk(), max_bytes=self.max_bytes, memory_max_bytes=150_000, keep_unused_s=0
        )
        self.store.protect(self.protected)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    def agent(self, name: str) -> Agent:
        return Agent(self.store, name)

    def pieces(self, names: frozenset[str]) -> set[Path]:
        """Cache files of these agents that are there and whole."""
        found: set[Path] = set()
        for name in names:
            path_of = self.store._blocks.path_of
            found.update(chain_paths(MODEL.fingerprint, None, self.transcripts.get(name, ()), path_of))
            found.update(self.store._agent(name).path.glob("tail-*"))
        return {path for path in found if path.exists()} - self.damaged

    def say(self, name: str, prompt: tuple[int, ...], answer: tuple[int, ...]) -> None:
        others = self.protected - {name}
        kept = self.pieces(others)
        self.agent(name).say(prompt, answer)
        self.transcripts[name] = (*prompt, *answer)
        assert kept <= self.pieces(others)

    @rule(name=NAMES, new=st.integers(1, 400), answer=st.integers(0, 60))
    def append(self, name: str, new: int, answer: int) -> None:
        self.done["append"] += 1
        history = self.transcripts.get(name, ())
        self.say(name, history + ids(new, seed=len(history)), ids(answer, seed=new))

    @rule(name=NAMES, base=st.sampled_from(BASES), keep=st.integers(1, 1500), new=st.integers(0, 300))
    def replace(self, name: str, base: tuple[int, ...], keep: int, new: int) -> None:
        self.done["replace"] += 1
        self.say(name, base[:keep], ids(new, seed=keep))

    @precondition(lambda self: self.transcripts)
    @rule(pick=st.integers(0, 1000), keep=st.integers(0, 1500), new=st.integers(1, 100))
    def load(self, pick: int, keep: int, new: int) -> None:
        self.done["load"] += 1
        name = sorted(self.transcripts)[pick % len(self.transcripts)]
        prompt = self.transcripts[name][:keep] + ids(new, seed=3)
        self.done[self.agent(name).restore(prompt).source] += 1

    @rule(names=st.frozensets(NAMES, max_size=3))
    def protect(self, names: frozenset[str]) -> None:
        self.done["protect"] += 1
        self.protected = names
        self.store.protect(names)

    @rule(share=st.floats(0, 1.1))
    def evict(self, share: float) -> None:
        self.done["evict"] += 1
        kept, before = self.pieces(self.protected), len(files_below(self.folder))
        was = self.store.budget.max_bytes
        self.store.budget.max_bytes = int(self.store.budget.total_bytes * share)
        self.store.budget.make_room()
        assert kept <= self.pieces(self.protected)
        evictable = self.pieces(frozenset(self.transcripts)) - self.pieces(self.protected)
        assert self.store.budget.total_bytes <= self.store.budget.max_bytes or not evictable
        self.done["evicted"] += len(files_below(self.folder)) < before
        self.store.budget.max_bytes = was

    @precondition(lambda self: files_below(self.folder / "blocks"))
    @rule(pick=st.integers(0, 1000), at=st.integers(0, 10_000))
    def corrupt(self, pick: int, at: int) -> None:
        self.done["corrupt"] += 1
        pieces = [*files_below(self.folder / "blocks"), *sorted(self.folder.rglob("tail-*"))]
        path = pieces[pick % len(pieces)]
        data = bytearray(path.read_bytes())
        data[at % len(data)] ^= 1
        path.write_bytes(data)
        self.damaged.add(path)

    @rule(limit=st.sampled_from([None, 60_000, 200_000]))
    def reopen(self, limit: int | None) -> None:
        self.done["reopen"] += 1
        self.store.close()
        self.max_bytes = limit
        self.open()

    @precondition(lambda self: self.transcripts)
    @rule(pick=st.integers(0, 1000), to=NAMES)
    def fork(self, pick: int, to: str) -> None:
        source = sorted(self.transcripts)[pick % len(self.transcripts)]
        if to in self.transcripts:
            return
        self.done["fork"] += 1
        self.store.close()
        with hold(self.folder) as access:
            fork_agent(access, source, to)
        self.transcripts[to] = self.transcripts[source]
        self.damaged |= {
            copy
            for tail in self.damaged & set(access.agent(source).path.glob("tail-*"))
            if tail.exists() and (copy := access.agent(to).tail_path(1)).exists()
        }
        self.open()

    @precondition(lambda self: self.transcripts)
    @rule(pick=st.integers(0, 1000))
    def remove(self, pick: int) -> None:
        self.done["remove"] += 1
        name = sorted(self.transcripts)[pick % len(self.transcripts)]
        self.store.close()
        with hold(self.folder) as access:
            remove_agent(access, name)
        del self.transcripts[name]
        self.open()

    @invariant()
    def the_books_are_right(self) -> None:
        on_disk = disk_bytes(self.folder)
        assert abs(self.store.budget.total_bytes - on_disk) <= 0.01 * on_disk + PAGE

    @invariant()
    def nothing_is_damaged_that_was_not_damaged_here(self) -> None:
        self.damaged = {path for path in self.damaged if path.exists()}
        found = {Path(line.partition(": ")[0]) for line in self.store.verify()}
        assert found <= self.damaged

    @invariant()
    def transcripts_are_as_they_were_made(self) -> None:
        for name, token_ids in self.transcripts.items():
            assert self.agent(name).tokens() == token_ids

    @invariant()
    def hot_memory_is_bounded(self) -> None:
        assert self.store.hot.n_bytes <= self.store.hot.max_bytes


def test_a_thousand_random_operations() -> None:
    Budget.done.clear()
    run_state_machine_as_test(
        Budget,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            derandomize=not DEEP,
            phases=PHASES,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    names = ("append", "replace", "load", "protect", "evict", "corrupt", "reopen", "fork", "remove")
    assert sum(Budget.done[name] for name in names) >= OPERATIONS
    assert all(Budget.done[name] > 0 for name in (*names, "evicted", "memory", "disk"))
