"""GGUF import: the imported model computes the same as the original. Tiny models made here, and the real SmolLM2."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.worker.models.gguf.gguf_writer import write_gguf
from tests.worker.models.gguf.tiny_gguf import (
    EXPERTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTER,
    KV_HEADS,
    LAYERS,
    VOCAB,
    head_dim_of,
    metadata,
    permuted,
    random_weights,
)

from stoker_worker.models.gguf.architectures import architecture_of
from stoker_worker.models.gguf.importer import import_gguf


def logits(folder: Path) -> Any:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    return np.array(model(mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])))


def reference_logits(architecture: str, weights: dict[str, Any], *, tied: bool, **config: Any) -> Any:
    """Those of mlx-lm's own model with these weights; its config is spelled out, not the importer's."""
    import importlib

    import mlx.core as mx

    module = importlib.import_module(f"mlx_lm.models.{architecture.replace('qwen3moe', 'qwen3_moe')}")
    args = module.ModelArgs.from_dict(
        {
            "model_type": architecture,
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "intermediate_size": INTER,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": head_dim_of(architecture),
            "rms_norm_eps": 1e-6,
            "vocab_size": VOCAB,
            "rope_theta": 5000.0,
            "rope_traditional": False,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 512,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": INTER,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            **config,
        }
    )
    model = module.Model(args)
    model.load_weights([(name, mx.array(array)) for name, array in weights.items()])
    return np.array(model(mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])))


@pytest.mark.mlx
@pytest.mark.parametrize(
    ("architecture", "tied"), [("qwen2", True), ("qwen2", False), ("qwen3", True), ("qwen3moe", False)]
)
def test_a_qwen_file_gives_the_logits_of_the_model_it_was_made_from(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    ours, theirs = random_weights(biases=architecture == "qwen2", tied=tied, architecture=architecture)
    file = write_gguf(tmp_path / "tiny.gguf", metadata(architecture, pre="qwen2"), ours)

    import_gguf(file, tmp_path / "tiny")

    expected = reference_logits(architecture, theirs, tied=tied)
    np.testing.assert_allclose(logits(tmp_path / "tiny"), expected, atol=1e-4)


@pytest.mark.mlx
def test_packed_experts_compute_what_their_unpacked_weights_compute(tmp_path: Path) -> None:
    ours, theirs = random_weights(biases=False, tied=False, architecture="qwen3moe")
    for name, array in list(ours.items()):
        if "_exps" in name:
            kind, unpacked = q8_0(array)
            ours[name] = kind
            theirs[architecture_of({"general.architecture": "qwen3moe"}).mlx_name(name)] = unpacked
    file = write_gguf(tmp_path / "tiny.gguf", metadata("qwen3moe", pre="qwen2"), ours)

    import_gguf(file, tmp_path / "tiny")

    expected = reference_logits("qwen3moe", theirs, tied=False)
    np.testing.assert_allclose(logits(tmp_path / "tiny"), expected, atol=0.05)


def q8_0(array: Any) -> tuple[tuple[str, tuple[int, ...], bytes], Any]:
    """An array as a Q8_0 tensor, and the values that the tensor has."""
    blocks = array.reshape(-1, 32)
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16)
    codes = np.round(blocks / scale.astype(np.float32)).astype(np.int8)
    packed = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=1)
    return ("Q8_0", array.shape, packed.tobytes()), (scale.astype(np.float32) * codes).reshape(array.shape)


@pytest.mark.mlx
def test_a_llama_file_with_permuted_queries_and_keys_gives_the_unpermuted_models_logits(tmp_path: Path) -> None:
    ours, theirs = random_weights(biases=False, tied=False)
    for layer in range(LAYERS):
        for part, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
            ours[f"blk.{layer}.{part}.weight"] = permuted(ours[f"blk.{layer}.{part}.weight"], heads)
    file = write_gguf(tmp_path / "tiny.gguf", metadata("llama", pre="gpt-2"), ours)

    import_gguf(file, tmp_path / "tiny")

    np.testing.assert_allclose(logits(tmp_path / "tiny"), reference_logits("llama", theirs, tied=False), atol=1e-4)


@pytest.mark.mlx
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3s_stretched_positions_are_recognised_by_their_table(tmp_path: Path, factor: float) -> None:
    from mlx_lm.models.rope_utils import Llama3RoPE

    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = 5000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    stretched = np.array(Llama3RoPE(HEAD_DIM, base=5000.0, scaling_config=scaling)._freqs)
    ours, theirs = random_weights(biases=False, tied=True)
    for layer in range(LAYERS):
        for part, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
            ours[f"blk.{layer}.{part}.weight"] = permuted(ours[f"blk.{layer}.{part}.weight"], heads)
    ours["rope_freqs.weight"] = (stretched / plain).astype(np.float32)
    file = write_gguf(tmp_path / "tiny.gguf", metadata("llama", pre="llama-bpe"), ours)

    import_gguf(file, tmp_path / "tiny")

    expected = reference_logits("llama", theirs, tied=True, rope_scaling=scaling)
    np.testing.assert_allclose(logits(tmp_path / "tiny"), expected, atol=1e-4)
    assert json.loads((tmp_path / "tiny" / "config.json").read_text())["rope_scaling"] == scaling


@pytest.mark.mlx
def test_packed_layers_keep_their_bits_and_everything_else_becomes_half_precision(tmp_path: Path) -> None:
    ours, _ = random_weights(biases=False, tied=True)
    generator = np.random.default_rng(1)

    def packed(kind: str, shape: tuple[int, int], block_bytes: int) -> tuple[str, tuple[int, int], bytes]:
        blocks = generator.integers(0, 256, (shape[0] * shape[1] // 32, block_bytes), dtype=np.uint8)
        blocks[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)
        return kind, shape, blocks.tobytes()

    for name, array in list(ours.items()):
        if name.startswith("blk") and array.ndim == 2:
            ours[name] = packed("Q4_0", array.shape, 18)
    ours["token_embd.weight"] = packed("Q8_0", (VOCAB, HIDDEN), 34)
    file = write_gguf(tmp_path / "tiny.gguf", metadata("llama", pre="gpt-2"), ours)

    import_gguf(file, tmp_path / "tiny")

    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }
    assert config["_name_or_path"] == "Tiny"
    assert logits(tmp_path / "tiny").dtype == np.float16


@pytest.mark.mlx
def test_mlx_still_reads_q6_k_tensors_exactly(tmp_path: Path) -> None:
    import mlx.core as mx

    generator = np.random.default_rng(2)
    blocks = generator.integers(0, 256, (VOCAB * 256 // 256, 210), dtype=np.uint8)
    scale = generator.uniform(0.001, 0.01, len(blocks)).astype(np.float16)
    blocks[:, 208:210] = scale.view(np.uint8).reshape(-1, 2)
    low, high = blocks[:, :128].reshape(-1, 2, 1, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    lows = (low >> np.array([0, 4], dtype=np.uint8).reshape(1, 1, 2, 1)) & 15
    highs = (high >> np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)) & 3
    values = (lows.reshape(-1, 16, 16) | (highs.reshape(-1, 16, 16) << 4)).astype(np.int8) - 32
    expected = scale[:, None, None].astype(np.float32) * blocks[:, 192:208].view(np.int8)[:, :, None] * values
    file = write_gguf(
        tmp_path / "q6.gguf", {"general.architecture": "x"}, {"a": ("Q6_K", (VOCAB, 256), blocks.tobytes())}
    )

    tensors: Any = mx.load(str(file))
    read = np.array(tensors["a"].astype(mx.float32))

    np.testing.assert_allclose(read, expected.reshape(VOCAB, 256), rtol=1e-3, atol=1e-6)


@pytest.mark.model
def test_imported_smollm2_knows_the_capital_of_france(smollm2: Path) -> None:
    import mlx.core as mx
    from mlx_lm import generate, load
    from mlx_lm.utils import dequantize_model

    model, tokenizer = load(str(smollm2))
    model.set_dtype(mx.float32)
    model = dequantize_model(model)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    assert generate(model, tokenizer, ids, max_tokens=16) == "The capital of France is Paris."
