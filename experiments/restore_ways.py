"""EXP-006.1: other layouts of a cache, and other ways to gather its blocks, beside the product's, in turn. No model.

A layout only changes the order of a token's heads and elements in the files and in memory. So each is a cache
specification of its own over the same bytes, and the product's own code saves and restores it. A gather reads each
block into memory of its own with MLX's reader, verifies it, and joins the blocks in MLX.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from common import Json, in_turn, note, ratios, spread
from synthetic_cache import Contents, SavedAgent, as_numpy, same, saved_agent, smollm2_layers
from xxhash import xxh3_128

from stoker_worker.memory.blocks import BlockChain, CachePiece, read_metadata
from stoker_worker.memory.lookup import n_readers
from stoker_worker.ports import LayerKV
from stoker_worker.ports.cache_spec import BLOCK_TOKENS, LayerKind, LayerSpec, ModelCacheSpec

LAYERS, HEADS, DIM = 30, 3, 64
PRODUCT = "as the product does it"
Pairs = list[tuple[Any, Any]]
"""Keys and values of each layer; in MLX (1, heads, tokens and room for more, dim)."""


@dataclass(frozen=True)
class Layout:
    """
    Attributes:
        spec: the layers, heads and dims that the files then have.
        merged: makes the arrays to save from those of the product's layout.
        split: makes each layer's keys and values from the restored arrays.
    """

    spec: ModelCacheSpec
    merged: Callable[[tuple[LayerKV, ...]], Pairs]
    split: Callable[[Pairs], Pairs]


def _spec(n_layers: int, heads: int, dim: int = DIM) -> ModelCacheSpec:
    return ModelCacheSpec((LayerSpec(LayerKind.FULL, heads, dim, dim),) * n_layers, "float32")


def _paired(arrays: Iterable[Any]) -> Pairs:
    one_by_one = iter(arrays)
    return list(zip(one_by_one, one_by_one, strict=True))


def _tokens_first(array: Any) -> Any:
    """(heads, tokens, dim) as (1, tokens, heads * dim)."""
    return np.ascontiguousarray(array.transpose(1, 0, 2)).reshape(1, array.shape[1], -1)


def _heads_first(array: Any) -> Any:
    """The opposite in MLX, as a view."""
    return array.reshape(1, array.shape[2], HEADS, DIM).transpose(0, 2, 1, 3)


LAYOUTS = {
    "K and V of a layer in one array": Layout(  # of two layers, because the product's files hold pairs of arrays
        _spec(LAYERS // 2, 2 * HEADS),
        lambda layers: _paired(np.concatenate(pair) for pair in layers),
        lambda pairs: [(one[:, :HEADS], one[:, HEADS:]) for one in chain.from_iterable(pairs)],
    ),
    "all layers in one array for K and one for V": Layout(
        _spec(1, LAYERS * HEADS),
        lambda layers: _paired(np.concatenate(side) for side in zip(*layers, strict=True)),
        lambda pairs: _paired(side[:, at : at + HEADS] for at in range(0, LAYERS * HEADS, HEADS) for side in pairs[0]),
    ),
    "token by token (token-major)": Layout(
        _spec(LAYERS, 1, HEADS * DIM),
        lambda layers: _paired(map(_tokens_first, chain.from_iterable(layers))),
        lambda pairs: _paired(map(_heads_first, chain.from_iterable(pairs))),
    ),
}


class Gather:
    """Blocks in memory of their own, joined with room for one more block, as the product's arrays have."""

    def __init__(self, saved: SavedAgent, *, compiled: bool = False) -> None:
        import mlx.core as mx

        chain_of = BlockChain(saved.model.fingerprint, None, saved.ids)
        found = [(chain_of.parent(n), chain_of.block(n)) for n in range(chain_of.n_blocks)]
        self._pieces = [CachePiece("block", chain_of.model, saved.model.spec, *one) for one in found]
        self._paths = chain_of.paths(saved.store.parts.blocks.path_of)
        self._threads = ThreadPoolExecutor(n_readers(False))
        layer = saved.model.spec.layers[0]
        self._room = mx.zeros((layer.n_kv_heads, BLOCK_TOKENS, layer.key_dim))
        self._joined = mx.compile(self._concatenated) if compiled else self._concatenated

    def pairs(self) -> Pairs:
        return _paired(array[None] for array in self._joined(self._blocks()))

    def _concatenated(self, blocks: list[list[Any]]) -> list[Any]:
        import mlx.core as mx

        return [mx.concatenate([*parts, self._room], axis=1) for parts in zip(*blocks, strict=True)]

    def _blocks(self) -> list[list[Any]]:
        """Keys and values of all layers, by block; evaluated and verified."""
        import mlx.core as mx

        found = [mx.load(str(path), format="safetensors") for path in self._paths]
        blocks = [
            [tensors[tensor.name] for tensor in piece.layout.tensors]
            for piece, tensors in zip(self._pieces, found, strict=True)
        ]
        mx.eval(blocks)
        list(self._threads.map(self._verify, self._pieces, self._paths, blocks))
        return blocks

    def _verify(self, piece: CachePiece, path: Path, block: list[Any]) -> None:
        digest = xxh3_128(piece.header)
        for array in block:
            digest.update(np.asarray(array))
        with open(path, "rb", buffering=0) as file:
            if read_metadata(file)["checksum"] != digest.hexdigest():
                raise RuntimeError("corrupt or foreign")


