"""The proof at load: right models are batched, wrong ones get the widest mode that is right, and the log tells why."""

import itertools
import json
import logging
from dataclasses import replace
from typing import Any

import pytest
from tests.worker.engine.layouts import Layout
from tests.worker.engine.tiny_models import CONFIGS

from stoker_worker.engine.provider import MlxProvider
from stoker_worker.ports.model import WIDEST, Batching, MaxBatch, ServingMode
from stoker_worker.settings import read_settings

pytestmark = pytest.mark.mlx


def proof_of(layout, max_batch=8, most_s=1e6, **more):
    """Without `most_s`, there is time for every trial."""
    from stoker_worker.engine.proof import prove

    return prove(layout.model, layout.loaded, max_batch=max_batch, most_s=most_s, **more)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("qwen2", "qwen3")])  # as llama
def test_a_model_that_is_right_in_a_batch_is_batched(name):
    layout = Layout(name)
    verdict = proof_of(layout)
    assert (verdict.mode, verdict.why) == (ServingMode(layout.batching), ())
    assert layout.batching == (Batching.BATCHED if name == "mamba2" else Batching.ROWS)


@pytest.mark.parametrize("max_batch", [1, 2])
def test_a_narrow_worker_proves_only_the_widths_it_runs(max_batch):
    assert proof_of(Layout("gemma3_text"), max_batch).mode == WIDEST


@pytest.mark.parametrize(("dtype", "kv_bits"), [("bfloat16", None), ("bfloat16", 8), ("float16", 8)])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2", "falcon_h1"])
@pytest.mark.slow
def test_rounding_is_no_fault(name, dtype, kv_bits):
    assert proof_of(Layout(name, dtype=dtype, kv_bits=kv_bits)).mode == WIDEST


def test_a_fault_in_8_bits_is_not_taken_for_rounding(monkeypatch):
    layout = Layout("llama", kv_bits=8)
    break_when(layout, monkeypatch, lambda sequences, tokens: sequences > 1 and tokens == 1)
    assert proof_of(layout).mode.batching == Batching.ONE_AT_A_TIME


def wrong_position(attention, patch):
    patch.setattr(attention.StepCache, "offset", property(lambda cache: cache._step.offset + 1))


def queries_of_the_first_group_of_rows(attention, patch):
    def of_the_first(queries, part):
        if part.first and not part.is_chunk:
            part = replace(part, first=0, last=part.last - part.first)
        return of_part(queries, part)

    of_part = attention._of_part
    patch.setattr(attention, "_of_part", of_the_first)


def second_group_of_rows_without_its_mask(attention, patch):
    def unmasked(step, sizes):
        begin(step, sizes)
        step.parts[1:] = [replace(part, mask=None) for part in step.parts[1:]]

    begin = attention.Step.begin
    patch.setattr(attention.Step, "begin", unmasked)


def wrong_after_a_common_beginning(attention, patch):
    after = attention.attention_after
    patch.setattr(attention, "attention_after", lambda *args, **options: 1.1 * after(*args, **options))


IN_ROWS = (
    wrong_position,
    queries_of_the_first_group_of_rows,
    second_group_of_rows_without_its_mask,
    wrong_after_a_common_beginning,
)


@pytest.mark.parametrize("fault", IN_ROWS)
def test_a_model_that_is_wrong_in_rows_is_batched_by_mlx_lm(fault, monkeypatch):
    from stoker_worker.engine.rows import attention

    fault(attention, monkeypatch)
    verdict = proof_of(Layout("llama"))
    assert verdict.mode == ServingMode(Batching.BATCHED)
    assert "in rows: a sequence of" in verdict.why[0]


def test_caches_that_mlx_lm_cannot_batch_run_one_at_a_time_without_memory():
    verdict = proof_of(Layout("llama4"))
    assert verdict.mode == ServingMode(Batching.ONE_AT_A_TIME, memory=False)
    assert "one batch" in verdict.why[0]


def break_when(layout, monkeypatch, is_wrong, times=0.7):
    """Make the model's answers wrong, or raise, in the passes where `is_wrong(batch, tokens)`."""
    model = type(layout.model)
    right = model.__call__

    def call(self, inputs, *args, **options):
        logits = right(self, inputs, *args, **options)
        return logits * times if is_wrong(*inputs.shape) else logits

    monkeypatch.setattr(model, "__call__", call)


