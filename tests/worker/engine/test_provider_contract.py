"""The contract of `ModelProviderPort`, for MLX's provider (on a tiny model's folder) and the scripted one."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.worker.models.tiny_gguf import metadata, random_weights, write_gguf

from stoker_shared import build_request
from stoker_shared.errors import BlockPoolTooSmall, ModelNotLoadable
from stoker_worker.engine.provider import MlxProvider
from stoker_worker.engine.scripted import ScriptedProvider
from stoker_worker.ports import GenerationWork
from stoker_worker.ports.model import Batching
from stoker_worker.settings import read_settings


def mlx_provider(folder, **settings):
    from stoker_worker.models.gguf import import_gguf

    if not (folder / "tiny").exists():
        weights, _ = random_weights(tied=True)
        write_gguf(folder / "tiny.gguf", metadata(), weights)
        import_gguf(folder / "tiny.gguf", folder / "tiny")
    return MlxProvider(
        read_settings({"store": folder / "store", "model": str(folder / "tiny"), "max_batch": 2} | settings)
    )


def scripted_provider(folder):
    return ScriptedProvider(max_batch=2, steps_per_s=1e9)


@pytest.fixture(params=[pytest.param(mlx_provider, marks=pytest.mark.mlx), scripted_provider])
def make_provider(request, tmp_path):
    return lambda: request.param(tmp_path)


def on_a_thread(provider, use):
    """As in the worker: load, use and leave on one thread that then ends."""

    def work():
        try:
            return use(*provider.load())
        finally:
            provider.leave_thread()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def test_the_engine_answers_prompts_of_the_models_tokenizer(make_provider):
    def use(engine, model):
        ids = tuple(model.tokenizer.encode("hello", special_start=True))
        assert model.tokenizer.decode(ids).endswith("hello")
        engine.submit(GenerationWork(build_request({"agent_id": "a", "prompt": "hello", "max_tokens": 3}), ids))
        done = []
        while engine.in_flight:
            done += engine.step()
        engine.close()
        return done, model, len(ids)

    (completion,), model, n_prompt = on_a_thread(make_provider(), use)
    assert completion.outcome == "finished"
    assert 1 <= len(completion.generated_ids) <= 3
    assert completion.cache.n_tokens == n_prompt + len(completion.generated_ids)
    assert len(completion.cache.layers) == len(model.spec.full_layers)
    assert model.has_memory
    assert model.context_tokens > n_prompt + 3
    assert max(completion.generated_ids) < model.vocabulary < 1000


@pytest.mark.mlx
def test_a_sequence_that_fits_the_kv_memory_is_taken_and_one_of_a_token_more_is_not(tmp_path):
    def use(engine, model):
        ids = tuple(model.tokenizer.encode("hello", special_start=True))

        def submit(n_tokens):
            request = build_request({"prompt": "hello", "max_tokens": n_tokens - len(ids)})
            engine.submit(GenerationWork(request, ids))

        submit(model.kv_tokens)
        with pytest.raises(BlockPoolTooSmall):
            submit(model.kv_tokens + 1)
        engine.close()
        return model

    model = on_a_thread(mlx_provider(tmp_path, kv_max_bytes=1 << 20), use)
    assert 256 < model.kv_tokens < 32_000


def test_the_same_model_has_the_same_identity_after_a_restart(make_provider):
    first, second = (on_a_thread(make_provider(), lambda engine, model: model) for _ in range(2))
    assert (first.name, first.fingerprint) == (second.name, second.fingerprint)
    assert first.tokenizer_fingerprint == second.tokenizer_fingerprint
    assert {len(first.fingerprint), len(first.tokenizer_fingerprint)} == {64}
    assert (first.spec, first.mode, first.context_tokens) == (second.spec, second.mode, second.context_tokens)


@pytest.mark.mlx
def test_answers_are_drafted_only_where_the_setting_says_so(tmp_path):
    for draft_ngram in (True, False):
        provider = mlx_provider(tmp_path, draft_ngram=draft_ngram)
        assert on_a_thread(provider, lambda engine, model: engine._generator._decode.drafts is not None) == draft_ngram


@pytest.mark.mlx
def test_a_thread_may_be_left_after_a_load_that_failed(tmp_path):
    provider = MlxProvider(read_settings({"store": tmp_path, "model": str(tmp_path / "nowhere")}))
    with pytest.raises(ModelNotLoadable):
        on_a_thread(provider, lambda engine, model: None)


@pytest.mark.mlx
@pytest.mark.parametrize(("wired_memory", "in_rows"), [(False, False), (True, True)])
def test_memory_is_wired_only_when_it_is_asked_for(tmp_path, monkeypatch, wired_memory, in_rows):
    """Also by mlx-lm's own batch, which would wire it."""
    import mlx.core as mx

    from stoker_worker.engine import proof

    if not in_rows:
        monkeypatch.setattr(proof, "why_not_in_rows", lambda model, spec: "not today")
    info, limits = mx.device_info(), []
    monkeypatch.setattr(mx, "device_info", lambda: info | {"max_recommended_working_set_size": 1000})
    monkeypatch.setattr(mx, "set_wired_limit", limits.append)

    def use(engine, model):
        engine.submit(GenerationWork(build_request({"agent_id": "a", "prompt": "hello", "max_tokens": 3}), (1, 2)))
        while engine.in_flight:
            engine.step()
        engine.close()
        return model.mode.batching

    batching = on_a_thread(mlx_provider(tmp_path, wired_memory=wired_memory), use)
    assert batching == (Batching.ROWS if in_rows else Batching.BATCHED)
    assert limits == [1000] * wired_memory
