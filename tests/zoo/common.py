"""Config keys that most architectures share, in a tiny size. Owns no architecture.

Four layers of 32 channels, 4 heads and 2 K/V heads, so that a batch of two has as many sequences as K/V heads; windows
of 16 tokens and sparse budgets of 16 or 32, which sequences of 40 tokens cross. The shortest plan of the proof at load
crosses 12.
"""

from typing import Any, Final

VOCABULARY: Final = 96
WINDOW: Final = 16

Config = dict[str, Any]

COMMON: Final[Config] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
}

EXPERTS: Final[Config] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
}

LATENT: Final[Config] = {  # K and V of one latent head, as DeepSeek's
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

DELTA: Final[Config] = {  # gated delta rule, as Qwen3-Next's
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
}

YARN: Final[Config] = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LLAMA3: Final[Config] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
LONG_ROPE: Final[Config] = {
    "type": "longrope",
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "short_mscale": 1.0,
    "long_mscale": 1.0,
}
GROWING: Final[Config] = {  # queries grow with their position, from the 32nd token on
    "rope_theta": 1e4,
    "rope_type": "default",
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 32,
}

LOCAL_GLOBAL: Final = ["sliding_attention", "full_attention"] * 2
ROPES: Final = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in LOCAL_GLOBAL}


def inside(**text: Any) -> Config:
    """A model whose language model has a nested config."""
    return {"text_config": {**COMMON, **text}}
