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


def simulate(*, decoding, wanting, pass_s=0.1, token_s=0.002, decode_s=0.1, steps=400, max_step_s=0.5):
    """A machine on which a pass costs `pass_s` and each token `token_s`; returns chunks and seconds of every step."""
    pace, chunks, seconds = PrefillPace(max_step_s, 1024), [], []
    for _ in range(10):
        pace.note(decode_s, decoding=decoding, wanting=0, prefill_tokens=0)
    for _ in range(steps):
        chunk = pace.chunk_tokens(decoding=decoding, prefilling=1, waiting=wanting - 1)
        step_s = (decode_s if decoding else 0.0) + (pass_s + token_s * chunk if chunk else 0.0)
        pace.note(step_s, decoding=decoding, wanting=wanting, prefill_tokens=chunk)
        chunks.append(chunk)
        seconds.append(step_s)
    return chunks, seconds


def test_one_prompt_among_many_that_decode_leaves_them_half_their_speed_and_gets_the_other_half():
    chunks, seconds = simulate(decoding=7, wanting=1)
    quiet_s = 0.1 * len(seconds)
    assert 0.5 <= quiet_s / sum(seconds) <= 0.6
    assert max(seconds) <= 0.1 + 0.55
    assert max(chunks) == pytest.approx(200, abs=5)  # as large as may be: few passes for many tokens
    assert 0 in chunks


@pytest.mark.parametrize(("decoding", "wanting"), [(0, 1), (1, 15), (8, 8)])
def test_a_batch_that_is_half_empty_is_filled_without_a_pause_in_steps_of_twice_the_limit(decoding, wanting):
    chunks, seconds = simulate(decoding=decoding, wanting=wanting)
    assert 0 not in chunks
    assert seconds[-1] == pytest.approx(1.0 + (0.1 if decoding else 0.0), abs=0.02)


def test_chunks_follow_the_machine_and_stay_within_their_bounds():
    assert PrefillPace(0.5, 1024).chunk_tokens(decoding=0, prefilling=1, waiting=0) == 64
    assert PrefillPace(0.5, 32).chunk_tokens(decoding=0, prefilling=1, waiting=0) == 32
    fast, _ = simulate(decoding=0, wanting=1, pass_s=0.001, token_s=1e-6)
    assert fast[:4] == [64, 256, 1024, 1024]
    slow, _ = simulate(decoding=0, wanting=1, token_s=1.0)
    assert slow[-1] == 16


def test_moving_a_long_prefix_takes_no_more_than_half_a_step_of_those_who_decode():
    pace = PrefillPace(0.5, 1024)
    assert pace.move_s(decoding=3) == 0.5  # nothing is known yet
    pace.note(0.1, decoding=3, wanting=0, prefill_tokens=0)
    assert pace.move_s(decoding=3) == 0.05
    assert pace.move_s(decoding=0) == 0.5


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
