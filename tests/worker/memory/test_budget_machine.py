"""Any mix of operations on a store with a budget: the usage is right, no transcript is lost, no cache is wrong.

Hundreds of operations in the suite, the same each time; `make deep` runs many more, and shortens what fails. Half are
on a model of full attention, half on one with window and recurrent layers too; the RAM cache comes and goes when it is
opened again.
"""

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from tests.worker.memory.agents import (
    HYBRID,
    MODEL,
    Agent,
    boundaries,
    call_of_session,
    disk_bytes,
    files_below,
    ids,
    problems_of,
    run_job,
    tidy,
)
from tests.worker.memory.faulty_files import FullFiles

from stoker_worker.memory import cache_index, eviction, transcripts
from stoker_worker.memory.agent_changes import forget_agent, fork_agent
from stoker_worker.memory.blocks import BlockChain
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.memory.store_parts import opened
from stoker_worker.ports import LoadedModel
from stoker_worker.ports.cache_spec import BLOCK_TOKENS
from stoker_worker.ports.memory import common_length

DEEP = int(os.environ.get("DEEP", "0"))
"""How many runs of up to 100 operations, instead of what the suite does."""

EXAMPLES, STEPS, OPERATIONS = (DEEP, 100, 30 * DEEP) if DEEP else (9, 50, 240)
PHASES = tuple(Phase) if DEEP else (Phase.generate,)  # finding the shortest mix that fails takes minutes
NAMES = st.sampled_from("abcd")
BASES = [ids(1500, seed=seed) for seed in range(2)]
PAGE = 4096
MEMORY_BYTES = 150_000
MODELS = {"full attention": MODEL, "hybrid": HYBRID}


