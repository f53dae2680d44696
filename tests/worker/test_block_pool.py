"""The block pool counts right: what it lets in fits, and what leaves is free again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_shared.errors import BlockPoolTooSmall
from stoker_worker.engine.block_pool import BlockPool, blocks_for


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (255, 1), (256, 1), (257, 2), (512, 2), (513, 3)])
def test_blocks_are_whole(tokens, blocks):
    assert blocks_for(tokens) == blocks


def test_a_sequence_that_could_never_fit_is_refused_with_the_numbers():
    with pytest.raises(BlockPoolTooSmall, match=r"1025 tokens.*holds 1024"):
        BlockPool(4).check(1025)
    BlockPool(4).check(1024)


def test_a_full_pool_lets_nobody_in_until_somebody_leaves():
    pool = BlockPool(4)
    assert pool.allocate(1, 700)
    assert not pool.allocate(2, 400)
    assert pool.allocate(3, 256)
    pool.release(1)
    assert pool.allocate(2, 400)


def test_one_sequence_cannot_hold_blocks_twice():
    pool = BlockPool(4)
    pool.allocate(1, 10)
    with pytest.raises(ValueError, match="already"):
        pool.allocate(1, 10)


def test_a_budget_smaller_than_a_block_holds_nothing():
    assert BlockPool.of_bytes(1000, bytes_per_block=1001).total == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 2000))))
def test_after_any_history_what_is_used_is_what_is_held_and_never_above_the_total(history):
    pool, held = BlockPool(16), {}
    for uid, tokens in history:
        if uid in held:
            pool.release(uid)
            del held[uid]
        elif pool.allocate(uid, tokens):
            held[uid] = blocks_for(tokens)
        assert pool.used == sum(held.values()) <= pool.total
    for uid in held:
        pool.release(uid)
    assert pool.free == pool.total
