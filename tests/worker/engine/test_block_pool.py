"""The block pool counts right: an admitted sequence fits, and a removed one's blocks are free again."""

from hypothesis import given
from hypothesis import strategies as st

from stoker_worker.engine.kv_memory import BlockPool


def test_a_full_pool_admits_and_grows_no_sequence_until_one_leaves():
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
def test_after_any_history_the_used_blocks_are_the_held_blocks_and_within_the_total(history):
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