class Budget(RuleBasedStateMachine):
    done: ClassVar[Counter[str]] = Counter()
    """How often each operation ran, in all examples together."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        self.model = model
        self.folder = Path(tempfile.mkdtemp(prefix="budget-"))
        self.files = FullFiles()
        self.transcripts: dict[str, tuple[int, ...]] = {}
        self.boundaries: dict[str, list[int]] = {}
        self.said: tuple[int, ...] = ()
        self.damaged: set[Path] = set()
        self.pinned: frozenset[str] = frozenset()
        self.max_bytes: int | None = None
        self.memory_max_bytes = MEMORY_BYTES
        self.open()

    def open(self) -> None:
        self.store = AgentCacheStore(
            self.folder,
            files=self.files,
            max_bytes=self.max_bytes,
            memory_max_bytes=self.memory_max_bytes,
        )
        self.store.pin(self.pinned, frozenset())

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    def agent(self, name: str) -> Agent:
        return Agent(self.store, name, self.model)

    def all_pieces(self, name: str) -> set[Path]:
        """The cache files of an agent that nothing has happened to."""
        token_ids = self.transcripts.get(name, ())
        tail, *snapshots = self.store.parts.pieces.paths(name, self.agent(name).open().number)
        found = set(BlockChain(self.model.fingerprint, None, token_ids).paths(self.store._blocks.path_of))
        found.update([tail] if len(token_ids) % BLOCK_TOKENS and not self.model.spec.snapshot_layers else [])
        return found.union(snapshots[: len(self.boundaries.get(name, ()))])

    def pieces(self, names: frozenset[str]) -> set[Path]:
        """Cache files of these agents that are there and whole."""
        found: set[Path] = set().union(*map(self.all_pieces, names))
        return {path for path in found if path.exists()} - self.damaged

    def claims(self, names: frozenset[str]) -> set[Path]:
        """Of those, what the agents' rows refer to. A block that was lost, and that another agent has written again, is
        an agent's only from its next turn on."""
        parts, found = self.store.parts, set[Path]()
        with parts.database.snapshot() as connection:
            for name in names:
                row = transcripts.find_agent(connection, name)
                blocks = cache_index.chain_back(connection, row.last_block) if row else ()
                found.update(parts.blocks.path_of(block.model, block.address) for block in blocks)
                found.update(parts.pieces.paths(name, row.version) if row else ())
        return found & self.pieces(names)

    def say(self, name: str, prompt: tuple[int, ...], answer: tuple[int, ...]) -> None:
        others = self.pinned - {name}
        kept = self.claims(others)
        self.agent(name).say(prompt, answer)
        self.transcripts[name] = (*prompt, *answer)
        self.boundaries[name] = self.boundaries_of(prompt, answer)
        assert kept <= self.pieces(others)

    def boundaries_of(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> list[int]:
        return boundaries(prompt, answer) if self.model.spec.snapshot_layers else []

    def due(self, name: str, prompt: tuple[int, ...]) -> int:
        """How many tokens of `prompt` the agent's own cache must give when all of it is there."""
        shared = common_length(self.transcripts[name], prompt[:-1])
        if not self.model.spec.snapshot_layers:
            return shared
        return max((n for n in self.boundaries[name] if n <= shared), default=0)

    @rule(name=NAMES, new=st.integers(1, 400), answer=st.integers(0, 60))
    def append(self, name: str, new: int, answer: int) -> None:
        self.done["append"] += 1
        history = self.transcripts.get(name, ())
        self.say(name, history + ids(new, seed=len(history)), ids(answer, seed=new))

    @rule(name=NAMES, base=st.sampled_from(BASES), keep=st.integers(1, 1500), new=st.integers(0, 300))
    def replace(self, name: str, base: tuple[int, ...], keep: int, new: int) -> None:
        self.done["replace"] += 1
        self.say(name, base[:keep], ids(new, seed=keep))

    @rule(name=NAMES, new=st.integers(1, 700), fail_at=st.integers(1, 25), failures=st.sampled_from([1, 1000]))
    def run_out_of_space(self, name: str, new: int, fail_at: int, failures: int) -> None:
        self.done["run_out_of_space"] += 1
        turn = self.agent(name).turn((*self.transcripts.get(name, ()), *ids(new, seed=new)))
        self.files.arm(fail_at, failures)
        result = self.store.save(turn)
        self.files.arm(0, 0)
        self.done["uncached"] += result != turn.result
        token_ids = turn.transcript.token_ids
        self.transcripts[name], self.boundaries[name] = token_ids, self.boundaries_of(token_ids, ())

    @rule(
        base=st.sampled_from(BASES),
        keep=st.integers(1, 1500),
        answer=st.integers(0, 60),
        fail_at=st.just(0) | st.integers(1, 12),
    )
    def call(self, base: tuple[int, ...], keep: int, answer: int, fail_at: int) -> None:
        """Of a session, which goes on or begins anew. Its cache may find the disk full."""
        kept = self.claims(self.pinned)
        goes_on = answer % 2 and len(self.said) < 1500
        prompt, answered = (*self.said, *ids(answer, seed=keep)) if goes_on else base[:keep], ids(answer, seed=answer)
        self.files.arm(fail_at, 1000 if fail_at else 0)
        try:
            n_tokens, _ = call_of_session(self.store, prompt, answered, model=self.model)
            self.done["call"] += 1
            self.done["call from the cache"] += n_tokens > 0
        except OSError:
            self.done["call that is not kept"] += 1
        self.files.arm(0, 0)
        self.said = (*prompt, *answered)
        assert kept <= self.pieces(self.pinned)

    @precondition(lambda self: self.transcripts)
    @rule(pick=st.integers(0, 1000), keep=st.integers(0, 1500), new=st.integers(1, 100))
    def load(self, pick: int, keep: int, new: int) -> None:
        self.done["load"] += 1
        name = sorted(self.transcripts)[pick % len(self.transcripts)]
        prompt = self.transcripts[name][:keep] + ids(new, seed=3)
        is_whole = self.all_pieces(name) <= self.pieces(frozenset([name]))
        restored = self.agent(name).restore(prompt)
        self.done[restored.source] += 1
        self.done["whole"] += is_whole
        assert not is_whole or (restored.prefix.n_tokens if restored.prefix else 0) >= self.due(name, prompt)

    @rule(names=st.frozensets(NAMES, max_size=3))
    def pin(self, names: frozenset[str]) -> None:
        self.done["pin"] += 1
        self.pinned = names
        self.store.pin(names, frozenset())

    @rule(share=st.floats(0, 1.1))
    def evict(self, share: float) -> None:
        self.done["evict"] += 1
        kept, before = self.claims(self.pinned), len(files_below(self.folder))
        was = self.store.budget.max_bytes
        self.store.budget.max_bytes = int(self.store.budget.total_bytes * share)
        self.store.budget.make_room()
        assert kept <= self.pieces(self.pinned)
        evictable = self.claims(frozenset(self.transcripts)) - self.claims(self.pinned)
        assert self.store.budget.total_bytes <= self.store.budget.max_bytes or not evictable
        self.done["evicted"] += len(files_below(self.folder)) < before
        self.store.budget.max_bytes = was

    @precondition(lambda self: bool(files_below(self.folder / "blocks")))
    @rule(pick=st.integers(0, 1000), at=st.integers(0, 10_000))
    def corrupt(self, pick: int, at: int) -> None:
        self.done["corrupt"] += 1
        pieces = sorted(self.folder.rglob("*.safetensors"))
        path = pieces[pick % len(pieces)]
        data = bytearray(path.read_bytes())
        data[at % len(data)] ^= 1
        path.write_bytes(data)
        self.damaged.add(path)

    @rule(limit=st.sampled_from([None, 300_000, 700_000]), memory=st.sampled_from([0, MEMORY_BYTES]))
    def reopen(self, limit: int | None, memory: int) -> None:
        self.done["reopen"] += 1
        self.store.close()
        self.max_bytes, self.memory_max_bytes = limit, memory
        self.open()

    @precondition(lambda self: self.transcripts)
    @rule(pick=st.integers(0, 1000), to=NAMES)
    def fork(self, pick: int, to: str) -> None:
        source = sorted(self.transcripts)[pick % len(self.transcripts)]
        if to in self.transcripts:
            return
        self.done["fork"] += 1
        version = self.agent(source).open().number
        with opened(self.folder) as parts:  # beside the worker
            fork_agent(parts, source, to)
        self.note_fork(source, version, to)

    def note_fork(self, source: str, version: int, to: str) -> None:
        self.transcripts[to], self.boundaries[to] = self.transcripts[source], self.boundaries[source]
        ours, theirs = (self.store.parts.pieces.paths(*agent) for agent in ((to, 1), (source, version)))
        self.damaged |= {copy for copy, piece in zip(ours, theirs, strict=True) if piece in self.damaged}

    @precondition(lambda self: self.transcripts)
    @rule(pick=st.integers(0, 1000))
    def remove(self, pick: int) -> None:
        self.done["remove"] += 1
        name = sorted(self.transcripts)[pick % len(self.transcripts)]
        self.store.close()
        with opened(self.folder) as parts:
            forget_agent(parts, name)
        del self.transcripts[name], self.boundaries[name]
        self.open()

    def job(self, action: str, name: str, **fields: Any) -> None:
        """A job about an agent, beside the others' work."""
        others = self.pinned - {name}
        kept = self.claims(others)
        run_job(self.store, action, name, **fields)
        self.done[f"{action} job"] += 1
        assert kept <= self.pieces(others)

    @precondition(lambda self: self.transcripts)
    @rule(pick=st.integers(0, 1000), to=NAMES)
    def fork_at_work(self, pick: int, to: str) -> None:
        source = sorted(self.transcripts)[pick % len(self.transcripts)]
        if to in self.transcripts:
            return
        version = self.agent(source).open().number
        self.job("fork", source, target=to)
        self.note_fork(source, version, to)

    @precondition(lambda self: self.transcripts)
    @rule(pick=st.integers(0, 1000))
    def forget_at_work(self, pick: int) -> None:
        name = sorted(self.transcripts)[pick % len(self.transcripts)]
        self.job("forget", name)
        del self.transcripts[name], self.boundaries[name]

    @precondition(lambda self: self.transcripts)
    @rule(pick=st.integers(0, 1000), back=st.integers(0, 3))
    def roll_back_at_work(self, pick: int, back: int) -> None:
        name = sorted(self.transcripts)[pick % len(self.transcripts)]
        newest = self.agent(name).open().number
        version = max(1, newest - back)
        with self.store.parts.database.snapshot() as connection:
            row = transcripts.find_agent(connection, name)
            assert row is not None
            before = transcripts.read_version(connection, row, version)[0].token_ids
        assert version < newest or before == self.transcripts[name]
        self.job("rollback", name, version=version)
        self.transcripts[name], self.boundaries[name] = before, []

    @invariant()
    def the_books_are_right(self) -> None:
        tidy(self.store)
        on_disk = disk_bytes(self.folder)
        assert abs(self.store.budget.total_bytes - on_disk) <= 0.01 * on_disk + PAGE

    @invariant()
    def nothing_is_damaged_that_was_not_damaged_here(self) -> None:
        found = {Path(line.partition(": ")[0]) for line in problems_of(self.store)}
        # A damaged snapshot that outlives its turn is renamed; the rest is gone, or was written anew.
        new, gone = found - self.damaged, [path for path in self.damaged - found if "-snapshot-" in path.name]
        assert len([path for path in new if "-checkpoint" in path.name]) == len(new) <= len(gone)
        self.damaged = found

    @invariant()
    def transcripts_are_as_they_were_made(self) -> None:
        for name, token_ids in self.transcripts.items():
            assert self.agent(name).tokens() == token_ids

    @invariant()
    def the_ram_cache_is_bounded(self) -> None:
        assert self.store.ram_cache.n_bytes <= self.store.ram_cache.max_bytes


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_hundreds_of_random_operations(monkeypatch: pytest.MonkeyPatch, model: LoadedModel) -> None:
    monkeypatch.setattr(eviction, "KEEP_UNUSED_S", 0.0)
    Budget.done.clear()
    names = ("append", "replace", "load", "pin", "evict", "corrupt", "run_out_of_space", "reopen", "fork", "remove")
    outcomes: tuple[str, ...] = ("evicted", "uncached", "memory", "disk", "whole", "fork job", "forget job", "call")
    outcomes = (*outcomes, "rollback job", "call from the cache", "call that is not kept")
    for examples in (EXAMPLES, 2 * EXAMPLES, 4 * EXAMPLES, 8 * EXAMPLES):  # hypothesis draws others after other tests
        run_state_machine_as_test(
            lambda: Budget(model),  # type: ignore[arg-type]  # any factory will do
            settings=settings(
                max_examples=examples,
                stateful_step_count=STEPS,
                derandomize=not DEEP,
                phases=PHASES,
                suppress_health_check=list(HealthCheck),
            ),
        )
        missing = [name for name in (*names, *outcomes) if not Budget.done[name]]
        if not missing and sum(Budget.done[name] for name in names) >= OPERATIONS:
            return
    assert missing == []
    assert sum(Budget.done[name] for name in names) >= OPERATIONS
