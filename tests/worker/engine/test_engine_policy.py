"""The engine's pure policies: the cost of a batch, its width, the prefill of a step, and who waits."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_worker.engine.kv_memory import KVCost
from stoker_worker.engine.scheduler import WaitingSequences
from stoker_worker.engine.step_limits import BatchWidth, PrefillBudget
from stoker_worker.ports.cache_spec import ArraySpec, LayerKind, LayerSpec, ModelCacheSpec

FULL = LayerSpec(LayerKind.FULL, 2, 8, 8)
WINDOW = LayerSpec(LayerKind.WINDOW, 2, 8, 8, window_tokens=64)
STATE = LayerSpec(LayerKind.RECURRENT, arrays=(ArraySpec((4, 8), "float32"),))
SPECS = {
    "full": ModelCacheSpec((FULL, FULL), "float32"),
    "window": ModelCacheSpec((WINDOW, FULL), "bfloat16"),
    "recurrent": ModelCacheSpec((STATE, STATE), "float32"),
    "hybrid": ModelCacheSpec((STATE, FULL, WINDOW), "float16"),
}


# --- cost ---


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@given(n=st.integers(1, 5000), blocks=st.integers(0, 60), in_rows=st.booleans())
def test_the_longest_sequence_fits_and_one_token_more_does_not(spec, n, blocks, in_rows):
    kv_cost = KVCost(spec, 64, in_rows=in_rows)
    assert kv_cost.sequence_blocks(n) <= kv_cost.sequence_blocks(n + 1)
    longest = kv_cost.longest_sequence(blocks)
    assert longest == 0 or kv_cost.sequence_blocks(longest) <= blocks
    assert kv_cost.sequence_blocks(longest + 1) > blocks or longest >= 2**31


def test_short_sequences_beside_a_long_one_cost_as_much_as_the_long_one():
    kv_cost = KVCost(SPECS["full"], 64)
    assert kv_cost.of_batch([4096, *[64] * 7], []) == 8 * [kv_cost.sequence_blocks(4096)] == 8 * [17]
    assert kv_cost.of_batch([64] * 8, []) == 8 * [2]


def test_in_rows_a_sequence_costs_its_own_length():
    kv_cost = KVCost(SPECS["full"], 64, in_rows=True)
    assert kv_cost.of_batch([4096, *[64] * 7], [64]) == [18, *8 * [2]]


def test_a_window_costs_no_more_than_its_size_and_the_prefilled_tokens():
    kv_cost = KVCost(SPECS["window"], 64)
    beside = kv_cost.sequence_blocks(100_000) * kv_cost.block_bytes - (100_000 + 255) * 64
    assert beside < 2 * (64 + 64) * 64 + kv_cost.block_bytes


def test_a_model_without_full_attention_costs_the_same_at_any_length():
    kv_cost = KVCost(SPECS["recurrent"], 64)
    assert kv_cost.block_bytes == 2 * 4 * 8 * 4
    assert kv_cost.sequence_blocks(1) == kv_cost.sequence_blocks(1_000_000) == 1


# --- batch width ---


def go_well(width, steps=64, n_sequences=8):
    for _ in range(steps):
        width.went_well(n_sequences)


def test_half_as_many_run_after_a_failed_step_and_all_again_after_quiet_steps_twice_as_many_if_that_breaks():
    width = BatchWidth(8)
    for quiet in (64, 128, 256, 64):
        width.broke(8)
        assert (width.now, width.is_searching) == (4, True)
        go_well(width, quiet - 1)
        assert width.now == 4
        go_well(width, 1)
        assert (width.now, width.is_searching) == (8, False)
        if quiet == 256:
            go_well(width, 256)


def test_quiet_steps_of_fewer_sequences_do_not_show_that_a_width_works():
    width = BatchWidth(8)
    for quiet in (64, 128, 256):
        width.broke(8)
        go_well(width, quiet, n_sequences=2)
        assert width.now == 8
        go_well(width, 1000, n_sequences=2)


def test_a_sequence_that_fails_alone_clears_the_width_of_blame():
    width = BatchWidth(8)
    for n in (8, 4, 2, 1, 1):
        width.broke(n)
    width.blame_one()
    go_well(width, 3 * 64)
    assert width.now == 8


# --- prefill budget ---


def simulate(*, decoding, wanting, pass_s=0.1, token_s=0.002, decode_s=0.1, steps=400, max_step_s=0.5):
    """A machine where a pass costs `pass_s` and each token `token_s`; returns chunks and seconds of every step."""
    budget, chunks, seconds = PrefillBudget(max_step_s, 1024), [], []
    for _ in range(10):
        budget.note(decode_s, decoding=decoding, wanting=0, prefill_tokens=0)
    for _ in range(steps):
        chunk = budget.chunk_tokens(decoding=decoding, prefilling=1, waiting=wanting - 1)
        step_s = (decode_s if decoding else 0.0) + (pass_s + token_s * chunk if chunk else 0.0)
        budget.note(step_s, decoding=decoding, wanting=wanting, prefill_tokens=chunk)
        chunks.append(chunk)
        seconds.append(step_s)
    return chunks, seconds


def test_one_prompt_beside_many_decoding_sequences_takes_half_of_the_time():
    chunks, seconds = simulate(decoding=7, wanting=1)
    quiet_s = 0.1 * len(seconds)
    assert 0.5 <= quiet_s / sum(seconds) <= 0.6
    assert max(seconds) <= 0.1 + 0.55
    assert max(chunks) == pytest.approx(200, abs=5)  # as large as possible: few passes for many tokens
    assert 0 in chunks


@pytest.mark.parametrize(("decoding", "wanting"), [(0, 1), (1, 15), (8, 8)])
def test_a_half_empty_batch_is_filled_without_a_pause_in_steps_of_twice_the_limit(decoding, wanting):
    chunks, seconds = simulate(decoding=decoding, wanting=wanting)
    assert 0 not in chunks
    assert seconds[-1] == pytest.approx(1.0 + (0.1 if decoding else 0.0), abs=0.02)


def test_a_machine_whose_passes_break_the_limit_by_themselves_makes_few_of_them():
    """As under heavy load, or with weights that take longer to read than a step may last."""
    chunks, _ = simulate(decoding=0, wanting=1, pass_s=2.0, token_s=0.001, steps=20)
    assert sum(chunks[:6]) > 800  # 96 tokens without that
    assert min(chunks[6:]) > 800


def test_chunks_follow_the_machine_and_stay_within_their_bounds():
    assert PrefillBudget(0.5, 1024).chunk_tokens(decoding=0, prefilling=1, waiting=0) == 64
    assert PrefillBudget(0.5, 32).chunk_tokens(decoding=0, prefilling=1, waiting=0) == 32
    fast, _ = simulate(decoding=0, wanting=1, pass_s=0.001, token_s=1e-6)
    assert fast[:4] == [64, 256, 1024, 1024]
    slow, _ = simulate(decoding=0, wanting=1, token_s=1.0)
    assert slow[-1] == 16


# --- waiting sequences ---


def test_sequences_run_in_the_order_they_were_submitted_also_after_a_preemption():
    waiting: Any = WaitingSequences()
    for uid in (3, 1, 2):
        waiting.add(SimpleNamespace(uid=uid))
    assert [waiting.take(lambda one: True).uid for _ in range(3)] == [1, 2, 3]
    assert waiting.take(lambda one: True) is None
