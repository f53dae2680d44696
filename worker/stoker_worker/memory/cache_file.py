"""One piece of cache as a safetensors file. Owns the format and its check.

A reader builds the header that it expects (model, cache layout, parent, token ids) and compares bytes, so no content
of a file is trusted unseen. Writing streams the engine's arrays without a copy; reading fills memory of the caller.
Loader thread (reads) and finisher threads (writes).
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
from xxhash import xxh3_128

from stoker_shared.durable_file import fill, in_parts
from stoker_worker.memory.block_chain import BlockChain
from stoker_worker.memory.cache_layout import CacheLayout, PieceKind, is_quantised, layout_of
from stoker_worker.memory.files import Chunk
from stoker_worker.memory.quantised import BITS, dequantise, quantise
from stoker_worker.ports import Array, LayerKV, LayerState
from stoker_worker.ports.cache_spec import ModelCacheSpec

Fault = Literal["missing", "corrupt", "foreign", "unreadable"]
"""Why a file cannot be used. ``foreign``: intact, but another piece. ``unreadable``: an I/O error."""

_FORMAT: Final = "stoker-cache 1"
_ALIGNMENT: Final = 64
_CHECKSUM_AT: Final = 8 + len('{"__metadata__":{"checksum":"')
_ZEROS: Final = b"0" * 32
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class CachePiece:
    """The content that a cache file must have.

    Attributes:
        model: fingerprint of the model.
        parent: address of the block before it, or the chain's root.
        token_ids: the tokens whose cache it holds; of a snapshot: those between `parent` and the snapshot.
        after_tokens: of a snapshot: how many tokens of the conversation come before it.
    """

    kind: PieceKind
    model: str
    spec: ModelCacheSpec
    parent: str
    token_ids: tuple[int, ...]
    after_tokens: int = 0

    @classmethod
    def snapshot(cls, spec: ModelCacheSpec, chain: BlockChain) -> Self:
        """The snapshot after all tokens of `chain`."""
        return cls("snapshot", chain.model, spec, chain.last, chain.rest, after_tokens=len(chain.token_ids))

    @cached_property
    def layout(self) -> CacheLayout:
        n_tokens = self.after_tokens if self.kind == "snapshot" else len(self.token_ids)
        return layout_of(self.spec, self.kind, n_tokens)

    @property
    def is_quantised(self) -> bool:
        return is_quantised(self.spec, self.kind)

    @cached_property
    def header(self) -> bytes:
        """The file up to its data: 8-byte length and JSON, the checksum as zeros."""
        metadata = {
            "checksum": _ZEROS.decode(),
            "format": _FORMAT,
            "kind": self.kind,
            "model": self.model,
            "cache": self.layout.cache,
            "parent": self.parent,
            "token_ids": ",".join(map(str, self.token_ids)),
        }
        if self.kind == "snapshot":
            metadata["after_tokens"] = str(self.after_tokens)
        about = json.dumps(metadata, separators=(",", ":"))
        text = f'{{"__metadata__":{about},{self.layout.table}}}'.encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @property
    def n_bytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + self.layout.n_bytes

    def encode(self, layers: tuple[LayerKV, ...], offset: int) -> Iterator[Chunk]:
        """The bytes of a block or tail, from arrays in which its tokens start at `offset`; copied only if quantised."""
        stop = offset + len(self.token_ids)
        arrays: Iterable[Array] = (array[:, offset:stop] for array in chain.from_iterable(layers))
        if self.is_quantised:
            bits = BITS[self.spec.store_dtype]
            arrays = chain.from_iterable(quantise(array, bits) for array in arrays)
        # Head by head: the longest contiguous parts of the engine's arrays.
        return self._encode([_bytes_of(head) for array in arrays for head in array])

    def encode_states(self, states: tuple[LayerState, ...]) -> Iterator[Chunk]:
        """The bytes of a snapshot."""
        return self._encode([_bytes_of(array) for array in chain.from_iterable(states)])

    def load(self, path: Path, targets: Sequence[memoryview]) -> Fault | None:
        """Read a file's data into `targets` (`layout.n_bytes` in all) and verify the whole file.

        After a fault the targets hold anything.
        """
        try:
            with open(path, "rb", buffering=0) as file:
                return self._load(file, targets)
        except FileNotFoundError:
            return "missing"
        except OSError:
            return "unreadable"

    def unpack(self, data: Array, layers: tuple[LayerKV, ...], start: int, n_tokens: int) -> None:
        """Copy the first `n_tokens` tokens of a block's or tail's loaded data (uint8) to `layers`, from `start` on."""
        arrays = iter(self._views(data))
        bits = BITS.get(self.spec.store_dtype, 0)
        for target in chain.from_iterable(layers):
            rows = target[:, start : start + n_tokens]
            if self.is_quantised:
                elements, scales, biases = (next(arrays)[:, :n_tokens] for _ in range(3))
                dequantise((elements, scales, biases), bits, rows)
            else:
                rows[:] = next(arrays)[:, :n_tokens]

    def _views(self, data: Array) -> Iterator[Array]:
        """The tensors in loaded data."""
        at = 0
        for tensor in self.layout.tensors:
            yield data[at : at + tensor.n_bytes].view(tensor.travel_dtype).reshape(tensor.shape)
            at += tensor.n_bytes

    def _encode(self, rows: Sequence[memoryview]) -> Iterator[Chunk]:
        header = self.header
        digest = xxh3_128(header)
        for row in rows:
            digest.update(row)
        yield header[:_CHECKSUM_AT] + digest.hexdigest().encode() + header[_CHECKSUM_AT + 32 :]
        yield from rows

    def _load(self, file: FileIO, targets: Sequence[memoryview]) -> Fault | None:
        if os.fstat(file.fileno()).st_size != self.n_bytes:
            return "foreign" if is_intact(file) else "corrupt"
        header = bytearray(len(self.header))
        if not fill(file.fileno(), [memoryview(header)]):
            return "corrupt"
        stored = bytes(header[_CHECKSUM_AT : _CHECKSUM_AT + 32])
        header[_CHECKSUM_AT : _CHECKSUM_AT + 32] = _ZEROS
        digest = xxh3_128(header)
        for part in in_parts(targets):
            if not fill(file.fileno(), part):
                return "corrupt"
            for target in part:  # while its bytes are in the processor's cache
                digest.update(target)
        if digest.hexdigest().encode() != stored:
            return "corrupt"
        return None if header == self.header else "foreign"


def is_intact(file: FileIO) -> bool:
    """Whether the checksum of a cache file, of any piece, matches."""
    file.seek(0)
    head = bytearray(file.read(_CHECKSUM_AT + 32))
    stored = bytes(head[_CHECKSUM_AT:])
    head[_CHECKSUM_AT:] = _ZEROS
    digest = xxh3_128(head)
    while chunk := file.read(_READ_BYTES):
        digest.update(chunk)
    return digest.hexdigest().encode() == stored


def read_metadata(file: FileIO) -> dict[str, Any]:
    """The metadata of an intact cache file. Raises `ValueError` when it is not JSON of that shape."""
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    metadata = json.loads(file.read(min(size, 64 * _READ_BYTES)))["__metadata__"]
    if not isinstance(metadata, dict):
        raise ValueError("no metadata")
    return metadata


def bytes_of(array: Array) -> memoryview:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def _bytes_of(array: Array) -> memoryview:
    return bytes_of(np.ascontiguousarray(array))