@pytest.fixture
def no_rows(monkeypatch):
    """Models whose attention does not go through mlx-lm's function."""
    from stoker_worker.engine import proof

    monkeypatch.setattr(proof, "why_not_in_rows", lambda model, spec: "not today")


@pytest.mark.usefixtures("no_rows")
def test_sequences_that_are_wrong_when_prefilled_together_are_prefilled_one_by_one(monkeypatch):
    layout = Layout("llama")
    noise = NoisePrefill(layout, monkeypatch)
    verdict = proof_of(layout)
    assert noise.made
    assert verdict.mode == ServingMode(Batching.SINGLE_PREFILL)
    assert str(Batching.BATCHED) in verdict.why[0]


class NoisePrefill:
    """Prefilling several sequences at once writes a wrong cache, as in recurrent layers that take padding for text."""

    def __init__(self, layout, monkeypatch):
        self.made = 0
        attention = type(layout.model.model.layers[0].self_attn)
        right = attention.__call__

        def call(attention, x, mask=None, cache=None):
            sequences, tokens, _ = x.shape
            if sequences > 1 and tokens > 1:
                self.made += 1
                x = x[:, ::-1]
            return right(attention, x, mask, cache)

        monkeypatch.setattr(attention, "__call__", call)


def test_sequences_that_are_wrong_at_one_width_run_one_at_a_time(monkeypatch):
    layout = Layout("llama")  # with two KV heads
    break_when(layout, monkeypatch, lambda sequences, tokens: sequences == 2)
    verdict = proof_of(layout)
    assert verdict.mode == ServingMode(Batching.ONE_AT_A_TIME)


def test_a_model_whose_caches_come_back_wrong_keeps_its_batch_and_has_no_memory(monkeypatch):
    from stoker_worker.engine import batch_engine, transfer

    def mirrored(*args):
        caches = prefix_to_caches(*args)
        for cache in caches:
            cache.keys = cache.keys[..., ::-1]
        return caches

    prefix_to_caches = transfer.prefix_to_caches
    monkeypatch.setattr(batch_engine, "prefix_to_caches", mirrored)
    verdict = proof_of(Layout("llama"))
    assert verdict.mode == ServingMode(Batching.ROWS, memory=False)
    assert "restored" in verdict.why[0]


def test_a_model_whose_snapshots_cannot_be_taken_keeps_its_batch_and_has_no_memory(monkeypatch):
    from stoker_worker.engine import batch_engine

    def refuse(*args):
        raise ValueError("a window of an odd shape")

    monkeypatch.setattr(batch_engine, "take_snapshot", refuse)
    verdict = proof_of(Layout("gemma3_text"))
    assert verdict.mode == ServingMode(Batching.ROWS, memory=False)
    assert "a window of an odd shape" in verdict.why[0]


def test_a_model_whose_answer_depends_on_the_chunks_is_served_as_mlx_lm_does_it(monkeypatch):
    layout = Layout("llama")
    break_when(layout, monkeypatch, lambda sequences, tokens: tokens in range(2, 100))
    assert proof_of(layout).mode == ServingMode(Batching.AS_MLX_LM, memory=False)


def test_a_small_fault_in_float32_is_no_rounding(monkeypatch):
    layout = Layout("llama")
    break_when(layout, monkeypatch, lambda sequences, tokens: sequences > 1, times=0.99)
    assert proof_of(layout).mode.batching == Batching.ONE_AT_A_TIME


# --- sparse budgets ---


@pytest.fixture
def changed(monkeypatch):
    """A specimen of the zoo with another config."""
    from tests.zoo.architectures import ARCHITECTURES
    from tests.zoo.specimen import Specimen

    def make(name, **changes):
        config = ARCHITECTURES[name]
        nested = {"text_config": {**config["text_config"], **changes}} if "text_config" in config else changes
        monkeypatch.setitem(ARCHITECTURES, f"{name}+changed", {**config, **nested})
        return Specimen(f"{name}+changed")

    return make


