"""The one place where a model meets rows: the caches that it sees in a pass, and attention over several rows' caches.

A model hands the result of its cache's `update_and_fetch` to `scaled_dot_product_attention`, which it imports from
`mlx_lm.models.base`. That name in the model's own modules is replaced by `attention` here, which handles `RowsKV` and
passes everything else on. The models' code stays as it is. Engine thread.

The caches have the part of mlx-lm's cache protocol that models use: `offset`, `make_mask` and `update_and_fetch`. They
own no keys and values: `StepCache` serves a step of the decoding rows' groups, `ChunkCache` some prompt tokens of rows
that keep mlx-lm's own caches.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache

from stoker_worker.engine.rows.groups import RowGroup
from stoker_worker.engine.rows.shared_prefix import SharedPrefix

_NAME: Final = "scaled_dot_product_attention"
_upstream: Final = base.scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a pass's inputs, and the tokens they attend to.

    Attributes:
        first, last: the inputs [first, last) along the batch axis.
        mask: of a step: which tokens each row has, (rows, 1, 1, tokens); ``None`` for all. Of a chunk: ``"causal"``.
        is_chunk: the inputs are consecutive tokens of one row; else they are one token each of several rows.
    """

    first: int
    last: int
    mask: Any
    is_chunk: bool


@dataclass(frozen=True, slots=True)
class RowsKV:
    """Keys, or values, of all rows of a pass, with the few operations that models use on them; all others raise.

    Attributes:
        parts: in the order of the pass's inputs.
        arrays: of each part, (rows, n_kv_heads, tokens, dim).
        prefixes: the common prefix of each part's rows, (1, n_kv_heads, tokens, dim); ``None`` if there is none.
    """

    parts: list[Part]
    arrays: list[mx.array]
    prefixes: list[mx.array | None]

    @property
    def dtype(self) -> mx.Dtype:
        return self.arrays[0].dtype

    def astype(self, dtype: mx.Dtype) -> "RowsKV":
        prefixes = [None if prefix is None else prefix.astype(dtype) for prefix in self.prefixes]
        return RowsKV(self.parts, [array.astype(dtype) for array in self.arrays], prefixes)

    def combined(self, function: Callable[..., mx.array], *others: "RowsKV") -> "RowsKV":
        """Apply `function` to each part's array and those of `others`, and to the prefixes."""
        all_of_them = (self, *others)
        arrays = [function(*of_part) for of_part in zip(*(one.arrays for one in all_of_them), strict=True)]
        prefixes = [
            None if of_part[0] is None else function(*of_part)
            for of_part in zip(*(one.prefixes for one in all_of_them), strict=True)
        ]
        return RowsKV(self.parts, arrays, prefixes)

    def swapaxes(self, first: int, second: int) -> "_Factor":
        prefixes = [None if prefix is None else prefix.swapaxes(first, second) for prefix in self.prefixes]
        return _Factor(self.parts, [array.swapaxes(first, second) for array in self.arrays], prefixes)


class _Factor(mx.array):
    """The right factor of a product with some inputs' queries. An array for its type only: it has no elements."""

    def __init__(self, parts: list[Part], arrays: list[mx.array], prefixes: list[mx.array | None]) -> None:
        super().__init__([])
        self._of_parts = list(zip(parts, arrays, prefixes, strict=True))

    def __rmatmul__(self, queries: mx.array) -> "_Scores":  # type: ignore[misc]  # Python asks the subclass first
        products = []
        for part, array, prefix in self._of_parts:
            own = _of_part(queries, part)
            product = own @ array
            products.append(product if prefix is None else mx.concatenate([own @ prefix, product], axis=-1))
        return _Scores(products)


@dataclass(frozen=True, slots=True)
class _Scores:
    """A model's additions to its attention scores, for each part: (rows, n_heads, queries, tokens)."""

    arrays: list[mx.array]


