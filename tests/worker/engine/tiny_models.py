"""Small random models of mlx-lm's own classes, each with the layer pattern of its family."""

from importlib import import_module
from typing import Any

VOCABULARY = 96

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 8192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "num_hidden_layers": 2, "head_dim": 8},
    "qwen2": {**_COMMON, "num_hidden_layers": 2},
    "qwen3": {**_COMMON, "num_hidden_layers": 2, "head_dim": 16},
    "gemma3_text": {
        **_COMMON,
        "num_hidden_layers": 6,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 64,
        "sliding_window_pattern": 3,
    },
    "gpt_oss": {  # a mixture of experts whose layers alternate between a window and full attention
        **_COMMON,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_moe": {  # dense and sparse layers in turn
        **_COMMON,
        **_EXPERTS,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
    },
    "qwen3_next": {
        **_COMMON,
        **_EXPERTS,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 2,
    },
    "lfm2": {
        **_COMMON,
        "num_hidden_layers": 4,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 48,
        "full_attn_idxs": [1, 3],
    },
    "mamba2": {
        **_COMMON,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.0, 100.0),
        "time_step_rank": "auto",
    },
    "falcon_h1": {  # two caches in every layer: a recurrent one and full attention
        **_COMMON,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "mamba_d_ssm": 32,
        "mamba_d_head": 8,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "mamba_expand": 1,
    },
}

WIDE_HEADS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "gpt_oss": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32},
    "qwen3_next": {"head_dim": 32},
    "falcon_h1": {"head_dim": 32},
    "qwen2": {"hidden_size": 128},
    "qwen3": {"head_dim": 64},
    "lfm2": {"hidden_size": 128, "block_dim": 128},
}
"""What families with full attention change so that their heads have groups of 32 or 64 elements."""

UNBATCHABLE = {
    "llama4": {  # three layers in four attend to chunks, with a cache that mlx-lm cannot batch
        "text_config": {
            **_COMMON,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "head_dim": 8,
            "attention_bias": False,
            "attention_chunk_size": 64,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 48,
            "num_experts_per_tok": 1,
            "num_local_experts": 4,
            "rope_scaling": None,
            "use_qk_norm": True,
        }
    }
}


def make_model(name, seed=0, **changes):
    """A model of family `name` in float32, with weights large enough that its answers depend on the whole prompt."""
    import mlx.core as mx
    from mlx.utils import tree_map

    module = import_module(f"mlx_lm.models.{name}")
    mx.random.seed(seed)
    model = module.Model(
        module.ModelArgs.from_dict({"model_type": name, **{**CONFIGS, **UNBATCHABLE}[name], **changes})
    )
    model.update(tree_map(lambda x: x * 3 if x.ndim > 1 else x, model.parameters()))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    model.eval()
    return model