@pytest.mark.parametrize(("size", "count", "max_batch"), [(4, 4, 2), (32, 8, 8), (3, 20, 8)])
def test_a_sparse_budget_that_is_a_product_of_two_numbers_is_crossed(size, count, max_batch, changed):
    specimen = changed("minimax_m3_vl", index_block_size=size, index_topk_blocks=count)
    assert proof_of(specimen, max_batch).mode.batching == Batching.ONE_AT_A_TIME


def test_a_sparse_budget_that_is_a_product_of_numbers_of_a_nested_config_is_crossed(changed):
    sparse = {"sparse_num_index_heads": 2, "sparse_index_dim": 8, "sparse_block_size": 16, "sparse_topk_blocks": 4}
    specimen = changed("minimax_m3_vl", index_block_size=None, sparse_attention_config=sparse)
    assert proof_of(specimen).mode.batching == Batching.ONE_AT_A_TIME


def test_a_budget_for_which_there_is_no_time_is_named(changed):
    verdict = proof_of(changed("minimax_m3_vl", index_block_size=64, index_topk_blocks=50), most_s=5.0)
    assert "3200" in verdict.why[0]


def test_the_time_for_a_window_follows_from_a_prefill_as_long_and_not_from_many_short_ones(monkeypatch):
    import time

    layout, clock = Layout("gpt_oss"), [0.0]

    def takes_a_while(sequences, tokens):
        clock[0] += 0.1 + 1e-4 * tokens
        return False

    break_when(layout, monkeypatch, takes_a_while)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert proof_of(layout, most_s=5.0).why == ()


# --- drafts ---


@pytest.mark.parametrize("draft_ngram", [False, True])
def test_drafts_are_tried_when_they_are_on(draft_ngram, monkeypatch):
    from stoker_worker.engine.rows.groups import RowGroups

    monkeypatch.setattr(RowGroups, "trim", lambda groups, row, n_tokens: None)  # wrong drafts stay in the cache
    verdict = proof_of(Layout("llama"), draft_ngram=draft_ngram)
    assert verdict.mode == ServingMode(Batching.BATCHED if draft_ngram else Batching.ROWS)


# --- memory and log of verdicts ---


@pytest.fixture
def verdicts(tmp_path):
    from stoker_worker.engine.proof import Verdict, remembered_or_proved

    class Counted:
        proofs = 0
        memo = tmp_path / "model-proofs.json"
        found = Verdict(ServingMode(Batching.SINGLE_PREFILL), ("batched: wrong",))

        def of(self, fingerprint="f", max_batch=8, device="cpu", draft_ngram=False):
            def prove():
                self.proofs += 1
                return self.found

            how = {"max_batch": max_batch, "device": device, "draft_ngram": draft_ngram}
            return remembered_or_proved(self.memo, fingerprint, **how, prove=prove)

    return Counted()


def test_only_the_first_start_proves_also_when_it_had_no_time_for_everything(verdicts):
    verdicts.found = replace(verdicts.found, why=("not tried: sequences longer than 4096 tokens",))
    assert verdicts.of() == verdicts.of() == verdicts.found
    assert verdicts.proofs == 1


def test_another_model_batch_device_or_version_and_drafts_get_their_own_proof(verdicts, monkeypatch):
    from stoker_worker.engine import proof

    ways: list[dict[str, Any]] = [{}, {"fingerprint": "g"}, {"max_batch": 4}, {"device": "gpu"}, {"draft_ngram": True}]
    for n_proofs, how in enumerate(ways, start=1):
        verdicts.of(**how)
        assert verdicts.proofs == n_proofs
    monkeypatch.setattr(proof, "version", lambda name: "99")
    verdicts.of()
    assert verdicts.proofs == 6


@pytest.mark.parametrize(
    "damage", ["", "[]", "{", '{"KEY": {"rows": "WIDER", "memory": true, "why": []}}', '{"KEY": 3}']
)
def test_a_damaged_memory_of_verdicts_costs_a_proof_and_nothing_else(verdicts, damage):
    verdicts.of()
    (key,) = json.loads(verdicts.memo.read_text())
    verdicts.memo.write_text(damage.replace("KEY", key))
    assert verdicts.of().mode == ServingMode(Batching.SINGLE_PREFILL)
    assert verdicts.proofs == 2


