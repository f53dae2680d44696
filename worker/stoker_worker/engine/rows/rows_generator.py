"""`Generator` over rows with caches of their own, without padding and without copies of long rows. Engine thread.

Owns the way of a row from prefill to decoding. For models whose full attention goes through mlx-lm's function
(`attention.py`); their window and recurrent layers stay in mlx-lm's batch caches.
"""

import logging
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from stoker_shared.text import one_line
from stoker_worker.engine.generator import Prefilled, SequenceStart, TakenOut, TokenOutput
from stoker_worker.engine.rows.attention import install
from stoker_worker.engine.rows.decode_batch import DecodeBatch
from stoker_worker.engine.rows.prefill_rows import PrefillRow, PrefillRows
from stoker_worker.engine.rows.row import Joiner, Row
from stoker_worker.engine.rows.shared_prefix import SharedPrefix, stored_bytes
from stoker_worker.models.cache_probe import can_be_batched, leaves, nested
from stoker_worker.ports.cache_spec import ModelCacheSpec

_CLEAR_STEPS: Final = 512
"""Memory that MLX keeps for reuse is given back after so many steps, as mlx-lm does."""


_log = logging.getLogger(__name__)


class RowsGenerator:
    """Sequences of unequal length, each of which costs its own length."""

    def __init__(self, model: Any, spec: ModelCacheSpec, *, draft_ngram: bool = False) -> None:
        if not install(model):
            raise ValueError("this model's attention cannot be served in rows")
        self._model = model
        self._spec = spec
        self._decode = DecodeBatch(model, draft_ngram=draft_ngram)
        self._prefill = PrefillRows(model, is_together=spec.has_only_full_layers)
        self._next_uid = self._n_steps = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all rows' caches."""
        prefixes = (*self._decode.prefixes, *(row.prefix for row in self._prefill.rows))
        return self._decode.nbytes + self._prefill.nbytes + stored_bytes(prefixes)

    def insert(self, start: SequenceStart) -> int:
        uid = self._next_uid
        self._next_uid += 1
        self._prefill.rows.append(PrefillRow.of(uid, start, self._model, self._spec))
        return uid

    def next(self, chunk_tokens: int) -> tuple[list[Prefilled], list[TokenOutput]]:
        prefilled = self._join_ready()
        outputs = self._decode.step() if len(self._decode) else []
        if chunk_tokens:
            prefilled += self._prefill.next(chunk_tokens)
        self._n_steps += 1
        if self._n_steps % _CLEAR_STEPS == 0:
            mx.clear_cache()
        return prefilled, outputs

    def _join_ready(self) -> list[Prefilled]:
        """Let rows decode whose prompt is prefilled but for its last token, which the step that follows feeds."""
        ready = self._prefill.pop_ready()
        if ready:
            self._decode.join([_joiner(row) for row in ready])
        return [Prefilled(row.uid, row.n_done + 1, at_segment_end=True, at_prompt_end=True) for row in ready]

    def peek(self, uid: int) -> list[Any]:
        row = self._prefill.find(uid)
        return self._decode.caches(uid) if row is None else row.whole

    def beginning(self, uid: int, n_tokens: int) -> list[Any]:
        if not self._prefill.is_together:
            raise NotImplementedError
        caches = self.peek(uid)
        copies = []
        for cache in leaves(caches):
            copy = KVCache()
            copy.keys, copy.values = (array[:, :, :n_tokens] for array in (cache.keys, cache.values))
            copy.offset = n_tokens
            copies.append(copy)
        return nested(caches, iter(copies))

    def share(self, uid: int, n_tokens: int) -> SharedPrefix:
        row = self._prefill.find(uid)
        if row is None:
            return SharedPrefix(self._decode.share(uid, n_tokens).stored, n_tokens)
        if row.prefix is None:
            row.share(n_tokens)
        assert row.prefix is not None
        return SharedPrefix(row.prefix.stored, n_tokens)

    def take_out(self, uid: int) -> TakenOut:
        row = self._prefill.find(uid)
        if row is None:
            return self._decode.take_out(uid)
        self._prefill.rows.remove(row)
        return TakenOut(row.whole, len(row.tokens), None, None)

    def remove(self, uid: int) -> None:
        row = self._prefill.find(uid)
        if row is None:
            self._decode.remove(uid)
        else:
            self._prefill.rows.remove(row)

    def close(self) -> None:
        """Nothing to give back: the caches go with it."""


def _joiner(row: PrefillRow) -> Joiner:
    start = row.start
    how = (start.max_tokens, start.sampler, start.processors, start.end_ids)
    decoding = Row(row.uid, row.tokens, *how, row.prefix, start.guide)
    return Joiner(decoding, row.caches, row.segments[0][0])


def why_not_in_rows(model: Any, spec: ModelCacheSpec) -> str | None:
    """``None`` if `model` has full attention, and runs a step over two rows of unequal length; else the reason."""
    if not spec.full_layers:
        return "it has no full attention"
    if not can_be_batched(model):
        return "mlx-lm cannot put caches of this model's kind into one batch"
    try:
        generator = RowsGenerator(model, spec)
    except ValueError as error:
        return one_line(error)
    try:
        for n_tokens in (8, 10):  # LongCat cannot join those of a token or two
            generator.insert(SequenceStart([n_tokens * [0]], None, [], 1, None, []))
        generator.next(n_tokens)
        generator.next(0)
    except Exception as error:
        _log.debug("this model does not run in rows", exc_info=error)
        return one_line(error)
    finally:
        generator.close()
    return None
