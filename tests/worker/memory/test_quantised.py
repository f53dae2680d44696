"""Blocks in 8 or 4 bits: the error is at most half a step, never NaN, and does not grow."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.numpy import load_file
from tests.worker.memory.agents import (
    Agent,
    cache_of,
    files_below,
    ids,
    make_model,
    make_transcript,
    make_turn,
    only,
    open_store,
    problems_of,
)

from stoker_worker.memory.blocks import BITS, dequantise, quantise
from stoker_worker.ports import Array, SequenceCache
from stoker_worker.ports.cache_spec import LayerKind, LayerSpec, ModelCacheSpec

LONG = ids(1000)
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def back(array: Array, bits: int) -> Array:
    target = np.empty(array.shape, array.dtype)
    dequantise(quantise(array, bits), bits, target)
    return target


def exact(array: Array) -> Array:
    """In float64; uint16 stands for bfloat16."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def bfloat16(array: Array) -> Array:
    return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def rounding(array: Array, *, dtype: str) -> Array:
    """Half the distance between neighbours of each element's size, in its dtype."""
    bits, least = {"float32": (24, -149), "float16": (11, -24), "bfloat16": (8, -133)}[dtype]
    exponent = np.frexp(np.abs(array))[1]
    half: Array = np.exp2(np.maximum(exponent - bits, least)) / 2
    return half


def expect_close(array: Array, dtype: str, bits: int) -> None:
    found, scales = exact(back(array, bits)), quantise(array, bits)[1]
    wanted = exact(array)
    assert np.isfinite(found).all()
    steps = np.repeat(scales.astype(np.float64), array.shape[-1] // scales.shape[-1], axis=-1)
    # Beside half a step: what float32 arithmetic over the group's range loses, and the rounding of the result.
    largest = np.abs(wanted).max(axis=-1, keepdims=True, initial=0)
    slack = (
        steps * 2**-14
        + rounding(largest, dtype="float32") * 4
        + rounding(np.maximum(np.abs(found), np.abs(wanted)), dtype=dtype)
    )
    assert (np.abs(found - wanted) <= steps / 2 + slack).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_at_most_half_a_step(dtype: str, bits: int) -> None:
    rng = np.random.default_rng(0)
    for scale, offset in ((1, 0), (1e-6, 0), (3, 100), (1e-3, -7), (1000, 0)):
        array = rng.normal(offset, scale, (2, 5, 128))
        expect_close(bfloat16(array) if dtype == "bfloat16" else array.astype(DTYPES[dtype]), dtype, bits)


@given(
    arrays(
        np.float32,
        array_shapes(min_dims=3, max_dims=3, min_side=1, max_side=9),
        elements=st.floats(-(2.0**115), 2.0**115, width=32),
    ),
    st.sampled_from([8, 4]),
)
def test_any_numbers_come_back_finite_and_close(array: Array, bits: int) -> None:
    expect_close(array, "float32", bits)
    expect_close(bfloat16(array), "bfloat16", bits)
    expect_close(array.clip(-65504, 65504).astype(np.float16), "float16", bits)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_groups_and_the_ends_of_a_group_come_back_exactly(dtype: str, bits: int) -> None:
    array = np.zeros((1, 3, 64), np.float32)
    array[0, 0] = 1.5
    array[0, 1] = -0.0078125
    array[0, 2, :32], array[0, 2, 32:] = -2.0, 5.5
    array = bfloat16(array) if dtype == "bfloat16" else array.astype(DTYPES[dtype])
    assert np.array_equal(back(array, bits), array)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantising_twice_changes_nothing_more(dtype: str, bits: int) -> None:
    # An agent that turns away in mid-block stores what it had restored a second time.
    array = np.random.default_rng(3).normal(0, 2, (2, 9, 64))
    once = back(bfloat16(array) if dtype == "bfloat16" else array.astype(DTYPES[dtype]), bits)
    again = once
    for _ in range(10):
        again = back(again, bits)
    step = float(quantise(once, bits)[1].max())
    assert np.abs(exact(again) - exact(once)).max() <= step * (0.01 if dtype == "float32" else 0.5)


# --- in the store ---


LAYER = LayerSpec(LayerKind.FULL, n_kv_heads=2, key_dim=64, value_dim=32)


def agent_of(folder: Path, store_dtype: str, dtype: str = "float32") -> Agent:
    spec = ModelCacheSpec((LAYER, LAYER), dtype, store_dtype)  # type: ignore[arg-type]
    return Agent(open_store(folder), model=make_model(store_dtype, spec=spec))


@pytest.mark.parametrize("store_dtype", BITS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_conversation_continues_on_quantised_blocks(tmp_path: Path, store_dtype: str, dtype: str) -> None:
    agent = agent_of(tmp_path, store_dtype, dtype)
    agent.say(LONG[:600])
    assert agent.cached((*LONG[:600], 1)) == 600
    assert agent.cached((*LONG[:400], 1, 2)) == 400  # a block used in part
    assert agent.cached((*LONG[:550], 1, 2)) == 550  # the tail used in part
    agent.say((*LONG[:600], 1, 2))
    assert agent.cached((*LONG[:600], 1, 2, 3)) == 602
    assert problems_of(agent.store) == []
    assert agent.store.misses == {}


def test_bfloat16_blocks_come_back_as_bfloat16(tmp_path: Path) -> None:
    agent = agent_of(tmp_path, "q8", "bfloat16")
    values = np.random.default_rng(1).normal(0, 1, (2, 256, 96))
    keys, values = bfloat16(values[..., :64]), bfloat16(values[..., 64:])
    cache = SequenceCache(256, ((keys, values), (keys, values)))
    agent.store.save(make_turn(agent, agent.open(), make_transcript(LONG[:256]), cache))
    prefix = agent.store.restore(LONG[:300], agent=agent.open(), model=agent.model, salt=None).prefix
    assert prefix is not None
    for found, wanted in zip(prefix.layers[0], (keys, values), strict=True):
        assert found.dtype == np.uint16
        assert np.array_equal(found, back(wanted, 8))


@pytest.mark.parametrize(("store_dtype", "at_most"), [("q8", 0.35), ("q4", 0.23)])
def test_blocks_are_smaller_and_tails_keep_full_precision(tmp_path: Path, store_dtype: str, at_most: float) -> None:
    sizes = {}
    for name in ("native", store_dtype):
        agent = agent_of(tmp_path / name, name)
        agent.say(LONG[:300])
        (block,) = files_below(tmp_path / name / "blocks")
        sizes[name] = block.stat().st_size
        tail = load_file(only(tmp_path / name, "*-tail.*"))
        wanted = cache_of(LONG[:300], agent.model)[0][0][:, 256:]
        assert np.array_equal(tail["layer.0.keys"], wanted)
    assert sizes[store_dtype] < at_most * sizes["native"]
