"""Cache files: valid safetensors, exact in every dtype, and loaded only if they are the piece asked for."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stoker_worker.memory.blocks import CachePiece, Fault, empty_layers
from stoker_worker.ports import LayerKV, as_uint16_if_bfloat16
from stoker_worker.ports.cache_spec import LayerKind, LayerSpec, ModelCacheSpec

UNEVEN = (LayerSpec(LayerKind.FULL, 2, 3, 5), LayerSpec(LayerKind.FULL, 1, 4, 4))
PIECE = CachePiece("tail", "f" * 64, ModelCacheSpec(UNEVEN, "float32"), "ab" * 32, (5, 70_000, 9))


def random_layers(spec: ModelCacheSpec, n_tokens: int) -> tuple[LayerKV, ...]:
    rng = np.random.default_rng(1)
    dtype = as_uint16_if_bfloat16(spec.dtype)
    return tuple(
        (
            rng.integers(0, 60_000, (x.n_kv_heads, n_tokens, x.key_dim)).astype(dtype),
            rng.integers(0, 60_000, (x.n_kv_heads, n_tokens, x.value_dim)).astype(dtype),
        )
        for x in spec.layers
    )


def write(path: Path, piece: CachePiece, layers: tuple[LayerKV, ...], offset: int = 0) -> Path:
    path.write_bytes(b"".join(piece.encode(layers, offset)))
    return path


def load(path: Path, piece: CachePiece) -> tuple[Fault | None, tuple[LayerKV, ...]]:
    data = np.zeros(piece.layout.n_bytes, np.uint8)
    fault = piece.load(path, [data.data])
    layers = empty_layers(piece.spec, len(piece.token_ids))
    piece.unpack(data, layers, 0, len(piece.token_ids))
    return fault, layers


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_piece_comes_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    piece = replace(PIECE, spec=ModelCacheSpec(UNEVEN, dtype))
    layers = random_layers(piece.spec, 10)
    fault, loaded = load(write(tmp_path / "piece", piece, layers, offset=4), piece)
    assert fault is None
    for pair, loaded_pair in zip(layers, loaded, strict=True):
        for ours, theirs in zip(pair, loaded_pair, strict=True):
            assert np.array_equal(ours[:, 4:7].view(np.uint8), theirs.view(np.uint8))


def test_arrays_of_any_memory_order_are_written_alike() -> None:
    layers = random_layers(PIECE.spec, 3)
    turned = tuple((np.asfortranarray(keys), np.asfortranarray(values)) for keys, values in layers)
    assert b"".join(PIECE.encode(layers, 0)) == b"".join(PIECE.encode(turned, 0))


def test_a_changed_byte_anywhere_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "piece", PIECE, random_layers(PIECE.spec, 3))
    data = path.read_bytes()
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 0x20
        path.write_bytes(changed)
        assert load(path, PIECE)[0] == "corrupt", position


@pytest.mark.parametrize(
    "asked",
    [
        replace(PIECE, model="e" * 64),
        replace(PIECE, parent="ac" * 32),
        replace(PIECE, token_ids=(5, 70_000, 8)),
        replace(PIECE, token_ids=(5, 70_000)),
        replace(PIECE, kind="block"),
        replace(PIECE, spec=ModelCacheSpec(UNEVEN, "float16")),
        replace(PIECE, spec=ModelCacheSpec(UNEVEN, "float32", "q8")),
        replace(PIECE, spec=ModelCacheSpec(UNEVEN[::-1], "float32")),
    ],
)
def test_an_intact_file_of_another_piece_is_foreign(tmp_path: Path, asked: CachePiece) -> None:
    path = write(tmp_path / "piece", PIECE, random_layers(PIECE.spec, 3))
    assert load(path, asked)[0] == "foreign"
