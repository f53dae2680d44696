"""Which rows are in the batch, which wait for a place, and the memory they hold. Engine thread.

Owns the way of a row from waiting into the batch. What rows say, and how they end, is the engine's business.
"""

import time
from collections.abc import Iterator
from typing import Any

from stoker_worker.cache_spec import BLOCK_TOKENS, ModelCacheSpec
from stoker_worker.engine.arrays import PrefixMover
from stoker_worker.engine.batch_width import BatchWidth
from stoker_worker.engine.block_pool import BlockPool
from stoker_worker.engine.generator import Generator
from stoker_worker.engine.pace import PrefillPace
from stoker_worker.engine.pricing import BatchPricing, RowPrices
from stoker_worker.engine.row import Row
from stoker_worker.engine.waiting_rows import WaitingRows
from stoker_worker.ports import Stage


class Roster:
    """Every row of the engine.

    Attributes:
        waiting: those without a place.
        prefilling, decoding: those in the batch, by the generator's uid.
    """

    def __init__(
        self,
        model: Any,
        spec: ModelCacheSpec,
        *,
        pool: BlockPool,
        pricing: BatchPricing,
        pace: PrefillPace,
        width: BatchWidth,
        prefill_rows: int,
    ) -> None:
        """
        Args:
            pool: KV memory; the rows in the batch hold what `pricing` says.
            width: how many rows may be in the batch.
            prefill_rows: most of them in prefill.
        """
        self._model = model
        self._spec = spec
        self._pool = pool
        self._pricing = pricing
        self._pace = pace
        self._width = width
        self._prefill_rows = prefill_rows
        self._joining: Row | None = None  # on its way into the batch
        self._mover: PrefixMover | None = None
        self.waiting = WaitingRows()
        self.prefilling: dict[int, Row] = {}
        self.decoding: dict[int, Row] = {}

    def __iter__(self) -> Iterator[Row]:
        yield from self.waiting
        if self._joining is not None:
            yield self._joining
        yield from self.in_batch()

    def in_batch(self) -> Iterator[Row]:
        yield from self.prefilling.values()
        yield from self.decoding.values()

    def by_stage(self) -> Iterator[tuple[Row, Stage]]:
        """Every row, and where it is; one whose restored prefix is being moved in still waits."""
        in_batch: dict[int, Stage] = {row.uid: "prefill" for row in self.prefilling.values()}
        in_batch |= {row.uid: "decode" for row in self.decoding.values()}
        for row in self:
            yield row, in_batch.get(row.uid, "waiting")

    @property
    def held_bytes(self) -> int:
        return self._pool.used * self._pricing.block_bytes

    # --- into the batch ---

    def let_in(self, generator: Generator) -> None:
        """Move waiting rows into the batch while there is a place and their blocks are free."""
        while len(self.prefilling) < self._prefill_rows:
            if self._joining is None:
                if len(self.prefilling) + len(self.decoding) - self._leaving() >= self._width.now:
                    break
                self._joining = self.waiting.take(self._fits)
                if self._joining is None:
                    break
            row = self._joining
            row.inserted_at = row.inserted_at or time.perf_counter()
            if not self._has_moved_in(row):
                break
            row.join(generator)
            assert row.generator_uid is not None
            self.prefilling[row.generator_uid] = row
            self._joining = None
        self._hold()

    def surplus(self) -> Row | None:
        """The youngest row, while the next step of all rows in the batch does not fit. The last one always fits."""
        if len(self.prefilling) + len(self.decoding) <= 1:
            return None
        prices = self._prices()
        blocks = prices.decoding * len(self.decoding) + prices.prefilling * len(self.prefilling)
        return max(self.in_batch(), key=lambda row: row.uid) if blocks > self._pool.total else None

    def _leaving(self) -> int:
        """Rows whose next token is their last: a step ends them before it prefills, so others may have their places.

        Not while what broke a step is looked for: a row that breaks the prefill would take its neighbour's last token
        with it, over and over.
        """
        if self._width.is_searching or self._width.most == 1:
            return 0
        return sum(row.n_left <= 1 for row in self.decoding.values())

    def _fits(self, row: Row) -> bool:
        """Whether `row` may join, with room for its next block."""
        decoding = [other.n_tokens + 1 for other in self.decoding.values()]
        prefilling = [other.n_tokens + 1 for other in self.prefilling.values()]
        if not (decoding or prefilling):
            return True
        prices = self._pricing.of_batch(decoding, [*prefilling, row.n_tokens + min(BLOCK_TOKENS, row.n_left)])
        return prices.decoding * len(decoding) + prices.prefilling * (len(prefilling) + 1) <= self._pool.total

    def _has_moved_in(self, row: Row) -> bool:
        """Whether the row's restored prefix, if any, is in MLX's arrays now.

        A long one takes several steps: the rows that decode do not wait for all of it.
        """
        prefix = row.work.prefix
        if prefix is None:
            return True
        self._mover = self._mover or PrefixMover(self._model, prefix, self._spec)
        if not self._mover.move(self._pace.move_s(decoding=len(self.decoding))):
            return False
        row.take_prefix(self._mover.caches)
        self._mover = None
        return True

    def _hold(self) -> None:
        """Let the rows in the batch hold what their next step needs: first those that give back, then the others."""
        prices = self._prices()
        wanted = [(row.uid, prices.decoding) for row in self.decoding.values()]
        wanted += [(row.uid, prices.prefilling) for row in self.prefilling.values()]
        for uid, blocks in sorted(wanted, key=lambda want: want[1] - self._pool.held(want[0])):
            self._pool.resize(uid, min(blocks, self._pool.total))

    def _prices(self) -> RowPrices:
        return self._pricing.of_batch(
            [row.n_tokens + 1 for row in self.decoding.values()],
            [row.n_tokens + 1 for row in self.prefilling.values()],
        )

    # --- out of it ---

    def drop(self, row: Row) -> None:
        """Forget a row wherever it is; the generator must have let go of it."""
        if row.generator_uid is not None:
            self.prefilling.pop(row.generator_uid, None)
            self.decoding.pop(row.generator_uid, None)
        elif row is self._joining:
            self._joining = self._mover = None
        else:
            self.waiting.discard(row)
        self._pool.release(row.uid)

    def set_aside(self, row: Row) -> None:
        """Let a row that was in the batch wait again."""
        self.drop(row)
        row.generator_uid = None
        self.waiting.add(row)

    def empty(self) -> list[Row]:
        """After a step that broke: take every row out of the batch."""
        rows = list(self.in_batch())
        if self._joining is not None:
            rows.append(self._joining)
        for row in rows:
            self.drop(row)
        return rows
