"""The block pool counts right: what it lets in fits, and what leaves is free again."""

from hypothesis import given
from hypothesis import strategies as st

from stoker_worker.engine.block_pool import BlockPool


def test_a_full_pool_lets_nobody_in_or_grow_until_somebody_leaves():
    pool = BlockPool(4)
    assert pool.resize(1, 3)
    assert not pool.resize(2, 2)
    assert pool.resize(3, 1)
    assert not pool.resize(3, 2)
    assert pool.held(3) == 1
    pool.release(1)
    assert pool.resize(2, 2)
    assert pool.free == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.booleans())))
def test_after_any_history_what_is_used_is_what_is_held_and_never_above_the_total(history):
    pool, held = BlockPool(16), {}
    for uid, blocks, leaves in history:
        if leaves:
            pool.release(uid)
            held.pop(uid, None)
        elif pool.resize(uid, blocks):
            held[uid] = blocks
        assert pool.used == sum(held.values()) <= pool.total
    for uid in held:
        pool.release(uid)
    assert pool.free == pool.total
