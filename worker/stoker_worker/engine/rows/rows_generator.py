"""`Generator` over rows with caches of their own, without padding and without copies of long rows. Engine thread.

Owns the rows in prefill and a row's way to decoding. If all layers are full attention, the prompt tokens of all rows go
through the model in one pass, as a batch of single tokens; other models get one row after the other. Full attention has
to go through mlx-lm's function (`attention.py`); window and recurrent layers stay in mlx-lm's batch caches.
"""

import logging
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Self

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from stoker_shared.text import one_line
from stoker_worker.engine.generator import Generator, Prefilled, SequenceStart, TakenOut, TokenOutput
from stoker_worker.engine.kv_memory import GROW_STEPS, room_for
from stoker_worker.engine.rows.attention import ChunkCache, install
from stoker_worker.engine.rows.decode_batch import DecodeBatch
from stoker_worker.engine.rows.row import Row
from stoker_worker.engine.rows.shared_prefix import SharedPrefix, split, stored_bytes
from stoker_worker.engine.transfer import mlx_dtype
from stoker_worker.models.cache_probe import can_be_batched, leaves, nested
from stoker_worker.ports.cache_spec import LayerKind, LayerSpec, ModelCacheSpec


@dataclass(eq=False)
class PrefillRow:
    """A row in prefill.

    Attributes:
        caches: the model's own, one per layer.
        prefix: the tokens before those in `caches`.
        tokens: those in both.
        segments: token ids to prefill; the last segment's last token is left for the first step of decoding.
    """

    uid: int
    start: SequenceStart
    caches: list[Any]
    tokens: list[int]
    segments: list[list[int]]
    prefix: SharedPrefix | None

    @classmethod
    def of(cls, uid: int, start: SequenceStart, model: Any, spec: ModelCacheSpec) -> Self:
        segments = [list(segment) for segment in start.segments]
        if len(segments[-1]) > 1:
            segments.append([segments[-1].pop()])
        caches = start.caches
        if caches is None:
            caches = make_prompt_cache(model)
        tokens = list(start.cached_ids)
        n_shared = 0 if start.prefix is None else start.prefix.n_tokens
        n_own = len(tokens) + sum(map(len, segments)) - n_shared
        _make_room(caches, spec, n_own, start.max_tokens, n_shared)
        return cls(uid, start, caches, tokens, segments, start.prefix)

    @property
    def is_ready(self) -> bool:
        """True if only the prompt's last token is left."""
        return len(self.segments) == 1 and len(self.segments[0]) == 1

    @property
    def n_done(self) -> int:
        return len(self.tokens) - len(self.start.cached_ids)

    @property
    def whole(self) -> list[Any]:
        """Its caches from its first token on, not evaluated."""
        if self.prefix is None:
            return self.caches
        return nested(self.caches, iter(self.prefix.whole(list(leaves(self.caches)))))

    def share(self, n_tokens: int) -> None:
        """Let other rows refer to its first `n_tokens` tokens."""
        self.prefix, self.caches = split(self.caches, n_tokens)

    def decoding(self) -> Row:
        start = self.start
        how = (start.max_tokens, start.sampler, start.processors, start.end_ids)
        return Row(self.uid, self.tokens, *how, self.prefix, start.guide)

    def take(self, most: int) -> list[int]:
        """Take out the tokens of the next pass; they are in the caches after it."""
        segment = self.segments[0]
        taken = segment[:most]
        del segment[:most]
        if not segment:
            self.segments.pop(0)
        return taken


