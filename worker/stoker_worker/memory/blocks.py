"""The cache on disk: block addresses, the file format and the folders of the files.

A full block's address is a chained SHA-256 over the model, the salt and every token up to the block's end. Blocks of
one address hold the same cache: agents share them, and blocks of different salts never mix. A block may have a
checkpoint beside it, shared in the same way: all that is needed to go on at its end or up to 255 tokens after it. Each
agent's newest version has pieces of its own: the tail or the snapshots.

A safetensors file is never changed in place, and only a checkpoint is replaced. A reader builds the header that it
expects (model, cache layout, parent, token ids) and compares bytes, so it uses nothing that is not verified. A writer
streams the engine's arrays without a copy; a reader fills arrays of the caller's. Two threads may write or remove the
same block: at worst it is computed again. Files that a crash leaves behind are overwritten or found by `Upkeep`.

Blocks may be stored in 8 or 4 bits per element, in groups along the head dimension: an element is ``q * scale + bias``
with its group's float32 scale and bias. The error is at most half a scale, and the rounding of the element's dtype. No
group spans two tokens, so elements that are read and quantised again do not change.

Addresses, layouts and quantising are pure. Loader threads read files; finisher threads write those of turns.
"""

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from io import BytesIO, FileIO
from itertools import chain, groupby, takewhile
from math import prod
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from stoker_worker.memory.files import CacheWriter, Chunk, allocated_bytes, fill, in_parts, is_there
from stoker_worker.ports import AgentVersion, Array, LayerKV, LayerState, SequenceCache, Snapshot, as_uint16_if_bfloat16
from stoker_worker.ports.cache_spec import BLOCK_TOKENS, ITEM_BYTES, LayerKind, LayerSpec, ModelCacheSpec, group_size

PathOf = Callable[[str, str], Path]
"""The file of a block, from the model's fingerprint and the block's address."""

_DOMAIN: Final = b"stoker block chain 1\0"
_FINGERPRINT: Final = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True)
class BlockChain:
    """The full blocks of `token_ids`, as the model of this fingerprint caches them under one salt (``None`` is the same
    as the empty one). Hashed once, on first use."""

    model: str
    salt: str | None
    token_ids: tuple[int, ...]

    @property
    def n_blocks(self) -> int:
        return len(self.token_ids) // BLOCK_TOKENS

    @cached_property
    def root(self) -> str:
        """The parent of the first block: hex, like every address."""
        model = self.model.encode()
        # The length keeps ("ab", "c") and ("a", "bc") apart.
        return hashlib.sha256(_DOMAIN + struct.pack("<I", len(model)) + model + (self.salt or "").encode()).hexdigest()

    @cached_property
    def addresses(self) -> tuple[str, ...]:
        """One for each full block."""
        addresses, address = [], self.root
        n_full = self.n_blocks * BLOCK_TOKENS
        packed = memoryview(np.asarray(self.token_ids[:n_full], dtype="<u4").tobytes())
        for start in range(0, len(packed), 4 * BLOCK_TOKENS):
            address = _next_address(address, packed[start : start + 4 * BLOCK_TOKENS])
            addresses.append(address)
        return tuple(addresses)

    @property
    def last(self) -> str:
        """Address of the last full block, or the root: the parent of what follows."""
        return self.addresses[-1] if self.n_blocks else self.root

    @property
    def rest(self) -> tuple[int, ...]:
        """The tokens after the last full block."""
        return self.token_ids[self.n_blocks * BLOCK_TOKENS :]

    def parent(self, index: int) -> str:
        """The address before block `index`, which may be the first that is not full."""
        return self.addresses[index - 1] if index else self.root

    def block(self, index: int) -> tuple[int, ...]:
        """The tokens of block `index`; fewer than 256 at the chain's end."""
        return self.token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]

    def up_to(self, n_tokens: int) -> "BlockChain":
        first = BlockChain(self.model, self.salt, self.token_ids[:n_tokens])
        first.__dict__["addresses"] = self.addresses[: first.n_blocks]  # nothing is hashed twice
        return first

    def paths(self, path_of: PathOf) -> tuple[Path, ...]:
        """The files of the full blocks; none if `model` is not a fingerprint, so that no record can choose a path."""
        return tuple(path_of(self.model, address) for address in self.addresses) if self.has_fingerprint else ()

    @property
    def has_fingerprint(self) -> bool:
        return _FINGERPRINT.fullmatch(self.model) is not None


