"""Decides which sequences run and which wait for a place, and owns the KV memory they hold. Engine thread.

A sequence's tokens and its end are the engine's. Sequences wait in order of age. One that does not fit now lets smaller
ones pass, but only so many: then the batch drains until it fits, so neither a large sequence nor a small one waits
forever.

Prompts that begin alike are prefilled once: agents with one system prompt that arrive together would otherwise each
prefill it, and each hold it. Window and recurrent layers cannot be cut back, so there the first prompt's prefill stops
where the others leave it; they wait for the state at that place, and continue from copies.
"""

import time
from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from stoker_worker.engine.generator import Generator
from stoker_worker.engine.kv_memory import BlockPool, KVCost
from stoker_worker.engine.sequence import Sequence
from stoker_worker.engine.step_limits import BatchWidth
from stoker_worker.ports import Snapshot, Stage
from stoker_worker.ports.cache_spec import BLOCK_TOKENS
from stoker_worker.ports.memory import common_length

LEAST_TOKENS: Final = 64
"""Prefilling fewer tokens is faster than waiting for them."""

_LEAST_COPIED: Final = 16
"""Fewer tokens are prefilled as fast as copied. With 40 tokens behind them, the first token took 1.01 times as long
with 8 copied, 0.95 with 16, on a CPU. The words of a template before a message are often more."""

LEAST_SHARED: Final = 256
"""A shorter beginning is copied: rows that short share arrays anyway."""

_STEP: Final = 64
"""A shared prefix is a multiple of so many tokens: behind a system prompt, a few more tokens are equal by chance."""


@dataclass(frozen=True)
class Beginning:
    """The first `n_tokens` tokens of `waiting` and of the sequence `of` in the batch, whose prompts have them in
    common. With `at_cut`, `waiting` can continue only from a snapshot there."""

    waiting: Sequence
    of: Sequence
    n_tokens: int
    at_cut: bool = False

    @property
    def is_prefilled(self) -> bool:
        if self.at_cut:
            return self.n_tokens in self.of.at_cuts
        return self.of.n_cached + self.of.n_prefilled >= self.n_tokens

    @property
    def n_shared(self) -> int:
        """How many of them need not be in memory twice; 0 if either sequence has more tokens behind them than that,
        because sharing copies these once."""
        if self.at_cut:
            return 0
        n, n_to_split = self.n_tokens // _STEP * _STEP, self.of.n_tokens
        if self.of.prefix is not None:
            n, n_to_split = min(n, self.of.prefix.n_tokens), 0
        return n if n >= LEAST_SHARED and max(self.waiting.n_cached, n_to_split) <= 2 * n else 0


def shared_beginning(waiting: Sequence, in_batch: Iterable[Sequence]) -> Beginning | None:
    """The longest beginning that `waiting` has in common with a sequence in the batch, if it is worth it.

    One that its own caches hold already is returned only once it is prefilled and can be shared.
    """
    key, n_cached = waiting.work.shares, waiting.n_cached
    least = min(n_cached + LEAST_TOKENS, LEAST_SHARED) if n_cached else _LEAST_COPIED
    if key is None or waiting.n_prompt <= least:
        return None
    others = (other for other in in_batch if other.work.shares == key)
    found = [Beginning(waiting, other, _n_common(waiting, other, least)) for other in others]
    best = max(found, key=lambda beginning: (beginning.n_tokens, beginning.is_prefilled), default=None)
    if best is None or best.n_tokens >= n_cached + LEAST_TOKENS:
        return best
    if not n_cached:
        ready = (beginning for beginning in found if beginning.n_tokens and beginning.is_prefilled)
        return max(ready, key=lambda beginning: beginning.n_tokens, default=None)
    held = Beginning(waiting, best.of, min(best.n_tokens, n_cached))
    return held if held.is_prefilled and held.n_shared else None


def beginning_at_cut(waiting: Sequence, in_batch: Iterable[Sequence]) -> Beginning | None:
    """The longest beginning that `waiting` has in common with a sequence in the batch whose prefill stops at its end,
    if it is worth it."""
    key, least = waiting.work.shares, waiting.n_cached + LEAST_TOKENS
    if key is None or waiting.n_prompt <= least:
        return None
    found = []
    for other in in_batch:
        if other.work.shares == key and (cuts := [n for n in other.comes_to if n >= least]):
            n_common = _n_common(waiting, other, LEAST_TOKENS)
            found += [Beginning(waiting, other, n, at_cut=True) for n in cuts if n <= n_common]
    return max(found, key=lambda beginning: (beginning.n_tokens, beginning.is_prefilled), default=None)


