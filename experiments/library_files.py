"""Cache files by the `safetensors` library, with the same checks, beside the product's own code. For EXP-006; no MLX.

The library's files hold the same tensors and metadata; only the order in their headers is the library's own, so the
checksum is over the product's header and the tensors. The library reads in two forms: tensor by tensor from a mapped
file (`safe_open`), or the whole file at once (`load`). It writes from a copy of each tensor (`save_file`), since a
block's part of the engine's arrays has gaps.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from common import Json, in_turn, ratios, spread, timed
from synthetic_cache import Contents, smollm2_layers
from xxhash import xxh3_128

from stoker_worker.memory.blocks import BlockChain, CachePiece, bytes_of, empty_layers
from stoker_worker.memory.files import write_all
from stoker_worker.memory.lookup import n_readers
from stoker_worker.ports import LayerKV
from stoker_worker.ports.cache_spec import BLOCK_TOKENS, ModelCacheSpec


@dataclass(frozen=True)
class BlockFiles:
    """The first blocks of some tokens: as files, and as arrays that they are read into.

    Attributes:
        layers: the saved arrays.
        into: the arrays to fill, of `n_blocks` blocks.
    """

    chain: BlockChain
    spec: ModelCacheSpec
    layers: tuple[LayerKV, ...]
    into: tuple[LayerKV, ...]
    n_blocks: int

    @cached_property
    def pieces(self) -> list[CachePiece]:
        found = [(self.chain.parent(n), self.chain.block(n)) for n in range(self.n_blocks)]
        return [CachePiece("block", self.chain.model, self.spec, *one) for one in found]

    @cached_property
    def heads(self) -> list[tuple[memoryview, int]]:
        """The bytes of each head to fill, and the bytes of a token in it."""
        heads = [head for side in chain.from_iterable(self.into) for head in side]
        return [(bytes_of(head), head.shape[-1] * head.itemsize) for head in heads]

    def own_write(self, path: Path, n: int) -> None:
        with open(path, "wb", buffering=0) as file:
            write_all(file.fileno(), self.pieces[n].encode(self.layers, n * BLOCK_TOKENS))

    def library_write(self, path: Path, n: int) -> None:
        from safetensors.numpy import save_file

        piece, start = self.pieces[n], n * BLOCK_TOKENS
        digest, tensors = xxh3_128(piece.header), {}
        for tensor, side in zip(piece.layout.tensors, chain.from_iterable(self.layers), strict=True):
            array = tensors[tensor.name] = np.ascontiguousarray(side[:, start : start + BLOCK_TOKENS])
            digest.update(array)
        save_file(tensors, path, {**_metadata(piece.header), "checksum": digest.hexdigest()})

    def own_read(self, path: Path, n: int) -> None:
        start, stop = n * BLOCK_TOKENS, (n + 1) * BLOCK_TOKENS
        fault = self.pieces[n].load(path, [head[start * size : stop * size] for head, size in self.heads])
        if fault is not None:
            raise RuntimeError(fault)

    def mapped_read(self, path: Path, n: int) -> None:
        from safetensors import safe_open

        with safe_open(path, framework="numpy") as file:
            self._fill(n, file.metadata(), set(file.keys()), file.get_tensor)

    def whole_read(self, path: Path, n: int) -> None:
        from safetensors.numpy import load

        content = path.read_bytes()
        tensors = load(content)
        self._fill(n, _metadata(content), set(tensors), tensors.__getitem__)

    def _fill(self, n: int, metadata: dict[str, str], names: set[str], tensor_of: Callable[[str], Any]) -> None:
        piece, start = self.pieces[n], n * BLOCK_TOKENS
        digest = xxh3_128(piece.header)
        is_it = {**metadata, "checksum": "0" * 32} == _metadata(piece.header)
        is_it = is_it and names == {tensor.name for tensor in piece.layout.tensors}
        for tensor, side in zip(piece.layout.tensors, chain.from_iterable(self.into), strict=True):
            array = tensor_of(tensor.name)
            is_it = is_it and array.shape == tensor.shape and array.dtype == tensor.travel_dtype
            digest.update(array)
            side[:, start : start + BLOCK_TOKENS] = array
        if not is_it or digest.hexdigest() != metadata["checksum"]:
            raise RuntimeError("corrupt or foreign")


def against_library(folder: Path, *, quick: bool) -> Json:
    """Both ways on random blocks in SmolLM2's shape."""
    spec = smollm2_layers(30)
    counts = (1, 2) if quick else (1, 32)
    random, n_tokens = np.random.default_rng(1), max(counts) * BLOCK_TOKENS
    layers = Contents.random(spec, n_tokens, seed=1).layers
    blocks = BlockChain("ab" * 32, None, tuple(random.integers(2, 40_000, n_tokens).tolist()))
    rounds = 3 if quick else 15
    return {"rows": [_measured(blocks, spec, layers, folder / f"{n}", n_blocks=n, rounds=rounds) for n in counts]}


def _measured(
    blocks: BlockChain, spec: ModelCacheSpec, layers: tuple[LayerKV, ...], folder: Path, *, n_blocks: int, rounds: int
) -> Json:
    """Write and read by each way, in turn. The files stay in the page cache; no syncs."""
    n_tokens = n_blocks * BLOCK_TOKENS
    files = BlockFiles(blocks.up_to(n_tokens), spec, layers, empty_layers(spec, n_tokens), n_blocks)
    folder.mkdir(parents=True)
    own, library = ([folder / f"{way}-{n}" for n in range(n_blocks)] for way in ("own", "library"))
    reads = {"own": (files.own_read, own), "mapped": (files.mapped_read, library), "whole": (files.whole_read, library)}
    actions: dict[str, Callable[[], None]] = {
        "write, own": partial(_each, files.own_write, own, 1),
        "write, library": partial(_each, files.library_write, library, 1),
    }
    threads = n_readers(False)
    actions |= {f"read by {threads}, {way}": partial(_each, *call, threads) for way, call in reads.items()}
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for way in ("own", "library"):  # a round may begin with a read
        actions[f"write, {way}"]()
    exact = True
    for number, name in in_turn(list(actions), rounds, warm_up=1):
        if name.startswith("write"):
            for path in own if "own" in name else library:
                path.unlink(missing_ok=True)
        took = timed(actions[name])
        if number >= 0:
            taken[name].append(took)
        elif name.startswith("read"):
            pairs = zip(chain.from_iterable(files.into), chain.from_iterable(layers), strict=True)
            exact = exact and all(np.array_equal(got, wanted[:, :n_tokens]) for got, wanted in pairs)
            for side in chain.from_iterable(files.into):
                side[:] = 0
    of_own = {}
    for name, values in taken.items():
        step, way = name.split(", ")
        if way != "own":
            of_own[name] = ratios(values, taken[f"{step}, own"], digits=2)
    return {
        "blocks": n_blocks,
        "mb": round(n_tokens * spec.bytes_per_token / 1e6, 1),
        "exact": exact,
        "ms": {name: spread(values, digits=2) for name, values in taken.items()},
        "of_own": of_own,
    }


def _each(action: Callable[[Path, int], None], paths: list[Path], threads: int) -> None:
    if threads == 1:
        for n, path in enumerate(paths):
            action(path, n)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(action, paths, range(len(paths))))


def _metadata(content: bytes) -> dict[str, str]:
    size = int.from_bytes(content[:8], "little")
    found: dict[str, str] = json.loads(content[8 : 8 + size])["__metadata__"]
    return found