def block_address(parent: str, token_ids: Sequence[int]) -> str:
    """The address of one block that follows `parent`."""
    return _next_address(parent, np.asarray(token_ids, dtype="<u4").tobytes())


def _next_address(parent: str, packed: bytes | memoryview) -> str:
    return hashlib.sha256(bytes.fromhex(parent) + packed).hexdigest()


PieceKind = Literal["block", "tail", "snapshot"]
"""``block``: a full block, shared by all agents of one salt. ``tail``: an agent's last, partial block, if the model has
full attention alone. ``snapshot``: what is needed beside full blocks to go on after some tokens, an agent's own or a
checkpoint: K/V of full attention after the last block, then the window and recurrent layers."""

_SAFETENSORS_NAMES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8"}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file; `dtype` is a cache dtype, or ``uint8`` for quantised elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * (1 if self.dtype == "uint8" else ITEM_BYTES[self.dtype])

    @property
    def travel_dtype(self) -> "np.dtype[Any]":
        return as_uint16_if_bfloat16(self.dtype)


@dataclass(frozen=True)
class CacheLayout:
    """The data of one file: `tensors` without gaps; `cache` is the model's `ModelCacheSpec.describe()`."""

    cache: str
    tensors: tuple[Tensor, ...]

    @cached_property
    def n_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)

    @cached_property
    def table(self) -> str:
        """The tensors' part of the safetensors header, as JSON without the outer braces."""
        at, entries = 0, []
        for tensor in self.tensors:
            end = at + tensor.n_bytes
            about = {
                "dtype": _SAFETENSORS_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [at, end],
            }
            entries.append(f'"{tensor.name}":{json.dumps(about, separators=(",", ":"))}')
            at = end
        return ",".join(entries)


@lru_cache(maxsize=300)
def layout_of(spec: ModelCacheSpec, kind: PieceKind, n_tokens: int) -> CacheLayout:
    """The layout of a block or tail of `n_tokens` tokens, or of a snapshot after that many."""
    parts: list[Tensor] = []
    states: list[Tensor] = []
    n_kv = n_tokens % BLOCK_TOKENS if kind == "snapshot" else n_tokens
    for index, layer in enumerate(spec.layers):
        name = f"layer.{index}"
        if layer.kind != LayerKind.FULL:
            states += _state_tensors(name, layer, n_tokens, spec.dtype) if kind == "snapshot" else ()
            continue
        for side, dim in (("keys", layer.key_dim), ("values", layer.value_dim)) if n_kv else ():
            shape = (layer.n_kv_heads, n_kv, dim)
            if is_quantised(spec, kind):
                parts += _quantised_tensors(f"{name}.{side}", shape, BITS[spec.store_dtype])
            else:
                parts.append(Tensor(f"{name}.{side}", spec.dtype, shape))
    return CacheLayout(spec.describe(), (*parts, *states))


def is_quantised(spec: ModelCacheSpec, kind: PieceKind) -> bool:
    """Only blocks are: tails and snapshots are replaced every turn."""
    return kind == "block" and spec.store_dtype != "native"


def empty_layers(spec: ModelCacheSpec, n_tokens: int) -> tuple[LayerKV, ...]:
    """Uninitialised arrays for the full-attention layers' cache of `n_tokens` tokens."""
    # One array per side and layer, from malloc: the C library reuses the last restore's memory, while the system would
    # have to zero new pages first.
    dtype = as_uint16_if_bfloat16(spec.dtype)
    return tuple((np.empty(keys, dtype), np.empty(values, dtype)) for keys, values in _kv_shapes(spec, n_tokens))


def empty_states(spec: ModelCacheSpec, n_tokens: int) -> tuple[LayerState, ...]:
    """Uninitialised arrays for a snapshot after `n_tokens` tokens."""
    return tuple(tuple(np.empty(*about) for about in layer) for layer in _state_arrays(spec, n_tokens))


