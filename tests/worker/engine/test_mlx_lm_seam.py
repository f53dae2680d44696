"""mlx-lm's functions and caches are called as `engine/` calls them; a release that changes one is noticed by name.

Only what rows rely on: other uses of mlx-lm fail by themselves when they change. The answers are tested elsewhere.
"""

import inspect

import pytest

pytestmark = pytest.mark.mlx

FUNCTIONS = {
    "models.base.scaled_dot_product_attention": "queries keys values cache scale mask sinks",
    "models.base.create_attention_mask": "h cache window_size return_array",
    "models.base.create_causal_mask": "N offset window_size right_padding left_padding",
    "models.cache.make_prompt_cache": "model max_kv_size",
    "models.cache.CacheList.__init__": "self caches",
    "models.cache.KVCache.make_mask": "self args kwargs",
    "models.cache.TokenBuffer.__init__": "self tokens",
    "models.cache.TokenBuffer.update_and_fetch": "self tokens",
    "models.cache.KVCache.__init__": "self",
    "models.cache.KVCache.update_and_fetch": "self keys values",
    "models.cache.KVCache.keys_and_values": "self",
    "models.cache.KVCache.empty": "self",
    "models.cache.RotatingKVCache.merge": "caches",
    "models.cache.BatchRotatingKVCache.extend": "self other",
    "models.cache.BatchRotatingKVCache.filter": "self batch_indices",
    "models.cache.BatchRotatingKVCache.extract": "self idx",
    "models.cache.BatchRotatingKVCache.update_and_fetch": "self keys values",
    "models.cache.ArraysCache.merge": "caches",
    "models.cache.ArraysCache.extend": "self other",
    "models.cache.ArraysCache.filter": "self batch_indices",
    "models.cache.ArraysCache.extract": "self idx",
    "utils.maybe_set_recommended_wired_limit": "",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_mlx_lm_takes_what_rows_pass(name):
    import mlx_lm.models.cache
    import mlx_lm.utils

    found = mlx_lm
    for part in name.split("."):
        found = getattr(found, part)
    assert list(inspect.signature(found).parameters) == FUNCTIONS[name].split()


@pytest.mark.parametrize("is_array", [False, True])
def test_a_model_asks_a_cache_for_its_mask_with_the_arguments_that_row_caches_take(is_array):
    import mlx.core as mx
    from mlx_lm.models.base import create_attention_mask

    from stoker_worker.engine.rows.attention import Step, StepCache

    assert create_attention_mask(mx.zeros((2, 1, 4)), StepCache(Step([]), 0), return_array=is_array) is None


def test_keys_and_values_lie_in_a_cache_as_rows_take_them():
    """Rows make their own arrays from these, and caches from theirs."""
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache

    cache, new = KVCache(), mx.ones((1, 2, 3, 4))
    cache.update_and_fetch(new, 2 * new)
    assert cache.offset == 3
    assert cache.keys.shape[2] >= 3
    larger = KVCache()
    larger.keys, larger.values, larger.offset = mx.zeros((1, 2, 8, 4)), mx.zeros((1, 2, 8, 4)), 5
    room = larger.keys
    keys, values = larger.update_and_fetch(new, 2 * new)
    assert larger.keys is room  # there is room, so nothing is copied
    assert (larger.offset, keys.shape, values.shape) == (8, (1, 2, 8, 4), (1, 2, 8, 4))
    assert mx.array_equal(keys[:, :, 5:], new)
    assert mx.array_equal(larger.state[1][:, :, :8], values)


@pytest.mark.parametrize("kind", ["window", "recurrent"])
def test_caches_of_other_layers_merge_grow_and_shrink_in_place_and_give_a_row_back(kind):
    import mlx.core as mx
    from mlx_lm.models.cache import ArraysCache, RotatingKVCache

    def row(number):
        if kind == "recurrent":
            cache = ArraysCache(size=1)
            cache[0] = number * mx.ones((1, 2))
            return cache
        cache = RotatingKVCache(max_size=4)
        cache.update_and_fetch(*(number * mx.ones((1, 1, number, 2)) for _ in range(2)))
        return cache

    def first(cache):
        return (cache[0] if kind == "recurrent" else cache.keys).max().item()

    batch = row(1).merge([row(1), row(2)])
    assert batch.extend(row(3).merge([row(3)])) is None
    assert batch.filter([2, 0, 1]) is None  # any order
    assert [first(batch.extract(i)) for i in range(3)] == [3, 1, 2]
    assert type(batch.extract(0)) is type(row(1))
    assert batch.nbytes > 0


def test_rows_with_a_mask_that_the_model_has_made_itself_are_refused():
    import mlx.core as mx

    from stoker_worker.engine.rows.attention import Part, RowsKV, attention

    tokens = mx.ones((2, 1, 3, 4))
    kv = RowsKV([Part(0, 2, None, is_chunk=False)], [tokens], [None])
    queries = mx.ones((2, 1, 1, 4))
    assert attention(queries, kv, kv, None, 1.0, None).shape == (2, 1, 1, 4)
    with pytest.raises(ValueError, match="mask of its own"):
        attention(queries, kv, kv, None, 1.0, mx.array([True, False, True]))