class PrefillRows:
    """The rows in prefill, by arrival. `is_together`: tokens of several rows may go through the model in one pass."""

    def __init__(self, model: Any, *, is_together: bool) -> None:
        self._model = model
        self.is_together = is_together
        self.rows: list[PrefillRow] = []

    @property
    def nbytes(self) -> int:
        return sum(int(cache.nbytes) for row in self.rows for cache in leaves(row.caches))

    def find(self, uid: int) -> PrefillRow | None:
        return next((row for row in self.rows if row.uid == uid), None)

    def pop_ready(self) -> list[PrefillRow]:
        ready = [row for row in self.rows if row.is_ready]
        self.rows = [row for row in self.rows if not row.is_ready]
        return ready

    def next(self, chunk_tokens: int) -> list[Prefilled]:
        n_segments = [len(row.segments) for row in self.rows]
        taken = [row.take(chunk_tokens) for row in self.rows]
        if self.is_together and (len(self.rows) > 1 or any(row.prefix for row in self.rows)):
            self._prefill_together(taken)
        else:
            for row, ids in zip(self.rows, taken, strict=True):
                logits = self._model(mx.array([ids]), cache=row.caches)
                if row.start.scorer is not None:
                    row.start.scorer.take(logits[0], len(row.tokens))
                mx.eval([cache.state for cache in row.caches])
        for row, ids in zip(self.rows, taken, strict=True):
            row.tokens += ids
        return [
            Prefilled(row.uid, row.n_done, at_segment_end=len(row.segments) < before, at_prompt_end=False)
            for row, before in zip(self.rows, n_segments, strict=True)
        ]

    def _prefill_together(self, taken: list[list[int]]) -> None:
        sizes = [len(ids) for ids in taken]
        inputs = mx.array([token for ids in taken for token in ids])
        offset = mx.array([len(row.tokens) + i for row, n in zip(self.rows, sizes, strict=True) for i in range(n)])
        of_layers = zip(*(leaves(row.caches) for row in self.rows), strict=True)
        prefixes = [row.prefix for row in self.rows]
        chunks = (ChunkCache(caches, sizes, offset, prefixes, layer) for layer, caches in enumerate(of_layers))
        logits = self._model(inputs[:, None], cache=nested(self.rows[0].caches, chunks))
        for row, end, n in zip(self.rows, accumulate(sizes), sizes, strict=True):
            if row.start.scorer is not None:
                row.start.scorer.take(logits[end - n : end, 0], len(row.tokens))
        mx.eval([cache.state for row in self.rows for cache in row.caches])


def _make_room(caches: list[Any], spec: ModelCacheSpec, n_tokens: int, n_left: int, n_shared: int) -> None:
    """Give the caches of full attention room for `n_tokens` tokens; otherwise each chunk would copy all chunks before
    it. New arrays have room for some of `n_left` more. The caches' first `n_shared` tokens are dropped.

    Evaluated: a copy of another row's cache that is yet to be made would keep that row from being updated in place.
    """
    room = room_for(n_tokens, n_left, is_shared=False)
    least = min(room, n_tokens + GROW_STEPS)  # then a row grows while it decodes
    for cache, layer in zip(leaves(caches), spec.layers, strict=True):
        if layer.kind == LayerKind.FULL:
            shape = (1, layer.n_kv_heads, room)
            cache.keys, cache.values = (
                _moved(array, range(n_shared, cache.offset), (*shape, dim), layer, spec, least=least)
                for array, dim in ((cache.keys, layer.key_dim), (cache.values, layer.value_dim))
            )
            cache.offset -= n_shared
            mx.eval(cache.keys, cache.values)


def _moved(
    array: mx.array | None, kept: range, shape: tuple[int, ...], layer: LayerSpec, spec: ModelCacheSpec, *, least: int
) -> mx.array:
    """The tokens `kept` of `array`: in the same array if it has room for `least` tokens, else in a new one of
    `shape`."""
    if array is not None and not kept.start and array.shape[2] >= least:
        return array
    other = mx.zeros(shape, getattr(mx, spec.dtype)).view(mlx_dtype(layer, spec))
    if array is not None:
        other[:, :, : len(kept)] = array[:, :, kept.start : kept.stop]
    return other


_CLEAR_STEPS: Final = 512
"""MLX's memory for reuse is freed after so many steps, as mlx-lm does."""


_log = logging.getLogger(__name__)


class RowsGenerator(Generator):
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
        """Let rows decode whose prompt is prefilled but for its last token, which the following step feeds."""
        ready = self._prefill.pop_ready()
        if ready:
            decoding = [row.decoding() for row in ready]
            self._decode.join(decoding, [row.caches for row in ready], [row.segments[0][0] for row in ready])
        return [Prefilled(row.uid, row.n_done + 1, at_segment_end=True, at_prompt_end=True) for row in ready]

    def peek(self, uid: int) -> list[Any]:
        row = self._prefill.find(uid)
        return self._decode.caches(uid) if row is None else row.whole

    def beginning(self, uid: int, n_tokens: int) -> list[Any]:
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
        """Nothing to free: the caches go with it."""


def why_not_in_rows(model: Any, spec: ModelCacheSpec) -> str | None:
    """``None`` if `model` has full attention and runs a step over two rows of unequal length; else the reason."""
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
