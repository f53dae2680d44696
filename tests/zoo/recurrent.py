"""Tiny configs of architectures with recurrent, convolutional or other layers whose state has no token axis."""

from typing import Final

from tests.zoo.common import DELTA, EXPERTS, LATENT, LOCAL_GLOBAL, WINDOW, Config, inside

_MAMBA2: Final[Config] = {
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 16,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_limit": (0.0, 100.0),
    "time_step_rank": "auto",
}
_LFM2: Final[Config] = {
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 32,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "block_ff_dim": 48,
    "layer_types": ["conv", "full_attention"] * 2,
}
_KIMI: Final[Config] = {
    **EXPERTS,
    **LATENT,
    "q_lora_rank": None,
    "num_experts_per_token": 2,
    "model_max_length": 4096,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 8,
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
        "short_conv_kernel_size": 4,
    },
}
_QWEN3_5: Final[Config] = {
    **DELTA,
    **EXPERTS,
    "shared_expert_intermediate_size": 16,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
}

RECURRENT: Final[dict[str, Config]] = {
    "bailing_hybrid": {**EXPERTS, **LATENT, "layer_group_size": 2, "group_norm_size": 1},
    "bailing_moe_linear": {**EXPERTS, "num_key_value_heads": 4, "layer_group_size": 2, "group_norm_size": 1},
    "bailing_moe_v3": {
        **EXPERTS,
        **LATENT,
        "layer_group_size": 2,
        "moe_shared_expert_intermediate_size": 16,
        "short_conv_kernel_size": 4,
    },
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_d_head": 8,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "mamba_expand": 1,
    },
    "gear": {
        "sliding_window": WINDOW,
        "layer_types": [*LOCAL_GLOBAL, "conv_mixer", "conv_mixer"],
        "num_hidden_layers": 6,
    },
    "granitemoehybrid": {
        **EXPERTS,
        "logits_scaling": 1.0,
        "attention_multiplier": 0.35,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "layer_types": ["mamba", "attention"] * 2,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    "jamba": {
        **EXPERTS,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "kimi_k3": inside(
        **{
            **_KIMI,
            "hidden_act": "situ",
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "q_lora_rank": 16,
            "attn_res_block_size": 2,
        }
    ),
    "kimi_linear": _KIMI,
    "lfm2": _LFM2,
    "lfm2-vl": inside(model_type="lfm2", **_LFM2),
    "lfm2_moe": {**_LFM2, **EXPERTS, "use_expert_bias": True, "num_dense_layers": 1},
    "mamba": {
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "mamba2": _MAMBA2,
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 100.0],
        "hybrid_override_pattern": ["M", "*", "M", "-"],
    },
    "olmo_hybrid": {
        **DELTA,
        "linear_num_key_heads": 4,
        "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "plamo2": {
        "hidden_size_per_head": 8,
        "attention_window_size": WINDOW,
        "full_attention_idx": [3],
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_num_heads": 4,
        "mamba_step": 2,
    },
    "prism_hadamard_qwen35": {  # 2-bit weights in groups of 128, so 128 channels
        **inside(**{**_QWEN3_5, "model_type": "qwen3_5", "num_experts": 0, "hidden_size": 128}),
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "model.layers.1.mlp.up_proj", "embedding": False, "dtype": "float16", "block": 0}],
    },
    "qwen3_5": inside(**{**_QWEN3_5, "model_type": "qwen3_5", "num_experts": 0}),
    "qwen3_5_moe": inside(model_type="qwen3_5_moe", **_QWEN3_5),
    "qwen3_next": {
        **DELTA,
        **EXPERTS,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [],
    },
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "num_key_value_heads": 1,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
}
