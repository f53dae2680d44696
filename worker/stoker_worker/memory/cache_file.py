"""One piece of cache as a file: safetensors in layout, with a header that is fully known before the file is read.

Owns the format and its check. A reader builds the header it expects (model, cache layout, parent, token ids) and
compares bytes, so nothing of a file is believed that was not asked for. Writing streams the engine's arrays as they
are; reading fills arrays that the caller made. Loader thread (reads) and finaliser thread (writes).
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from xxhash import xxh3_128

from stoker_worker.cache_spec import ITEM_BYTES, ModelCacheSpec
from stoker_worker.memory.files import Chunk
from stoker_worker.ports import Array, LayerKV, as_uint16_if_bfloat16

PieceKind = Literal["block", "tail"]
"""``block``: a full block, shared by all agents of one salt. ``tail``: an agent's last, partial one."""

Fault = Literal["missing", "corrupt", "foreign", "unreadable"]
"""Why a file cannot be used. ``foreign``: whole, but not what belongs at this place. ``unreadable``: an I/O error."""

_FORMAT: Final = "stoker-cache 1"
_ALIGNMENT: Final = 64
_CHECKSUM_AT: Final = 8 + len('{"__metadata__":{"checksum":"')
_ZEROS: Final = b"0" * 32
_READ_BYTES: Final = 1 << 20
_SAFETENSORS_NAMES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class CachePiece:
    """What a cache file is asked to be.

    Attributes:
        model: fingerprint of the model.
        parent: address of the block before it, or the chain's root.
        token_ids: the tokens whose cache it holds.
    """

    kind: PieceKind
    model: str
    spec: ModelCacheSpec
    parent: str
    token_ids: tuple[int, ...]

    @property
    def data_bytes(self) -> int:
        return self.spec.bytes_per_token * len(self.token_ids)

    def header(self) -> bytes:
        """The file up to its data: 8-byte length and JSON, the checksum as zeros."""
        metadata = {
            "checksum": _ZEROS.decode(),
            "format": _FORMAT,
            "kind": self.kind,
            "model": self.model,
            "cache": self.spec.describe(),
            "parent": self.parent,
            "token_ids": ",".join(map(str, self.token_ids)),
        }
        about = json.dumps(metadata, separators=(",", ":"))
        text = f'{{"__metadata__":{about},{_tensor_table(self.spec, len(self.token_ids))}}}'.encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    def encode(self, layers: tuple[LayerKV, ...], offset: int) -> Iterator[Chunk]:
        """The file's bytes, given arrays in which this piece's tokens start at `offset`; their memory is not copied."""
        rows = list(self._rows(layers, offset))
        header = self.header()
        digest = xxh3_128(header)
        for row in rows:
            digest.update(row)
        yield header[:_CHECKSUM_AT] + digest.hexdigest().encode() + header[_CHECKSUM_AT + 32 :]
        yield from rows

    def load(self, path: Path, buffer: Array) -> Fault | None:
        """Read the data of a file into `buffer` (uint8, at least `data_bytes` long) and verify all of the file."""
        try:
            with open(path, "rb", buffering=0) as file:
                return self._load(file, buffer)
        except FileNotFoundError:
            return "missing"
        except OSError:
            return "unreadable"

    def copy(self, buffer: Array, layers: tuple[LayerKV, ...], start: int, n_tokens: int) -> None:
        """Copy the first `n_tokens` tokens of loaded data into `layers` (see `LayerKV`), from token `start` on."""
        at, size = 0, len(self.token_ids)
        dtype = as_uint16_if_bfloat16(self.spec.dtype)
        for layer, pair in zip(self.spec.layers, layers, strict=True):
            for dim, target in zip((layer.key_dim, layer.value_dim), pair, strict=True):
                n_bytes = layer.n_kv_heads * size * dim * dtype.itemsize
                source = buffer[at : at + n_bytes].view(dtype).reshape(layer.n_kv_heads, size, dim)
                target[:, start : start + n_tokens] = source[:, :n_tokens]
                at += n_bytes

    def _rows(self, layers: tuple[LayerKV, ...], offset: int) -> Iterator[memoryview]:
        """Each head's run of tokens: the longest stretch that is contiguous in the engine's array."""
        for pair in layers:
            for array in pair:
                for head in array:
                    run: Array = np.ascontiguousarray(head[offset : offset + len(self.token_ids)])
                    yield run.reshape(-1).view(np.uint8).data

    def _load(self, file: FileIO, buffer: Array) -> Fault | None:
        expected = self.header()
        if os.fstat(file.fileno()).st_size != len(expected) + self.data_bytes:
            return "foreign" if is_intact(file) else "corrupt"
        header, data = bytearray(len(expected)), memoryview(buffer[: self.data_bytes])  # type: ignore[arg-type]
        if not (_fill(file, memoryview(header)) and _fill(file, data)):
            return "corrupt"
        stored = bytes(header[_CHECKSUM_AT : _CHECKSUM_AT + 32])
        header[_CHECKSUM_AT : _CHECKSUM_AT + 32] = _ZEROS
        digest = xxh3_128(header)
        digest.update(data)
        if digest.hexdigest().encode() != stored:
            return "corrupt"
        return None if header == expected else "foreign"


