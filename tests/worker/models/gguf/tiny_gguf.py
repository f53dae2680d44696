"""A tiny random model as GGUF tensors and metadata, and under mlx-lm's names, for the import tests."""

from typing import Any

import numpy as np
from tests.worker.models.gguf.gguf_writer import tokenizer_metadata

HIDDEN, HEADS, KV_HEADS, LAYERS, INTER, VOCAB, EXPERTS = 64, 4, 2, 2, 96, 257, 4
HEAD_DIM = HIDDEN // HEADS


def parts(architecture: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Each tensor's name in mlx-lm and its shape; repeated here, so that a wrong name in the importer fails a test."""
    head_dim = head_dim_of(architecture)
    common = {
        "attn_q": ("self_attn.q_proj", (HEADS * head_dim, HIDDEN)),
        "attn_k": ("self_attn.k_proj", (KV_HEADS * head_dim, HIDDEN)),
        "attn_v": ("self_attn.v_proj", (KV_HEADS * head_dim, HIDDEN)),
        "attn_output": ("self_attn.o_proj", (HIDDEN, HEADS * head_dim)),
        "attn_norm": ("input_layernorm", (HIDDEN,)),
        "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
    }
    dense = {
        "ffn_gate": ("mlp.gate_proj", (INTER, HIDDEN)),
        "ffn_up": ("mlp.up_proj", (INTER, HIDDEN)),
        "ffn_down": ("mlp.down_proj", (HIDDEN, INTER)),
    }
    experts = {
        "ffn_gate_inp": ("mlp.gate", (EXPERTS, HIDDEN)),
        "ffn_gate_exps": ("mlp.switch_mlp.gate_proj", (EXPERTS, INTER, HIDDEN)),
        "ffn_up_exps": ("mlp.switch_mlp.up_proj", (EXPERTS, INTER, HIDDEN)),
        "ffn_down_exps": ("mlp.switch_mlp.down_proj", (EXPERTS, HIDDEN, INTER)),
    }
    norms = {
        "attn_q_norm": ("self_attn.q_norm", (head_dim,)),
        "attn_k_norm": ("self_attn.k_norm", (head_dim,)),
    }
    is_qwen3 = architecture.startswith("qwen3")
    return {**common, **(experts if architecture == "qwen3moe" else dense), **(norms if is_qwen3 else {})}


def head_dim_of(architecture: str) -> int:
    """Qwen 3's heads are wider than their share of the hidden size."""
    return 2 * HEAD_DIM if architecture.startswith("qwen3") else HEAD_DIM


def random_weights(*, biases: bool, tied: bool, architecture: str = "llama") -> tuple[dict[str, Any], dict[str, Any]]:
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
        for part, (name, shape) in parts(architecture).items():
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
    if architecture.startswith("qwen3"):
        keys |= {"attention.key_length": head_dim_of(architecture), "attention.value_length": head_dim_of(architecture)}
    if architecture == "qwen3moe":
        keys |= {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": INTER}
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