def fits(spec: ModelCacheSpec, layers: tuple[LayerKV, ...], n_tokens: int) -> bool:
    """True if the arrays have the shapes and dtype of the full-attention layers' cache of `n_tokens` tokens."""
    dtype = as_uint16_if_bfloat16(spec.dtype)
    return [(keys.shape, values.shape) for keys, values in layers] == _kv_shapes(spec, n_tokens) and all(
        array.dtype == dtype for pair in layers for array in pair
    )


def state_fits(spec: ModelCacheSpec, states: tuple[LayerState, ...], n_tokens: int) -> bool:
    """True if the arrays have the shapes and dtypes of a snapshot after `n_tokens` tokens."""
    return [[(array.shape, array.dtype) for array in arrays] for arrays in states] == _state_arrays(spec, n_tokens)


def _kv_shapes(spec: ModelCacheSpec, n_tokens: int) -> list[tuple[tuple[int, int, int], tuple[int, int, int]]]:
    return [((x.n_kv_heads, n_tokens, x.key_dim), (x.n_kv_heads, n_tokens, x.value_dim)) for x in spec.full_layers]


def _state_arrays(spec: ModelCacheSpec, n_tokens: int) -> list[list[tuple[tuple[int, ...], "np.dtype[Any]"]]]:
    """Shape and dtype of each array of the window and recurrent layers."""
    layers = (layer.snapshot_arrays(n_tokens, spec.dtype) for layer in spec.snapshot_layers)
    return [[(array.shape, as_uint16_if_bfloat16(array.dtype)) for array in layer] for layer in layers]


def _state_tensors(name: str, layer: LayerSpec, n_tokens: int, dtype: str) -> list[Tensor]:
    arrays = layer.snapshot_arrays(n_tokens, dtype)
    names = ("keys", "values") if layer.kind == LayerKind.WINDOW else [f"state.{i}" for i in range(len(arrays))]
    return [Tensor(f"{name}.{part}", array.dtype, array.shape) for part, array in zip(names, arrays, strict=True)]


def _quantised_tensors(name: str, shape: tuple[int, int, int], bits: int) -> list[Tensor]:
    packed, groups = packed_shapes(shape, bits)
    return [
        Tensor(f"{name}.q", "uint8", packed),
        Tensor(f"{name}.scales", "float32", groups),
        Tensor(f"{name}.biases", "float32", groups),
    ]


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
        token_ids: the tokens whose cache it holds; for a snapshot, those between `parent` and the snapshot.
        after_tokens: for a snapshot, the number of tokens before it.
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

    def encode(self, layers: tuple[LayerKV, ...], offset: int, states: tuple[LayerState, ...] = ()) -> Iterator[Chunk]:
        """The file's bytes, from arrays in which its tokens start at token `offset`, and a snapshot's `states`; copied
        only if quantised."""
        stop = offset + len(self.token_ids)
        arrays: Iterable[Array] = (array[:, offset:stop] for array in chain.from_iterable(layers))
        if self.is_quantised:
            bits = BITS[self.spec.store_dtype]
            arrays = chain.from_iterable(quantise(array, bits) for array in arrays)
        # Head by head: the longest contiguous parts of the engine's arrays.
        rows = [_bytes_of(head) for array in arrays for head in array]
        return self._encode([*rows, *map(_bytes_of, chain.from_iterable(states))])

    def load(self, path: Path, targets: Sequence[memoryview]) -> Fault | None:
        """Read a file's data, without its header, into `targets` (`layout.n_bytes` in all) and verify the whole file;
        ``None``: it is whole. After a fault the targets hold anything."""
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
    """True if the checksum of a cache file, of any piece, matches."""
    file.seek(0)
    head = bytearray(file.read(_CHECKSUM_AT + 32))
    stored = bytes(head[_CHECKSUM_AT:])
    head[_CHECKSUM_AT:] = _ZEROS
    digest = xxh3_128(head)
    while chunk := file.read(_READ_BYTES):
        digest.update(chunk)
    return digest.hexdigest().encode() == stored