def attention(  # noqa: PLR0917 - models pass them by place
    queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
) -> mx.array:
    """As `mlx_lm.models.base.scaled_dot_product_attention`, for `RowsKV` as well: then queries are (inputs, n_heads, 1,
    dim). Raises `ValueError` for rows with a mask that the model has made itself."""
    if type(keys) is not RowsKV:
        out: mx.array = _upstream(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        return out
    if mask is not None and type(mask) is not _Scores:
        raise ValueError("the model has a mask of its own")
    outs = []
    for i, part in enumerate(keys.parts):
        if (prefix := keys.prefixes[i]) is not None:
            out = attention_after(
                _of_part(queries, part),
                (prefix, values.prefixes[i]),
                (keys.arrays[i], values.arrays[i]),
                scale,
                mask=part.mask,
                added=None if mask is None else mask.arrays[i],
                sinks=sinks,
            )
            outs.append(out)
            continue
        part_mask = part.mask if mask is None else _masked(mask.arrays[i], part.mask)
        out = mx.fast.scaled_dot_product_attention(
            _of_part(queries, part), keys.arrays[i], values.arrays[i], scale=scale, mask=part_mask, sinks=sinks
        )
        outs.append(out.transpose(2, 1, 0, 3) if part.is_chunk else out)
    return outs[0] if len(outs) == 1 else mx.concatenate(outs)


def attention_after(
    queries: mx.array,
    prefix: tuple[mx.array, mx.array],
    own: tuple[mx.array, mx.array],
    scale: float,
    *,
    mask: mx.array | None,
    added: mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of one token of each row to a prefix of all rows and to tokens of its own.

    All rows' queries go through the prefix as one product, so it is read once. One softmax goes over all scores.

    Args:
        queries: (rows, n_heads, 1, dim).
        prefix: keys and values, (1, n_kv_heads, n_tokens, dim).
        own: keys and values, (rows, n_kv_heads, own tokens, dim).
        mask: which of its own tokens each row has, (rows, 1, 1, own tokens); ``None`` for all.
        added: to the scores, (rows, n_heads, 1, n_tokens + own tokens).
        sinks: a score of each head for no token, (n_heads,).
    """
    (first_keys, first_values), (keys, values) = prefix, own
    (n_rows, n_heads, _, dim), n_kv_heads, n_first = queries.shape, keys.shape[1], first_keys.shape[2]
    repeats = n_heads // n_kv_heads
    queries = (queries * scale).reshape(n_rows, n_kv_heads, repeats, dim)
    scores = queries @ keys.swapaxes(-1, -2)
    if mask is not None:
        scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
    scores = mx.concatenate([_of_all(queries, first_keys.swapaxes(-1, -2)), scores], axis=-1)
    if added is not None:
        scores = scores + added.reshape(scores.shape)
    if sinks is not None:
        sink = mx.broadcast_to(sinks.reshape(1, n_kv_heads, repeats, 1), (*scores.shape[:-1], 1))
        scores = mx.concatenate([scores, sink.astype(scores.dtype)], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    n_all = n_first + keys.shape[2]
    out = _of_all(weights[..., :n_first], first_values) + weights[..., n_first:n_all] @ values
    return out.reshape(n_rows, n_heads, 1, values.shape[-1])


def _of_all(factors: mx.array, of_prefix: mx.array) -> mx.array:
    """The product of (rows, n_kv_heads, repeats, m) and (1, n_kv_heads, m, n): rows and repeats are one axis in it."""
    n_rows, n_kv_heads, repeats, m = factors.shape
    together = factors.swapaxes(0, 1).reshape(n_kv_heads, n_rows * repeats, m)
    return (together @ of_prefix[0]).reshape(n_kv_heads, n_rows, repeats, -1).swapaxes(0, 1)


def _of_part(array: mx.array, part: Part) -> mx.array:
    """Queries, keys or values of a part's inputs; those of a chunk become the tokens of one sequence."""
    if part.last - part.first < array.shape[0]:
        array = array[part.first : part.last]
    return array.transpose(2, 1, 0, 3) if part.is_chunk else array


def _masked(scores: mx.array, mask: Any) -> mx.array:
    """Scores for the tokens that each row has; the least number for the others, as in mlx-lm's models."""
    if isinstance(mask, str):
        n, n_tokens = scores.shape[2:]
        mask = base.create_causal_mask(n, offset=n_tokens - n)
    least = mx.array(mx.finfo(scores.dtype).min, scores.dtype)
    return scores if mask is None else mx.where(mask, scores, least)


def install(model: Any) -> bool:
    """Let `model` attend to rows; ``False`` if none of its modules uses the name."""
    modules = list(_modules_of(model))
    for module in modules:
        setattr(module, _NAME, attention)
    return bool(modules)


def _modules_of(model: Any) -> Iterator[ModuleType]:
    for name in {type(layer).__module__ for layer in model.modules()}:
        module = sys.modules[name]
        if module is not base and getattr(module, _NAME, None) in (_upstream, attention):
            yield module


class _LayerCache:
    def make_mask(self, n_tokens: int, return_array: bool = False, window_size: int | None = None) -> None:
        """No mask: `Part` has each row's. Raises `ValueError` if the model asks for another, as for a window."""
        if window_size is not None or n_tokens != 1:
            raise ValueError("the model asks for a mask over all rows")


class Step:
    """The values that all layers of one step share.

    Attributes:
        groups: all decoding rows, in the order of the pass's inputs.
        offset: the place of each input in its row, (inputs,), or one number for all.
        parts: the groups' places in the pass.
    """

    def __init__(self, groups: list[RowGroup]) -> None:
        self.groups = groups
        self.offset: Any = None
        self.parts: list[Part] = []

    def begin(self, sizes: Sequence[int]) -> None:
        """`sizes`: inputs of each row of a group; more than one only for a row alone."""
        places = [
            group.n_shared + length + i
            for group, size in zip(self.groups, sizes, strict=True)
            for length in group.lengths
            for i in range(size)
        ]
        self.offset = places[0] if len(set(places)) == 1 else mx.array(places)
        self.parts = []
        first = 0
        for group, size in zip(self.groups, sizes, strict=True):
            group.begin_step(size)
            last = first + size * len(group)
            is_chunk = size > 1
            self.parts.append(Part(first, last, "causal" if is_chunk else group.mask, is_chunk=is_chunk))
            first = last


class StepCache(_LayerCache):
    """One layer of all decoding rows; an input is a row's next token, or a draft of one after it."""

    def __init__(self, step: Step, layer: int) -> None:
        self._step = step
        self._layer = layer

    @property
    def offset(self) -> Any:
        return self._step.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowsKV, RowsKV]:
        """`keys`, `values`: (inputs, n_kv_heads, 1, dim)."""
        arrays = [
            group.put(self._layer, *(_of_part(array, part) for array in (keys, values)))
            for group, part in zip(self._step.groups, self._step.parts, strict=True)
        ]
        return self._rows_kv(arrays)

    def keys_and_values(self) -> tuple[RowsKV, RowsKV]:
        return self._rows_kv([group.keys_and_values(self._layer) for group in self._step.groups])

    def _rows_kv(self, arrays: list[tuple[mx.array, mx.array]]) -> tuple[RowsKV, RowsKV]:
        prefixes: list[tuple[mx.array, mx.array] | tuple[None, None]] = []
        for i, (group, part) in enumerate(zip(self._step.groups, self._step.parts, strict=True)):
            if group.prefix is None or part.is_chunk:
                prefixes.append((None, None))
            else:
                prefixes.append(group.prefix.layer(self._layer))
            if group.prefix is not None and part.is_chunk:
                arrays[i] = group.prefix.before(self._layer, arrays[i])
        return _rows_kv(self._step.parts, arrays, prefixes)


class ChunkCache(_LayerCache):
    """One layer of some rows in prefill; an input is one token of one row, and a row's inputs follow each other."""

    def __init__(
        self,
        caches: Sequence[KVCache],
        sizes: Sequence[int],
        offset: mx.array,
        prefixes: Sequence[SharedPrefix | None],
        layer: int,
    ) -> None:
        """
        Args:
            sizes: inputs of each row.
            offset: the place of each input in its row, (inputs,).
            prefixes: the tokens before each row's cache.
        """
        self.offset = offset
        self._caches = caches
        self._sizes = sizes
        self._prefixes = prefixes
        self._layer = layer

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowsKV, RowsKV]:
        """`keys`, `values`: (inputs, n_kv_heads, 1, dim)."""
        first = 0
        for cache, size in zip(self._caches, self._sizes, strict=True):
            last = first + size
            # A row's inputs become the tokens of one sequence: (1, n_kv_heads, size, dim).
            cache.update_and_fetch(*(array[first:last].transpose(2, 1, 0, 3) for array in (keys, values)))
            first = last
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[RowsKV, RowsKV]:
        parts, first = [], 0
        for size in self._sizes:
            parts.append(Part(first, first + size, "causal" if size > 1 else None, is_chunk=True))
            first += size
        # A chunk has so many queries that copying a layer's prefix for it costs little.
        arrays = [
            own if prefix is None else prefix.before(self._layer, own)
            for prefix, own in zip(self._prefixes, (cache.keys_and_values() for cache in self._caches), strict=True)
        ]
        return _rows_kv(parts, arrays, [(None, None) for _ in parts])


def _rows_kv(
    parts: list[Part],
    arrays: list[tuple[mx.array, mx.array]],
    prefixes: Sequence[tuple[mx.array, mx.array] | tuple[None, None]],
) -> tuple[RowsKV, RowsKV]:
    (keys, values), (first_keys, first_values) = zip(*arrays, strict=True), zip(*prefixes, strict=True)
    return RowsKV(parts, list(keys), list(first_keys)), RowsKV(parts, list(values), list(first_values))