def against_other_ways(folder: Path, *, blocks: int, rounds: int) -> Json:
    """Each way in turn: from files in the page cache to arrays that have taken one more token.

    A way whose arrays are parts of a larger one pays for it with that token: MLX updates no array in place that
    another one shares.
    """
    n_tokens = blocks * BLOCK_TOKENS
    exact = {}
    with ExitStack() as opened:
        saved = opened.enter_context(saved_agent(folder / "product", smollm2_layers(LAYERS), n_tokens))
        ways: dict[str, Callable[[], Pairs]] = {
            PRODUCT: partial(_restored, saved),
            "with a pause before each array": partial(_with_each_pause, saved),
            "`mx.concatenate` for each layer": Gather(saved).pairs,
            "the same under `mx.compile`": Gather(saved, compiled=True).pairs,
        }
        for name, layout in LAYOUTS.items():
            contents = Contents(saved.contents.memory, tuple(layout.merged(saved.contents.layers)), ())
            other = opened.enter_context(saved_agent(folder / name, layout.spec, n_tokens, contents))
            ways[name] = partial(_split, layout, partial(_restored, other))
            if len(layout.spec.layers) == 1:
                ways["one `mx.concatenate` of all layers"] = partial(_split, layout, Gather(other).pairs)
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        note(f"{len(ways)} ways of restoring {blocks} blocks")
        for number, name in in_turn(list(ways), rounds, warm_up=1):
            took, pairs = _until_a_token_more(ways[name], n_tokens)
            if number >= 0:
                samples[name].append(took)
            else:
                got = [tuple(as_numpy(side)[0] for side in pair) for pair in pairs]
                exact[name] = same(got, saved.contents.layers, n_tokens)
            del pairs
    base = [sum(took) for took in samples[PRODUCT]]
    rows = [
        {"name": name, "exact": exact[name], "restore_ms": spread([took[0] for took in found]),
         "token_ms": spread([took[1] for took in found]),
         "gain": ratios(base, [sum(took) for took in found])}
        for name, found in samples.items()
    ]  # fmt: skip
    mb = round(n_tokens * saved.model.spec.bytes_per_token / 1e6, 1)
    return {"blocks": blocks, "layers": LAYERS, "mb": mb, "rows": rows}


def _split(layout: Layout, pairs: Callable[[], Pairs]) -> Pairs:
    return layout.split(pairs())


def _restored(saved: SavedAgent) -> Pairs:
    return [(cache.keys, cache.values) for cache in saved.caches(saved.restore(len(saved.ids)))]


def _with_each_pause(saved: SavedAgent) -> Pairs:
    """As the product did until it was compared here."""
    from stoker_worker.engine import transfer

    with patch.object(transfer, "_PAUSE_BYTES", 0):
        return _restored(saved)


def _until_a_token_more(way: Callable[[], Pairs], n_tokens: int) -> tuple[tuple[float, float], Pairs]:
    """Milliseconds of the restore, evaluated, and of the next token's place in it; and the arrays."""
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache

    begin = time.perf_counter()
    pairs = way()
    mx.eval(pairs)
    restored = time.perf_counter()
    caches = []
    token = mx.zeros((1, HEADS, 1, DIM))
    for _ in range(len(pairs)):
        cache = KVCache()
        cache.keys, cache.values = pairs.pop(0)
        cache.offset = n_tokens
        cache.update_and_fetch(token, token)
        caches.append(cache)
    mx.eval([(cache.keys, cache.values) for cache in caches])
    end = time.perf_counter()
    took = (1000 * (restored - begin), 1000 * (end - restored))
    return took, [(cache.keys, cache.values) for cache in caches]