def read_metadata(file: FileIO | BytesIO) -> dict[str, Any]:
    """The metadata of a cache file, from its header. Raises `ValueError`, `TypeError`, `KeyError`, `RecursionError`:
    there is none, because the file is damaged or of another writer."""
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    metadata = json.loads(file.read(min(size, 64 * _READ_BYTES)))["__metadata__"]
    if not isinstance(metadata, dict):
        raise ValueError("no metadata")
    return metadata


def read_place(path: Path) -> tuple[str, tuple[int, ...]] | None:
    """As `place_in`; ``None`` also if the file cannot be read."""
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        return place_in(file)
    return None


def place_in(file: FileIO | BytesIO) -> tuple[str, tuple[int, ...]] | None:
    """The address of the block before a cache file's tokens, and these tokens, as in its header: the caller verifies
    both. ``None``: the header has none."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        about = read_metadata(file)
        ids = str(about["token_ids"])
        return str(about["parent"]), tuple(map(int, ids.split(","))) if ids else ()
    return None


def bytes_of(array: Array) -> memoryview:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def _bytes_of(array: Array) -> memoryview:
    return bytes_of(np.ascontiguousarray(array))


MOST_SNAPSHOTS: Final = 2
"""Of a version: one before the prompt's last token, and one at the end of the turn."""

_PIECES: Final = ("tail", *(f"snapshot-{index}" for index in range(MOST_SNAPSHOTS)))

Pieces = Mapping[Path, Iterable[Chunk]]
"""The bytes of a version's tail and snapshots, by file."""

Places = Sequence[tuple[int, Path]]
"""Snapshots: after how many tokens they were taken, ascending, and their files."""


_CHECKPOINT: Final = "-checkpoint"

BLOCK_FILE: Final = re.compile(r"([0-9a-f]{1,16})/([0-9a-f]{2})/(\2[0-9a-f]{62})(-checkpoint)?\.safetensors")
"""Below ``STORE/blocks``: the beginning of the model's fingerprint, and the address of the block."""
PIECE_FILE: Final = re.compile(
    r"([0-9a-f]{2})/(\1[0-9a-f]{30})-([1-9][0-9]{0,15})-(?:tail|snapshot-([0-9]))\.safetensors"
)
"""Below ``STORE/pieces``: the first half of the SHA-256 of the agent's id, the version, and the snapshot's number."""


def checkpoint_beside(block: Path) -> Path:
    """The checkpoint's file for a block's file."""
    return block.with_name(f"{block.stem}{_CHECKPOINT}{block.suffix}")


def block_beside(path: Path) -> Path:
    """The block's file for a checkpoint's file; a block's file itself."""
    return path.with_name(path.name.replace(_CHECKPOINT, ""))


@dataclass(frozen=True)
class SavedBlocks:
    """Allocated bytes of files, by the index of their block in a chain; `blocks` from the first that was missing.
    `outlived`: snapshots that become checkpoints once the turn is committed: their file, and the checkpoint's."""

    blocks: Mapping[int, int] = field(default_factory=dict)
    checkpoints: Mapping[int, int] = field(default_factory=dict)
    outlived: Mapping[Path, Path] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        return sum(self.blocks.values()) + sum(self.checkpoints.values())


