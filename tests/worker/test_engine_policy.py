"""The engine's pure policies: what a batch costs, how much is prefilled in a step, who comes in next."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_worker.cache_spec import ArraySpec, LayerKind, LayerSpec, ModelCacheSpec
from stoker_worker.engine.pace import PrefillPace
from stoker_worker.engine.pricing import BatchPricing
from stoker_worker.engine.waiting_rows import MOST_OVERTAKEN, WaitingRows

FULL = LayerSpec(LayerKind.FULL, 2, 8, 8)
WINDOW = LayerSpec(LayerKind.WINDOW, 2, 8, 8, window_tokens=64)
STATE = LayerSpec(LayerKind.RECURRENT, arrays=(ArraySpec((4, 8), "float32"),))
SPECS = {
    "full": ModelCacheSpec((FULL, FULL), "float32"),
    "window": ModelCacheSpec((WINDOW, FULL), "bfloat16"),
    "recurrent": ModelCacheSpec((STATE, STATE), "float32"),
    "hybrid": ModelCacheSpec((STATE, FULL, WINDOW), "float16"),
}


# --- pricing ---


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@given(n=st.integers(1, 5000), blocks=st.integers(0, 60))
def test_the_longest_row_that_fits_is_just_the_longest(spec, n, blocks):
    pricing = BatchPricing(spec, 64)
    assert pricing.row_blocks(n) <= pricing.row_blocks(n + 1)
    longest = pricing.longest_row(blocks)
    assert longest == 0 or pricing.row_blocks(longest) <= blocks
    assert pricing.row_blocks(longest + 1) > blocks or longest >= 2**31


def test_short_rows_beside_a_long_one_cost_what_the_long_one_costs():
    pricing = BatchPricing(SPECS["full"], 64)
    prices = pricing.of_batch([4096, *[64] * 7], [])
    assert prices.decoding == pricing.row_blocks(4096) == 17
    assert pricing.of_batch([64] * 8, []).decoding == 2


def test_a_window_costs_no_more_than_its_size_and_what_is_prefilled():
    pricing = BatchPricing(SPECS["window"], 64)
    beside = pricing.row_blocks(100_000) * pricing.block_bytes - (100_000 + 255) * 64
    assert beside < 2 * (64 + 64) * 64 + pricing.block_bytes


def test_a_model_without_full_attention_costs_the_same_however_long_its_rows_are():
    pricing = BatchPricing(SPECS["recurrent"], 64)
    assert pricing.block_bytes == 2 * 4 * 8 * 4
    assert pricing.row_blocks(1) == pricing.row_blocks(1_000_000) == 1


# --- pace ---


def learnt(max_step_s=0.5, *, decode_s=0.1, token_s=0.01, most_tokens=1024):
    pace = PrefillPace(max_step_s, most_tokens)
    for _ in range(30):
        pace.note(decode_s, decoding=7, prefill_tokens=0)
        pace.note(decode_s + 20 * token_s, decoding=7, prefill_tokens=20)
    return pace


def test_with_nobody_decoding_a_step_takes_as_long_as_it_may():
    pace = learnt()
    assert pace.chunk_tokens(decoding=0, prefilling=1, waiting=0) == pytest.approx(50, abs=1)
    assert pace.chunk_tokens(decoding=0, prefilling=2, waiting=0) == pytest.approx(25, abs=1)


def test_one_prompt_among_many_that_decode_leaves_them_half_their_speed():
    pace = learnt(token_s=0.002)
    chunk = pace.chunk_tokens(decoding=7, prefilling=1, waiting=0)
    assert 0.5 * 0.1 < chunk * 0.002 <= 0.1


def test_many_prompts_are_not_held_up_by_the_one_row_that_decodes():
    pace = learnt(token_s=0.002)
    few = pace.budget_s(decoding=1, prefilling=1)
    assert pace.budget_s(decoding=1, prefilling=4) == pytest.approx(4 * few)
    assert pace.budget_s(decoding=1, prefilling=15) == 0.5


def test_chunks_follow_the_machine_and_stay_within_their_bounds():
    assert PrefillPace(0.5, 1024).chunk_tokens(decoding=0, prefilling=1, waiting=0) == 64
    assert PrefillPace(0.5, 32).chunk_tokens(decoding=0, prefilling=1, waiting=0) == 32
    fast = PrefillPace(0.5, 1024)
    fast.note(0.01, decoding=0, prefill_tokens=1024)
    assert fast.chunk_tokens(decoding=0, prefilling=1, waiting=0) == 1024
    assert learnt(token_s=5.0).chunk_tokens(decoding=3, prefilling=4, waiting=9) == 16


# --- who comes next ---


def row(uid, size=1):
    return SimpleNamespace(uid=uid, size=size)


def test_rows_come_in_the_order_they_were_submitted_also_after_being_set_aside():
    waiting = WaitingRows()
    for uid in (3, 1, 2):
        waiting.add(row(uid))
    assert [waiting.take(lambda one: True).uid for _ in range(3)] == [1, 2, 3]
    assert waiting.take(lambda one: True) is None


def test_small_rows_pass_a_large_one_only_so_often():
    waiting = WaitingRows()
    waiting.add(row(0, size=9))
    passed = 0
    for uid in range(1, 200):
        waiting.add(row(uid))
        if waiting.take(lambda one: one.size < 5) is None:
            break
        passed += 1
    assert passed == MOST_OVERTAKEN
    assert waiting.take(lambda one: True).uid == 0  # the batch has drained
    assert waiting.take(lambda one: one.size < 5).uid == passed + 1


def test_a_row_that_is_taken_out_is_gone():
    waiting, one = WaitingRows(), row(5)
    waiting.add(one)
    waiting.discard(one)
    waiting.discard(one)
    assert list(waiting) == []
