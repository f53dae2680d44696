"""The function that stands in for mlx-lm's attention refuses what it would get wrong."""

import pytest

pytestmark = pytest.mark.mlx


def test_rows_with_a_mask_that_the_model_has_made_itself_are_refused():
    import mlx.core as mx

    from stoker_worker.engine.rows.attention import Part, RowsKV, attention

    tokens = mx.ones((2, 1, 3, 4))
    kv = RowsKV([Part(0, 2, None, is_chunk=False)], [tokens], [None])
    queries = mx.ones((2, 1, 1, 4))
    assert attention(queries, kv, kv, None, 1.0, None).shape == (2, 1, 1, 4)
    with pytest.raises(ValueError, match="mask of its own"):
        attention(queries, kv, kv, None, 1.0, mx.array([True, False, True]))