@pytest.mark.parametrize(
    ("error", "is_remembered", "fails_above", "mode"),
    [
        (RuntimeError("[malloc]"), False, 1, ServingMode(Batching.ONE_AT_A_TIME)),
        (ValueError("shapes"), True, 0, ServingMode(Batching.AS_MLX_LM, memory=False)),
    ],
)
def test_only_a_permanent_failure_is_remembered(tmp_path, monkeypatch, error, is_remembered, fails_above, mode):
    from stoker_worker.engine.proof import remembered_or_proved

    def is_wrong(sequences, tokens):
        if sequences > fails_above:
            raise error
        return False

    layout = Layout("llama")
    break_when(layout, monkeypatch, is_wrong)
    memo = tmp_path / "model-proofs.json"
    verdict = remembered_or_proved(
        memo, "f", max_batch=8, draft_ngram=False, device="cpu", prove=lambda: proof_of(layout)
    )
    assert verdict.mode == mode
    assert memo.exists() == is_remembered


def test_long_sequences_for_which_memory_is_short_are_named_and_the_others_decide(monkeypatch):
    from stoker_worker.engine import proof

    layout, plans = Layout("gemma3_text"), []

    def planned(*args):
        plans.append(of(*args))
        return plans[-1]

    def is_wrong(sequences, tokens):
        if sequences > 1 and plans[-1][0][0].longest > 150:
            raise RuntimeError("[malloc]")
        return False

    of = proof._plan
    monkeypatch.setattr(proof, "_plan", planned)
    break_when(layout, monkeypatch, is_wrong)
    verdict = proof_of(layout)
    assert (verdict.mode, verdict.may_pass) == (ServingMode(Batching.BATCHED), False)
    assert "not tried: sequences longer than 64" in verdict.why[0]


def test_a_cache_made_in_another_mode_belongs_to_another_model():
    from stoker_worker.models.fingerprint import in_mode

    modes = [WIDEST, ServingMode(Batching.SINGLE_PREFILL), ServingMode(proved=False), ServingMode(memory=False)]
    assert len({in_mode("f", mode) for mode in modes}) == 4


def test_a_skipped_proof_is_logged_loudly_and_is_part_of_the_identity(tmp_path, caplog):
    layout = Layout("llama")
    settings = read_settings({"store": tmp_path, "model": "m", "skip_proof": True})
    with caplog.at_level(logging.WARNING):
        mode = MlxProvider(settings)._mode(layout.model, layout.loaded)
    assert mode == ServingMode(proved=False)
    assert "NOT PROVED" in caplog.text


@pytest.mark.usefixtures("no_rows")
def test_the_mode_and_its_reasons_are_logged(tmp_path, caplog, monkeypatch):
    layout = Layout("llama")
    NoisePrefill(layout, monkeypatch)
    provider = MlxProvider(read_settings({"store": tmp_path, "model": "m"}))
    loaded = replace(layout.loaded, max_batch=MaxBatch(8))
    for _ in range(2):  # the second time from the remembered verdict
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            mode = provider._mode(layout.model, loaded)
        assert mode == ServingMode(Batching.SINGLE_PREFILL)
        assert "prefilled one by one (batched: a sequence of" in caplog.text


# --- half precision ---


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_fault_in_every_third_step_is_no_rounding(dtype, monkeypatch):
    layout, steps = Layout("llama", dtype=dtype), itertools.count()
    break_when(layout, monkeypatch, lambda sequences, tokens: sequences > 1 and tokens == 1 and next(steps) % 3 == 0)
    assert proof_of(layout).mode.batching == Batching.ONE_AT_A_TIME


@pytest.mark.parametrize(
    ("name", "seed", "batching"),
    [
        ("afm7", 1, Batching.ONE_AT_A_TIME),  # its fault is hardly larger than rounding elsewhere
        ("mamba", 0, Batching.SINGLE_PREFILL),
        ("gemma2", 0, Batching.ONE_AT_A_TIME),
        ("plamo3", 2, Batching.AS_MLX_LM),  # with other seeds too, the fault is about as large as the limit
    ],
)
def test_a_fault_is_distinguished_from_rounding(name, seed, batching):
    from tests.zoo.specimen import Specimen

    assert proof_of(Specimen(name, seed=seed, dtype="bfloat16")).mode.batching == batching
