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


def test_rows_with_a_mask_that_the_model_has_made_itself_are_refused():
    import mlx.core as mx

    from stoker_worker.engine.rows.attention import Part, RowsKV, attention

    tokens = mx.ones((2, 1, 3, 4))
    kv = RowsKV([Part(0, 2, None, is_chunk=False)], [tokens], [None])
    queries = mx.ones((2, 1, 1, 4))
    assert attention(queries, kv, kv, None, 1.0, None).shape == (2, 1, 1, 4)
    with pytest.raises(ValueError, match="mask of its own"):
        attention(queries, kv, kv, None, 1.0, mx.array([True, False, True]))