def cuts_for(waiting: Iterable[Sequence], joining: Sequence) -> set[int]:
    """Where the prefill of `joining` stops for those that wait: at the place that saves them most tokens of prefill,
    and at the checkpoints they are to leave, from the last full block before that place on."""
    key, least = joining.work.shares, joining.n_cached + LEAST_TOKENS
    others = (other for other in waiting if key is not None and other.work.shares == key)
    alike = [(other, _n_common(other, joining, LEAST_TOKENS)) for other in others]
    commons = [n for other, n in alike if n >= max(least, other.n_cached + LEAST_TOKENS)]
    saved = {n: (n - joining.n_cached) * sum(other >= n for other in commons) for n in commons}
    best = max(saved, key=lambda n: saved[n], default=0)
    asked = {place for other, n in alike for place in other.work.checkpoints_at if place <= min(n, best)}
    return ({best} | {n for n in asked if n >= best // BLOCK_TOKENS * BLOCK_TOKENS}) - {0}


def _n_common(waiting: Sequence, other: Sequence, least: int) -> int:
    """Common tokens, without the last one of the other prompt, which is never prefilled, and without those that
    `waiting` has to prefill itself; 0 if fewer than `least`."""
    if (known := waiting.n_common.get(other.uid)) is None:
        ours, theirs = waiting.work.prompt_ids, other.work.prompt_ids
        same, most = 0, min(waiting.n_reusable, len(theirs) - 1)
        if most >= least and ours[least - 1] == theirs[least - 1] and ours[:least] == theirs[:least]:
            same = common_length(ours[:most], theirs[:most])
        known = waiting.n_common[other.uid] = same
    return known


Resume = Callable[[list[Any], Snapshot], list[Any]]
"""Makes new caches, as they were at a snapshot, from those of a sequence that is further by now."""

MOST_OVERTAKEN: Final = 32
"""Most sequences that may pass one that does not fit."""


class WaitingSequences:
    """Sequences in the order of their uids, which is the order of submission, preempted ones included."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._passed: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=lambda waiting: waiting.uid)

    def discard(self, sequence: Sequence) -> None:
        self._sequences = [other for other in self._sequences if other is not sequence]
        self._passed.pop(sequence.uid, None)

    def take(self, fits: Callable[[Sequence], bool]) -> Sequence | None:
        """Take out the sequence that comes next; ``None`` if none fits."""
        for sequence in self._sequences:
            if fits(sequence):
                self.discard(sequence)
                for older in self._sequences:
                    if older.uid < sequence.uid:
                        self._passed[older.uid] = self._passed.get(older.uid, 0) + 1
                return sequence
            if self._passed.get(sequence.uid, 0) >= MOST_OVERTAKEN:
                return None
        return None


class ConcurrentScheduler:
    """Every sequence of the engine: those in `waiting` have no place in the batch; `prefilling` and `decoding` have the
    others, by the generator's uid."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        kv_cost: KVCost,
        width: BatchWidth,
        max_prefilling: int,
        shares_beginnings: bool,
        resume: Resume | None = None,
    ) -> None:
        """
        Args:
            pool: KV memory; sequences in the batch hold the blocks that `kv_cost` counts.
            width: how many sequences may be in the batch.
            max_prefilling: most of them in prefill.
            shares_beginnings: whether a sequence may take over the beginning of another one's cache, or share it.
            resume: makes caches of that beginning, for models that allow it only at a snapshot.
        """
        self._pool = pool
        self._kv_cost = kv_cost
        self._width = width
        self._max_prefilling = max_prefilling
        self._shares_beginnings = shares_beginnings
        self._resume = resume
        self._joining: Sequence | None = None  # neither waiting nor in the batch: joining may break
        self.waiting = WaitingSequences()
        self.prefilling: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.waiting
        if self._joining is not None:
            yield self._joining
        yield from self.in_batch()

    def in_batch(self) -> Iterator[Sequence]:
        yield from self.prefilling.values()
        yield from self.decoding.values()

    def prefilled(self) -> list[Sequence]:
        """Sequences in the batch whose prompt is prefilled and that want no answer. They stay until others were let in,
        which may copy their beginnings."""
        return [sequence for sequence in self.prefilling.values() if sequence.ends_in_prefill]

    def by_stage(self) -> Iterator[tuple[Sequence, Stage]]:
        in_batch: dict[int, Stage] = {sequence.uid: "prefill" for sequence in self.prefilling.values()}
        in_batch |= {sequence.uid: "decode" for sequence in self.decoding.values()}
        for sequence in self:
            yield sequence, in_batch.get(sequence.uid, "waiting")

    # --- into the batch ---

    def let_in(self, generator: Generator) -> None:
        """Move waiting sequences into the batch while there is a place and their blocks are free."""
        while len(self.prefilling) - min(self._leaving(), len(self.prefilled())) < self._max_prefilling:
            if len(self.prefilling) + len(self.decoding) - self._leaving() >= self._width.now:
                break
            self._joining = sequence = self.waiting.take(self._fits)
            if sequence is None:
                break
            sequence.inserted_at = sequence.inserted_at or time.perf_counter()
            if (beginning := self._beginning(sequence)) is not None:
                self._begin_alike(sequence, beginning, generator)
            if self._resume is not None:
                sequence.cut_at |= cuts_for(self.waiting, sequence)
            sequence.join(generator)
            assert sequence.generator_uid is not None
            self.prefilling[sequence.generator_uid] = sequence
            self._joining = None
        self._hold()

    def victim(self) -> Sequence | None:
        """The youngest sequence, if the batch's next step does not fit into the pool; else ``None``.

        A single sequence always fits, unless it alone keeps a stored prefix that is longer than the part it uses.
        """
        in_batch = list(self.in_batch())
        if len(in_batch) == 1 and in_batch[0].prefix is None:
            return None
        if sum(self._cost().values()) <= self._pool.total:
            return None
        return max(in_batch, key=lambda sequence: sequence.uid)

    def _leaving(self) -> int:
        """The number of sequences that a step ends before it prefills, so that their places are free: their next token
        is the last, or they want none.

        Zero while the cause of a broken step is searched: a sequence that breaks the prefill would take its neighbour's
        last token with it, over and over.
        """
        if self._width.is_searching or self._width.most == 1:
            return 0
        return sum(sequence.n_left <= 1 for sequence in self.decoding.values()) + len(self.prefilled())

    def _fits(self, sequence: Sequence) -> bool:
        """True if `sequence` may join, with room for its next block. It waits while its beginning is prefilled."""
        if (beginning := self._beginning(sequence)) is not None and not beginning.is_prefilled:
            return False
        if not (self.decoding or self.prefilling):
            return True
        n_tokens, more = sequence.n_tokens + min(BLOCK_TOKENS, sequence.n_left), 0
        if beginning is not None and beginning.n_shared:
            n_tokens -= beginning.n_shared
            more = beginning.of.prefix is None  # split, its blocks are rounded up twice
        return sum(self._cost(n_tokens).values()) + more <= self._pool.total

    def _beginning(self, sequence: Sequence) -> Beginning | None:
        if self._resume is not None:
            return beginning_at_cut(sequence, self.in_batch())
        return shared_beginning(sequence, self.in_batch()) if self._shares_beginnings else None

    def _begin_alike(self, sequence: Sequence, beginning: Beginning, generator: Generator) -> None:
        """Let a joining sequence share what it can of a beginning, and copy the rest that it does not have itself."""
        uid = beginning.of.generator_uid
        assert uid is not None
        if n_shared := beginning.n_shared:
            sequence.prefix = generator.share(uid, n_shared)
            beginning.of.prefix = beginning.of.prefix or sequence.prefix
        if beginning.at_cut:
            assert self._resume is not None
            caches = self._resume(generator.peek(uid), beginning.of.at_cuts[beginning.n_tokens])
            sequence.take_beginning(caches, beginning.n_tokens, beginning.of)
        elif beginning.n_tokens > sequence.n_cached:
            caches = generator.beginning(uid, beginning.n_tokens)
            sequence.take_beginning(caches, beginning.n_tokens, beginning.of)

    def _hold(self) -> None:
        """Give each holder the blocks of its next step: first those that need fewer than now, then the others."""
        for holder, blocks in sorted(self._cost().items(), key=lambda want: want[1] - self._pool.held(want[0])):
            self._pool.resize(holder, min(blocks, self._pool.held(holder) + self._pool.free))

    def _cost(self, *joining: int) -> dict[Hashable, int]:
        """Blocks of each sequence in the batch, by uid, and of each stored prefix that some of them share. `joining`:
        own tokens of a sequence that would join, with the key ``None``."""
        decoding, prefilling = (
            {sequence.uid: sequence.n_tokens + 1 - sequence.n_shared for sequence in stage.values()}
            for stage in (self.decoding, self.prefilling)
        )
        blocks = self._kv_cost.of_batch(list(decoding.values()), [*prefilling.values(), *joining])
        cost = dict(zip((*decoding, *prefilling, *(None for _ in joining)), blocks, strict=True))
        stored = {sequence.prefix.stored for sequence in self.in_batch() if sequence.prefix is not None}
        return cost | {prefix: self._kv_cost.prefix_blocks(prefix.n_tokens) for prefix in stored}

    # --- out of the batch ---

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence at any stage. The generator must have released it."""
        if sequence.generator_uid is not None:
            self.prefilling.pop(sequence.generator_uid, None)
            self.decoding.pop(sequence.generator_uid, None)
        elif sequence is self._joining:
            self._joining = None
        else:
            self.waiting.discard(sequence)
        self._pool.release(sequence.uid)
        prefix, sequence.prefix = sequence.prefix, None
        others = (other.prefix for other in self.in_batch())
        if prefix is not None and all(other is None or other.stored is not prefix.stored for other in others):
            self._pool.release(prefix.stored)

    def preempt(self, victim: Sequence) -> None:
        """Let a sequence that was in the batch wait again."""
        self._pool.preemptions += 1
        self.drop(victim)
        victim.generator_uid = None
        self.waiting.add(victim)

    def empty(self) -> list[Sequence]:
        """After a step that broke: take every sequence out of the batch."""
        sequences = list(self.in_batch())
        if self._joining is not None:
            sequences.append(self._joining)
        for sequence in sequences:
            self.drop(sequence)
        return sequences
