"""A step of a long row copies little, and a mask of the model's own is refused. Other tests compare the answers."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from stoker_worker.engine.rows.attention import Part, RowsKV, attention
from stoker_worker.engine.rows.groups import RowGroup
from stoker_worker.engine.rows.row import Row

pytestmark = pytest.mark.mlx


def test_a_step_of_a_long_row_copies_no_more_than_a_part_of_its_layers():
    """Also when its room is used up: else every other row would wait for the copy of all layers."""
    n_tokens, n_layers, head = 2040, 32, 256
    caches = []
    for _ in range(n_layers):
        cache = KVCache()
        cache.keys, cache.values = (mx.zeros((1, 1, 2048, head)) for _ in range(2))
        cache.offset = n_tokens
        caches.append(cache)
    mx.eval([[cache.keys, cache.values] for cache in caches])
    group = RowGroup(Row(0, [0] * n_tokens, 10_000, None, (), frozenset()), caches)
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


def placing(uid, n_tokens, value):
    """A row of so many tokens, whose keys and values are all `value`."""
    cache = KVCache()
    cache.keys, cache.values = (mx.full((1, 1, n_tokens, 2), value) for _ in range(2))
    cache.offset = n_tokens
    return Row(uid, [0] * n_tokens, 100, None, (), frozenset()), [cache]


@pytest.mark.parametrize("at", [0, 8])
def test_infinite_values_of_a_row_that_has_left_reach_no_other_row(at):
    """Attention gives masked values the weight zero, but zero times infinity is not a number. The row is the first of
    nine, so that the last one takes its place; or the last, so that the next row to join takes it."""
    placings = [placing(n, 5, 1.0) for n in range(9)]
    placings[4] = placing(4, 40, 1.0)
    placings[at] = placing(at, 30, mx.inf)
    group = RowGroup(*placings[0])
    group.add(placings[1:])
    group.remove(placings[at][0])
    group.shrink()
    group.add([placing(9, 5, 1.0)])
    group.begin_step()
    new = mx.ones((9, 1, 1, 2))
    _, values = group.put(0, new, new)
    assert values.shape == (9, 1, 41, 2)
    assert mx.isfinite(values).all().item()


def test_rows_with_a_mask_that_the_model_has_made_itself_are_refused():
    tokens = mx.ones((2, 1, 3, 4))
    kv = RowsKV([Part(0, 2, None, is_chunk=False)], [tokens], [None])
    queries = mx.ones((2, 1, 1, 4))
    assert attention(queries, kv, kv, None, 1.0, None).shape == (2, 1, 1, 4)
    with pytest.raises(ValueError, match="mask of its own"):
        attention(queries, kv, kv, None, 1.0, mx.array([True, False, True]))