class BlockFolder:
    """``STORE/blocks``."""

    def __init__(self, path: Path, writer: CacheWriter) -> None:
        self.path = path
        self._writer = writer

    def path_of(self, model: str, address: str) -> Path:
        return self.path / model[:16] / address[:2] / f"{address}.safetensors"

    def both(self, model: str, address: str) -> tuple[Path, Path]:
        """The files of a block and of its checkpoint. Either may be missing."""
        block = self.path_of(model, address)
        return block, checkpoint_beside(block)

    def n_there(self, chain: BlockChain) -> int:
        """How many of the chain's leading full blocks have files."""
        return sum(1 for _ in takewhile(is_there, chain.paths(self.path_of)))

    def save(
        self, chain: BlockChain, cache: SequenceCache, spec: ModelCacheSpec, *, before: Places = ()
    ) -> SavedBlocks:
        """Write the full blocks of `chain` and the cache's checkpoints that are missing. `before`: the previous turn's
        snapshots that lie within `chain`; the last one becomes the checkpoint of its block, unless that has one. Raises
        `OSError`: not all of them could be written."""
        paths: dict[int, Path] = {}
        missing: dict[Path, Iterable[Chunk]] = {}
        # A model without full-attention layers has no blocks.
        for index in range(self.n_there(chain), chain.n_blocks) if spec.full_layers else ():
            piece = CachePiece("block", chain.model, spec, chain.parent(index), chain.block(index))
            paths[index] = path = self.path_of(chain.model, chain.addresses[index])
            if not _has_size(path, piece.n_bytes):
                missing[path] = piece.encode(cache.layers, index * BLOCK_TOKENS)
        checkpoints: dict[int, Path] = {}
        for index, taken in groupby(cache.checkpoints, key=lambda one: one.n_tokens // BLOCK_TOKENS - 1):
            path = checkpoints[index] = self.both(chain.model, chain.addresses[index])[1]
            if (
                one := _checkpoint_to_write(path, chain.up_to((index + 2) * BLOCK_TOKENS), spec, list(taken))
            ) is not None:
                piece = CachePiece.snapshot(spec, chain.up_to(one.n_tokens))
                missing[path] = piece.encode(cache.layers, (index + 1) * BLOCK_TOKENS, one.states)
        self._writer.put_all(missing)
        block_bytes, state_bytes = ({n: allocated_bytes(path) for n, path in x.items()} for x in (paths, checkpoints))
        outlived: dict[Path, Path] = {}
        for n_tokens, path in [place for place in before if place[0] >= BLOCK_TOKENS][-1:]:
            index = n_tokens // BLOCK_TOKENS - 1
            target = self.both(chain.model, chain.addresses[index])[1]
            if not is_there(target) and (n_bytes := allocated_bytes(path)):
                state_bytes[index], outlived[path] = n_bytes, target
        return SavedBlocks(block_bytes, state_bytes, outlived)


class PieceFolder:
    """``STORE/pieces/<hh>/<first half of the SHA-256 of the agent id>-<version>-<piece>.safetensors``."""

    def __init__(self, path: Path, writer: CacheWriter) -> None:
        self.path = path
        self._writer = writer

    def paths(self, agent_id: str, version: int) -> list[Path]:
        """The files of the version's tail and snapshots, in this order. Not all need exist."""
        name = hashlib.sha256(agent_id.encode()).hexdigest()
        start = f"{self.path}/{name[:2]}/{name[:32]}-{version}-"  # many are made: joining paths takes longer
        return [Path(f"{start}{piece}.safetensors") for piece in _PIECES]

    def snapshots(self, agent: AgentVersion) -> Places:
        """The version's snapshots. Their files may have been evicted."""
        counts = agent.cache.snapshots if agent.cache else ()
        return tuple(zip(counts, self.paths(agent.agent_id, agent.number)[1:], strict=False))

    def write(self, pieces: Pieces) -> int:
        """Write the files; returns their allocated bytes. Raises `OSError`: some could not be written; none is left."""
        try:
            self._writer.put_all(pieces)
            return sum(map(allocated_bytes, pieces))
        except OSError:
            self.remove(pieces)
            raise

    def keep_only(
        self, pieces: Container[Path], agent_id: str, version: int, *, outlived: Mapping[Path, Path] | None = None
    ) -> list[Path]:
        """Remove the previous version's files, and those of this version that are not in `pieces`, which a crash may
        have left. Files in `outlived` (see `SavedBlocks`) are renamed instead. Never raises; returns the checkpoint
        files that could not be made."""
        failed = []
        for source, target in (outlived or {}).items():
            try:
                self._writer.make_folder(target.parent)  # a model without full attention has no blocks
                self._writer.files.rename(source, target)
            except OSError:
                failed.append(target)
        places = (*self.paths(agent_id, version - 1), *self.paths(agent_id, version))
        self.remove(path for path in places if path not in pieces)
        return failed

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove those that exist. Never raises: `Upkeep` finds what is left."""
        for path in paths:
            with suppress(OSError):
                self._writer.files.remove(path)


def _checkpoint_to_write(
    path: Path, chain: BlockChain, spec: ModelCacheSpec, taken: Sequence[Snapshot]
) -> Snapshot | None:
    """Which snapshot after one block becomes its checkpoint; ``None``: the one at `path` lies within `chain`. The first
    one if it replaces another prompt's checkpoint, because both prompts may share it; otherwise the last, which saves
    most."""
    if (place := read_place(path)) is None:
        return taken[-1]
    start = taken[0].n_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    there = chain.up_to(start + len(place[1]))
    is_within = place == (chain.up_to(start).last, chain.token_ids[start : start + len(place[1])])
    return None if is_within and _has_size(path, CachePiece.snapshot(spec, there).n_bytes) else taken[0]


def _has_size(path: Path, n_bytes: int) -> bool:
    """True if the file exists and is not cut short. Its content is verified when it is loaded, not here."""
    try:
        return path.stat().st_size == n_bytes
    except FileNotFoundError:
        return False


BITS: Final = {"q8": 8, "q4": 4}
"""Bits per element, by `StoreDtype`."""

Quantised = tuple[Array, Array, Array]
"""(elements as uint8, scales, biases): shapes (heads, tokens, bytes), and twice (heads, tokens, groups) in float32."""


def packed_shapes(shape: tuple[int, int, int], bits: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Shapes of the elements and of the scales (and biases) for an array of `shape`."""
    heads, tokens, dim = shape
    return (heads, tokens, -(-dim * bits // 8)), (heads, tokens, dim // group_size(dim))


def quantise(array: Array, bits: int) -> Quantised:
    """Quantise an array of (heads, tokens, dim) in float32, float16, or bfloat16 as uint16, to 8 or 4 `bits`. Groups
    with elements beyond 1e35, infinite or NaN, which no working model has, come back as anything."""
    heads, tokens, dim = array.shape
    group = group_size(dim)
    wide = _as_float32(array).reshape(heads, tokens, dim // group, group)
    low, high = wide.min(axis=-1, initial=np.inf), wide.max(axis=-1, initial=-np.inf)
    levels = 2**bits - 1
    exact = (high.astype(np.float64) - low) / levels
    scales = exact.astype(np.float32)
    # Rounded up, so that the levels span from the lowest element to the highest, subnormal or not.
    scales = np.where(scales < exact, np.nextafter(scales, np.float32(np.inf)), scales)
    steps = np.where(scales > 0, scales, 1)[..., None]
    elements = np.rint((wide - low[..., None]) / steps).clip(0, levels).astype(np.uint8).reshape(heads, tokens, dim)
    return (_packed(elements) if bits == 4 else elements), scales, low


def dequantise(quantised: Quantised, bits: int, target: Array) -> None:
    """Fill `target` (heads, tokens, dim; dtypes as in `quantise`); bfloat16 is rounded to nearest even."""
    elements, scales, biases = quantised
    heads, tokens, dim = target.shape
    if bits == 4:
        elements = _unpacked(elements, dim)
    wide = target if target.dtype == np.float32 else np.empty(target.shape, np.float32)
    grouped = wide.reshape(heads, tokens, scales.shape[-1], -1)  # a view: only the last axis is split
    np.multiply(elements.reshape(grouped.shape), scales[..., None], out=grouped)
    grouped += biases[..., None]
    if target.dtype == np.uint16:
        target[:] = _to_bfloat16(wide)
    elif wide is not target:
        np.copyto(target, wide, casting="same_kind")


def _as_float32(array: Array) -> Array:
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def _to_bfloat16(array: Array) -> Array:
    """The upper halves of finite float32, rounded to nearest even."""
    bits: NDArray[np.uint32] = array.view(np.uint32)
    rounded: Array = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return rounded


def _packed(elements: Array) -> Array:
    """Two elements per byte, the first in the low half; the last element of an odd dim has a byte of its own."""
    packed = elements[..., 0::2].copy()
    packed[..., : elements.shape[-1] // 2] |= elements[..., 1::2] << 4
    return packed


def _unpacked(packed: Array, dim: int) -> Array:
    elements: Array = np.empty((*packed.shape[:-1], dim), np.uint8)
    elements[..., 0::2] = packed & 15
    elements[..., 1::2] = (packed >> 4)[..., : dim // 2]
    return elements
