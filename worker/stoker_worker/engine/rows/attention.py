"""The one place where a model meets row caches: attention over several rows' keys and values. Engine thread.

A model hands the result of its cache's `update_and_fetch` to `scaled_dot_product_attention`, which it imports from
`mlx_lm.models.base`. That name in the model's own modules is replaced by `attention` here, which knows `RowsKV` and
passes everything else on. The models' code stays as it is.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models import base

from stoker_worker.engine.rows.shared_prefix import attention_after

_NAME: Final = "scaled_dot_product_attention"
_upstream: Final = base.scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a pass's inputs, and which tokens they attend to.

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
    """Keys, or values, of all rows of a pass. Models do no more with them than is defined here; all else raises.

    Attributes:
        parts: in the order of the pass's inputs.
        arrays: of each part, (rows, n_kv_heads, tokens, dim).
        prefixes: of each part, what all its rows begin with, (1, n_kv_heads, tokens, dim); ``None`` for nothing.
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
        """What `function` makes of each part's array and those of `others`; of its prefix and theirs as well."""
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
            own = _tokens(queries, part)
            product = own @ array
            products.append(product if prefix is None else mx.concatenate([own @ prefix, product], axis=-1))
        return _Scores(products)


@dataclass(frozen=True, slots=True)
class _Scores:
    """What a model adds to the scores of its attention: of each part, (rows, n_heads, queries, tokens)."""

    arrays: list[mx.array]


def attention(  # noqa: PLR0917 - models pass them by place
    queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
) -> mx.array:
    """As `mlx_lm.models.base.scaled_dot_product_attention`, for `RowsKV` as well.

    Args:
        queries: (inputs, n_heads, 1, dim) when `keys` is a `RowsKV`.

    Raises:
        ValueError: rows, and a mask that the model has made itself.
    """
    if type(keys) is not RowsKV:
        out: mx.array = _upstream(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        return out
    if mask is not None and type(mask) is not _Scores:
        raise ValueError("the model has a mask of its own")
    outs = []
    for i, part in enumerate(keys.parts):
        if (prefix := keys.prefixes[i]) is not None:
            out = attention_after(
                _tokens(queries, part),
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
            _tokens(queries, part), keys.arrays[i], values.arrays[i], scale=scale, mask=part_mask, sinks=sinks
        )
        outs.append(out.transpose(2, 1, 0, 3) if part.is_chunk else out)
    return outs[0] if len(outs) == 1 else mx.concatenate(outs)


def _tokens(queries: mx.array, part: Part) -> mx.array:
    """The queries of a part's inputs; those of a chunk become the tokens of one sequence."""
    if part.last - part.first < queries.shape[0]:
        queries = queries[part.first : part.last]
    return queries.transpose(2, 1, 0, 3) if part.is_chunk else queries


def _masked(scores: mx.array, mask: Any) -> mx.array:
    """Scores for the tokens that each row has; the least number for the others, as mlx-lm's models have it."""
    if isinstance(mask, str):
        n, n_tokens = scores.shape[2:]
        mask = base.create_causal_mask(n, offset=n_tokens - n)
    least = mx.array(mx.finfo(scores.dtype).min, scores.dtype)
    return scores if mask is None else mx.where(mask, scores, least)


def install(model: Any) -> bool:
    """Let `model` attend to rows; ``False`` when none of its modules uses the name."""
    modules = list(_modules_of(model))
    for module in modules:
        setattr(module, _NAME, attention)
    return bool(modules)


def _modules_of(model: Any) -> Iterator[ModuleType]:
    for name in {type(layer).__module__ for layer in model.modules()}:
        module = sys.modules[name]
        if module is not base and getattr(module, _NAME, None) in (_upstream, attention):
            yield module
