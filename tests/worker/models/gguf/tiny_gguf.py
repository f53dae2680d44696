"""A tiny random model as GGUF tensors and metadata, and under mlx-lm's names, for the import tests."""

from typing import Any

import numpy as np
from tests.worker.models.gguf.gguf_writer import tokenizer_metadata

HIDDEN, HEADS, KV_HEADS, LAYERS, INTER, VOCAB = 64, 4, 2, 2, 96, 257
HEAD_DIM = HIDDEN // HEADS

PARTS = {  # repeated here, so that a wrong name in the importer fails a test
    "attn_q": ("self_attn.q_proj", (HIDDEN, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HIDDEN)),
    "ffn_gate": ("mlp.gate_proj", (INTER, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (INTER, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, INTER)),
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
}


def random_weights(*, biases: bool, tied: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same random weights under GGUF's names and under mlx-lm's."""
    generator = np.random.default_rng(7)
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}

    def add(gguf_name: str, mlx_name: str, shape: tuple[int, ...]) -> None:
        array = generator.standard_normal(shape).astype(np.float32) * 0.3
        ours[gguf_name] = theirs[mlx_name] = array

    add("token_embd.weight", "model.embed_tokens.weight", (VOCAB, HIDDEN))
    add("output_norm.weight", "model.norm.weight", (HIDDEN,))
    if not tied:
        add("output.weight", "lm_head.weight", (VOCAB, HIDDEN))
    for layer in range(LAYERS):
        for part, (name, shape) in PARTS.items():
            add(f"blk.{layer}.{part}.weight", f"model.layers.{layer}.{name}.weight", shape)
            if biases and part in {"attn_q", "attn_k", "attn_v"}:
                add(f"blk.{layer}.{part}.bias", f"model.layers.{layer}.{name}.bias", shape[:1])
    return ours, theirs


def metadata(architecture: str, *, pre: str, **extra: Any) -> dict[str, Any]:
    keys = {
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": INTER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "context_length": 512,
        "rope.freq_base": 5000.0,
    }
    return {
        "general.architecture": architecture,
        "general.name": "Tiny",
        **{f"{architecture}.{key}": value for key, value in keys.items()},
        **tokenizer_metadata(pre=pre),
        **{key.replace("__", "."): value for key, value in extra.items()},
    }


def permuted(weight: Any, heads: int) -> Any:
    """The permutation of Llama's q and k by llama.cpp's converter, which makes rotated pairs neighbours."""
    return weight.reshape(heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(weight.shape)
