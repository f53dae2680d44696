"""Rows: their keys and values survive any joining, leaving and growth, and long ones are never copied."""

import random

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from stoker_worker.engine.kv_memory import MOST_SHARED_TOKENS, most_room, room_for
from stoker_worker.engine.rows.groups import RowGroup

pytestmark = pytest.mark.mlx

LAYERS, HEADS, DIM = 3, 2, 4


class Reference:
    """One row as NumPy arrays: per layer (heads, tokens, dim) of K and of V."""

    def __init__(self, dice, n_tokens):
        self.dice = np.random.default_rng(dice.randrange(2**32))
        self.layers = [tuple(self.dice.random((2, HEADS, n_tokens, DIM), np.float32)) for _ in range(LAYERS)]

    def __len__(self):
        return self.layers[0][0].shape[1]

    def caches(self, room):
        made = []
        for keys, values in self.layers:
            cache = KVCache()
            cache.keys, cache.values = (mx.zeros((1, HEADS, room, DIM)) for _ in range(2))
            cache.keys[0, :, : len(self)], cache.values[0, :, : len(self)] = mx.array(keys), mx.array(values)
            cache.offset = len(self)
            made.append(cache)
        mx.eval([[cache.keys, cache.values] for cache in made])
        return made

    def new_token(self):
        new = [tuple(self.dice.random((2, HEADS, 1, DIM), np.float32)) for _ in range(LAYERS)]
        self.layers = [
            (np.concatenate([k, a], axis=1), np.concatenate([v, b], axis=1))
            for (k, v), (a, b) in zip(self.layers, new, strict=True)
        ]
        return new


def step(group, rows):
    new = [row.new_token() for row in rows]
    group.begin_step()
    for layer in range(LAYERS):
        keys, values = (mx.array(np.stack([of_row[layer][which] for of_row in new])) for which in (0, 1))
        seen = [np.asarray(array) for array in group.put(layer, keys, values)]
        masks = [[True] * seen[0].shape[2]] * len(rows) if group.mask is None else group.mask[:, 0, 0].tolist()
        for index, row in enumerate(rows):
            for which in (0, 1):
                assert np.array_equal(seen[which][index][:, masks[index]], row.layers[layer][which])


def draft_step(group, row, n_drafted, n_wrong):
    """Feed a row alone several tokens at once, and take the last of them back."""
    before = row.layers
    new = [row.new_token() for _ in range(1 + n_drafted)]
    group.begin_step(1 + n_drafted)
    for layer in range(LAYERS):
        keys, values = (
            mx.array(np.concatenate([token[layer][which] for token in new], axis=1))[None] for which in (0, 1)
        )
        for seen, expected in zip(group.put(layer, keys, values), row.layers[layer], strict=True):
            assert np.array_equal(np.asarray(seen)[0], expected)
    if n_wrong:
        group.trim(n_wrong)
        row.layers = [(k[:, :-n_wrong], v[:, :-n_wrong]) for k, v in row.layers]
    assert len(row) == before[0][0].shape[1] + 1 + n_drafted - n_wrong


def assert_same(caches, row):
    for cache, of_row in zip(caches, row.layers, strict=True):
        assert cache.offset == len(row)
        for array, expected in zip((cache.keys, cache.values), of_row, strict=True):
            assert np.array_equal(np.asarray(array)[0, :, : len(row)], expected)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), first=st.integers(0, 700), n_left=st.integers(1, 300))
def test_a_group_keeps_every_row_through_joins_leaves_and_growth(seed, first, n_left):
    dice = random.Random(seed)
    rows = [Reference(dice, first)]
    group = RowGroup(rows[0].caches(room_for(first, n_left, is_shared=False)), 10**6)
    for _ in range(40):
        if dice.random() < 0.3:
            joiners = [Reference(dice, max(0, len(rows[0]) + dice.randint(-90, 90))) for _ in range(dice.randint(1, 3))]
            joiners = [row for row in joiners if group.takes(len(row))]
            joiners = joiners if not joiners or max(map(len, joiners)) - min(map(len, joiners)) <= 64 else joiners[:1]
            if joiners:
                group.add([row.caches(len(row) + dice.randint(0, 70)) for row in joiners], dice.randint(1, 300))
                rows += joiners
        if dice.random() < 0.3 and len(rows) > 1:
            index = dice.randrange(len(rows))
            assert_same(group.row(index), rows[index])
            group.remove(index)
            group.shrink()
            rows[index] = rows[-1]
            rows.pop()
        for _ in range(dice.randint(1, 12)):
            if len(rows) == 1 and dice.random() < 0.5:
                n_drafted = dice.randint(1, 15)
                draft_step(group, rows[0], n_drafted, dice.randint(0, n_drafted))
            else:
                step(group, rows)
        token_bytes = LAYERS * 2 * HEADS * DIM * 4
        assert group.nbytes <= sum(most_room(len(row)) for row in rows) * token_bytes
    for index, row in enumerate(rows):
        assert_same(group.row(index), row)


def test_a_long_row_joins_and_leaves_with_the_same_arrays():
    row = Reference(random.Random(1), MOST_SHARED_TOKENS + 1)
    caches = row.caches(room_for(len(row), 9, is_shared=False))
    group = RowGroup(caches, 9)
    arrays = [cache.keys for cache in caches]
    for _ in range(9):
        step(group, [row])
    assert all(cache.keys is array for cache, array in zip(group.row(0), arrays, strict=True))
    assert not group.takes(len(row))


def test_a_step_of_a_long_row_copies_no_more_than_a_part_of_its_layers():
    """Also when its room is used up: else every other row would wait for the copy of all layers."""
    n_tokens, n_layers, head = 2040, 32, 1024
    caches = []
    for _ in range(n_layers):
        cache = KVCache()
        cache.keys, cache.values = (mx.zeros((1, 1, 2048, head)) for _ in range(2))
        cache.offset = n_tokens
        caches.append(cache)
    mx.eval([[cache.keys, cache.values] for cache in caches])
    group = RowGroup(caches, 10_000)
    del caches, cache
    layer_bytes = 2 * 2048 * head * 4
    new, most = mx.zeros((1, 1, 1, head)), 0
    group.begin_step()  # it comes so close to the end of its room that some layers grow at once
    for _ in range(60):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        outs = [mx.sum(array) for layer in range(n_layers) for array in group.put(layer, new, new)]
        mx.eval(outs)
        most = max(most, mx.get_peak_memory() - before) if _ else 0
        group.begin_step()
    assert most < 8 * layer_bytes
