"""Finding and loading a model: the refusals, exact float32, the loaded parts. Real SmolLM2 at the end."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.worker.models.tiny_gguf import metadata, random_weights, write_gguf

from stoker_shared.errors import ModelNotLoadable
from stoker_worker.models.device import memory_for_models, ram_bytes
from stoker_worker.models.fingerprint import ModelFolder
from stoker_worker.models.gguf import import_gguf
from stoker_worker.models.loading import (
    CONTEXT_FALLBACK_TOKENS,
    _resolved_dtype,
    check_exists,
    context_tokens,
    load_model,
    local_folder,
)
from stoker_worker.ports.cache_spec import LayerKind, LayerSpec, ModelCacheSpec


def refusal(model: str) -> str:
    with pytest.raises(ModelNotLoadable) as refused:
        load_model(model, "auto")
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("model", ["/no/where", "./nowhere", "../nowhere", "~/no-such-model-here", "", "."])
def test_a_path_must_exist_and_is_never_looked_up_on_the_hub(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "model" in refusal(model)


@pytest.mark.parametrize("files", [[], ["config.json"], ["model.safetensors"]])
def test_a_folder_that_is_no_model_is_refused_with_the_missing_part(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    assert "it has no " in refusal(str(tmp_path))


def test_a_file_and_a_name_that_is_neither_path_nor_repo_are_refused(tmp_path: Path) -> None:
    assert "stoker-worker model import" in refusal("model.Q4_0.GGUF")
    assert "stoker-worker model import" in refusal(str(tmp_path / "x.gguf"))
    (tmp_path / "weights.bin").write_text("")
    assert "is a file" in refusal(str(tmp_path / "weights.bin"))
    assert "neither a folder here nor" in refusal("just-a-name")
    assert "neither a folder here nor" in refusal("a/b/c")
    assert local_folder("owner/name-1.5_x") is None


def test_a_folder_named_like_a_repo_is_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("")
    assert local_folder("owner/name") == folder


@pytest.mark.mlx
def test_a_model_that_the_hub_does_not_have_is_refused_before_a_worker_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotLoadable, match="cannot fetch nobody/nothing"):
        check_exists("nobody/nothing")


@pytest.mark.mlx
def test_an_unreachable_hub_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx_lm.utils

    def unreachable(*args: object, **kwargs: object) -> str:
        raise ConnectionError("first line\nsecond line")

    monkeypatch.setattr(mlx_lm.utils, "snapshot_download", unreachable)
    said = refusal("owner/name")
    assert "cannot fetch owner/name" in said
    assert "first line" in said


@pytest.mark.mlx
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({}, "model_type"),
        ({"model_type": "llama"}, "llama|argument"),
        ({"model_type": "llama", "model_file": "evil.py"}, "--trust-remote-code"),
    ],
)
def test_a_model_mlx_lm_cannot_load_is_reported_in_one_line_and_none_of_its_code_runs(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    import re

    import mlx.core as mx

    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.zeros(1)})
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert re.search(said, refusal(str(tmp_path)))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 8192, "n_ctx": 1}, 8192),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 99}}, 99),
        ({"max_position_embeddings": None, "text_config": {"max_position_embeddings": 7}}, 7),
        ({"text_config": None, "max_position_embeddings": True}, CONTEXT_FALLBACK_TOKENS),
    ],
)
def test_the_context_length_comes_from_the_config_and_one_that_is_assumed_is_named(
    config: dict[str, Any], tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert context_tokens(config) == tokens
    assert (str(CONTEXT_FALLBACK_TOKENS) in caplog.text) == (tokens == CONTEXT_FALLBACK_TOKENS)


@pytest.mark.mlx
@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}}, 131072),
        ({"model_type": "mamba"}, CONTEXT_FALLBACK_TOKENS),
        ({"model_type": "no_such_model"}, CONTEXT_FALLBACK_TOKENS),
    ],
)
def test_a_context_length_that_a_config_leaves_out_is_that_of_the_models_type(
    config: dict[str, Any], tokens: int
) -> None:
    assert context_tokens({**config, "quantization": {"group_size": 64, "bits": 4}}) == tokens


@pytest.mark.mlx
def test_auto_means_the_stored_dtype_on_a_gpu_and_float32_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    for device, dtype in ((mx.cpu, "float32"), (mx.gpu, "native")):
        monkeypatch.setattr(mx, "default_device", lambda kind=device: mx.Device(kind))
        assert _resolved_dtype("auto") == dtype


@pytest.mark.mlx
@pytest.mark.parametrize(
    ("kind", "info", "expected"),
    [
        ("gpu", {"memory_size": 24 * 2**30, "max_recommended_working_set_size": 16 * 2**30}, 16 * 2**30),
        ("gpu", {"total_memory": 80 * 2**30, "free_memory": 79 * 2**30, "architecture": "sm_90"}, 80 * 2**30),
        ("cpu", {"architecture": "x86_64"}, ram_bytes()),
    ],
    ids=["metal", "cuda", "cpu"],
)
def test_a_models_memory_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch, kind, info, expected) -> None:
    """Played: the names are those of MLX's own device information on each."""
    import mlx.core as mx

    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(getattr(mx, kind)))
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert memory_for_models() == expected


@pytest.mark.model
def test_smollm2_in_float32_has_exactly_the_stored_weights_and_describes_itself(smollm2: Path, tmp_path: Path) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    memo = tmp_path / "digests.json"
    model, loaded = load_model(str(smollm2), "float32", digest_cache=memo)

    parameters = dict(tree_flatten(model.parameters()))
    assert {array.dtype for array in parameters.values()} == {mx.float32}
    stored: Any = mx.load(str(smollm2 / "model.safetensors"))
    name = "model.layers.3.mlp.down_proj"
    parts = [stored[f"{name}.{leaf}"] for leaf in ("weight", "scales", "biases")]
    exact = mx.dequantize(parts[0], parts[1].astype(mx.float32), parts[2].astype(mx.float32), 32, 4)
    assert mx.array_equal(parameters[f"{name}.weight"], exact)
    assert (loaded.name, loaded.context_tokens, loaded.spec.dtype) == ("smollm2", 8192, "float32")
    assert len(loaded.spec.layers) == 30
    assert loaded.tokenizer.eos_ids == {2}
    assert memo.is_file()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A tiny random model in half precision."""
    ours, _ = random_weights(tied=True)
    half = {name: array.astype(np.float16) for name, array in ours.items()}
    import_gguf(write_gguf(tmp_path / "tiny.gguf", metadata(tokenizer__chat_template="t"), half), tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.mlx
def test_a_layout_that_cannot_be_stored_is_reported_at_start(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = ModelCacheSpec((LayerSpec(LayerKind.UNKNOWN),), "float32")
    monkeypatch.setattr("stoker_worker.models.cache_probe.read_cache_spec", lambda *_: unknown)
    load_model(str(tiny), "native")
    assert "its agents have transcripts, but no cached tokens" in caplog.text


@pytest.mark.mlx
def test_the_identity_contains_the_dtype_and_no_path(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    _, auto = load_model(str(tiny), "auto")
    moved = tiny.rename(tiny.parent / "moved")
    _, float32 = load_model(str(moved), "float32")
    _, native = load_model(str(moved), "native")

    assert auto.fingerprint == float32.fingerprint != native.fingerprint
    assert native.spec.dtype == "float16"
    assert auto.tokenizer_fingerprint == native.tokenizer_fingerprint == ModelFolder(moved).tokenizer_fingerprint("t")