def empty_layers(spec: ModelCacheSpec, n_tokens: int) -> tuple[LayerKV, ...]:
    """Uninitialised arrays for the cache of `n_tokens` tokens."""
    dtype = as_uint16_if_bfloat16(spec.dtype)
    return tuple(
        (np.empty((x.n_kv_heads, n_tokens, x.key_dim), dtype), np.empty((x.n_kv_heads, n_tokens, x.value_dim), dtype))
        for x in spec.layers
    )


def fits(spec: ModelCacheSpec, layers: tuple[LayerKV, ...], n_tokens: int) -> bool:
    """Whether arrays that somebody else made are the cache of `n_tokens` tokens."""
    dtype = as_uint16_if_bfloat16(spec.dtype)
    return len(layers) == len(spec.layers) and all(
        keys.shape == (layer.n_kv_heads, n_tokens, layer.key_dim)
        and values.shape == (layer.n_kv_heads, n_tokens, layer.value_dim)
        and keys.dtype == values.dtype == dtype
        for layer, (keys, values) in zip(spec.layers, layers, strict=True)
    )


def is_intact(file: FileIO) -> bool:
    """Whether a cache file, whichever it is, is as it was written: its checksum matches."""
    file.seek(0)
    head = bytearray(file.read(_CHECKSUM_AT + 32))
    stored = bytes(head[_CHECKSUM_AT:])
    head[_CHECKSUM_AT:] = _ZEROS
    digest = xxh3_128(head)
    while chunk := file.read(_READ_BYTES):
        digest.update(chunk)
    return digest.hexdigest().encode() == stored


def read_metadata(file: FileIO) -> dict[str, Any]:
    """What an intact cache file says of itself. Raises `ValueError` when it is not JSON of that shape."""
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    metadata = json.loads(file.read(min(size, 64 * _READ_BYTES)))["__metadata__"]
    if not isinstance(metadata, dict):
        raise ValueError("no metadata")
    return metadata


@lru_cache(maxsize=600)
def _tensor_table(spec: ModelCacheSpec, n_tokens: int) -> str:
    """The tensors' part of the header: the same for every block, so made once."""
    at, entries = 0, []
    for index, layer in enumerate(spec.layers):
        for name, dim in (("keys", layer.key_dim), ("values", layer.value_dim)):
            end = at + layer.n_kv_heads * n_tokens * dim * ITEM_BYTES[spec.dtype]
            about = {
                "dtype": _SAFETENSORS_NAMES[spec.dtype],
                "shape": [layer.n_kv_heads, n_tokens, dim],
                "data_offsets": [at, end],
            }
            entries.append(f'"layer.{index}.{name}":{json.dumps(about, separators=(",", ":"))}')
            at = end
    return ",".join(entries)


def _fill(file: FileIO, target: memoryview) -> bool:
    """Read until `target` is full; false when the file ends first."""
    while target:
        n_read = file.readinto(target)
        if not n_read:
            return False
        target = target[n_read:]
    return True
