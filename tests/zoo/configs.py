"""A tiny config of each architecture, by kind of layer: the keys beyond those that most of them share.

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


_DYNAMIC: Final[Config] = {"rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}}
_GPT: Final[Config] = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 512, "n_ctx": 512, "n_inner": 48}
_SCALED: Final[Config] = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.35,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
}
_BLOCK: Final = {
    "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
    "ffn": {"ffn_mult": 1.5, "no_op": False, "replace_with_linear": False},
}

PLAIN: Final[dict[str, Config]] = {
    "afm7": {"hidden_dim": 32, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "apertus": {"post_norm": True, "qk_norm": True},
    "cohere": {"logit_scale": 1.0},
    "ernie4_5": {"use_bias": False},
    "exaone": {"num_layers": 4},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 8.0},
    "glm": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "gemma2+one-kv-head": {"query_pre_attn_scalar": 8.0, "num_key_value_heads": 1},
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": {"rotary_emb_base": 10_000, "rotary_pct": 0.5},
    "gptj": {**_GPT, "rotary_dim": 4},
    "granite": _SCALED,
    "helium": {},
    "hunyuan_v1_dense": {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}},
    "internlm2": {"bias": False},
    "internlm2+dynamic-rope": {"bias": False, **_DYNAMIC},
    "internlm3": {},
    "internlm3+dynamic-rope": _DYNAMIC,
    "lille-130m": {"block_size": 512, "n_embd": 96, "n_head": 4, "n_kv_heads": 2, "n_layer": 4},
    "llama": {},
    "llama+dynamic-rope": _DYNAMIC,
    "llama+llama3-rope": {"rope_scaling": LLAMA3},
    "llama+one-kv-head": {"num_key_value_heads": 1},
    "llama+yarn": {"rope_scaling": YARN},
    "llama4_text": {"intermediate_size_mlp": 48, "no_rope_layers": [1, 1, 1, 0], "use_qk_norm": True},
    "mimo": {},
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 1.0},
    "minicpm3": {**LATENT, "dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 1.0, "rope_scaling": LONG_ROPE},
    "ministral3": {"rope_parameters": GROWING},
    "mistral3": inside(model_type="llama"),
    "nanbeige": {"num_loops": 2},
    "nanochat": {},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {"block_configs": [_BLOCK] * 4},
    "olmo2": {},
    "openelm": {
        "num_transformer_layers": 4,
        "model_dim": 32,
        "ffn_dim_divisor": 8,
        "num_query_heads": [4, 4, 8, 8],
        "num_kv_heads": [2, 2, 4, 4],
        "ffn_multipliers": [0.5, 1.0, 1.5, 2.0],
    },
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "phi3+long-rope": {"rope_scaling": LONG_ROPE, "max_position_embeddings": 8192},
    "phi3small": {  # it writes to the logits of reserved tokens, up to the 100,352nd
        "vocab_size": 100_352,
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 48,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 3,
    },
    "pixtral": inside(model_type="llama"),
    "plamo": {"n_shared_head": 2, "num_key_value_heads": 2},
    "qwen": {"kv_channels": 8},
    "qwen2": {},
    "qwen2_vl": inside(model_type="qwen2"),
    "qwen3": {},
    "qwen3_vl": inside(model_type="qwen3"),
    "seed_oss": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {"use_qkv_bias": False, "partial_rotary_factor": 0.5},
    "starcoder2": {},
    "talkie": {},
    "telechat3": {},
    "youtu_llm": LATENT,
}
"""With full attention and dense layers only."""


_WINDOW: Final[Config] = {"sliding_window": WINDOW, "layer_types": LOCAL_GLOBAL}
_LLAMA4: Final[Config] = {
    **EXPERTS,
    "model_type": "llama4_text",
    "attention_chunk_size": WINDOW,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 48,
    "num_experts_per_tok": 1,
    "no_rope_layers": [1, 1, 1, 0],
    "use_qk_norm": True,
}
_GEMMA3N: Final[Config] = {
    **_WINDOW,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "rope_local_base_freq": 1e4,
    "final_logit_softcapping": 30.0,
    "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}
_GEMMA4: Final[Config] = {
    **_WINDOW,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.5, "rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
}

WINDOWED: Final[dict[str, Config]] = {
    "afmoe": {**EXPERTS, **_WINDOW, "num_dense_layers": 1},
    "baichuan_m1": {"sliding_window": WINDOW, "sliding_window_layers": [0, 2], "conv_window": 2},
    "cohere2": {"sliding_window": WINDOW, "sliding_window_pattern": 2, "logit_scale": 1.0},
    "exaone4": {"sliding_window": WINDOW, "sliding_window_pattern": "LLGL"},
    "exaone_moe": {**EXPERTS, **_WINDOW, "is_moe_layer": [False, True, True, True]},
    "gemma3": inside(
        model_type="gemma3_text", sliding_window=WINDOW, sliding_window_pattern=2, query_pre_attn_scalar=8
    ),
    "gemma3_text": {"sliding_window": WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    "gemma3n": inside(model_type="gemma3n", **_GEMMA3N),
    "gemma4": {**inside(**{"model_type": "gemma4_text", **_GEMMA4}), "vocab_size": VOCABULARY},
    "gemma4_text": _GEMMA4,
    "gpt_oss": {**EXPERTS, **_WINDOW},
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": WINDOW},
    "laguna": {
        **EXPERTS,
        **_WINDOW,
        "shared_expert_intermediate_size": 16,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "rope_parameters": ROPES,
    },
    "llama+window": _WINDOW,
    "llama4": inside(**_LLAMA4),
    "mellum": {**EXPERTS, **_WINDOW, "rope_parameters": ROPES},
    "mimo_v2_flash": {
        **EXPERTS,
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 1e4,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "v_head_dim": 8,
        "swa_head_dim": 8,
        "swa_v_head_dim": 8,
        "partial_rotary_factor": 0.5,
    },
    "ministral3+window": {**_WINDOW, "rope_parameters": GROWING},
    "muse_glimmer": {**_WINDOW, "post_norm_eps": 1e-5, "output_multiplier": 1.0},
    "olmo3": _WINDOW,
    "plamo3": {"window_size": WINDOW, "sliding_window_pattern": 2},
    "spark2_5": {**_WINDOW, "hidden_act": "gelu", "rope_parameters": ROPES},
    "step3p5": {
        **EXPERTS,
        **_WINDOW,
        "num_attention_groups": 2,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 16,
        "moe_layers_enum": "1,2,3",
        "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
    },
}
"""With some layers that attend to a window, or to chunks."""


_LONGCAT: Final[Config] = {
    **EXPERTS,
    **LATENT,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 2,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 16,
    "moe_topk": 2,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_SPARSE: Final[Config] = {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 16}

EXPERT: Final[dict[str, Config]] = {
    "Klear": {**EXPERTS, "mlp_only_layers": [0], "decoder_sparse_step": 1},
    "bailing_moe": EXPERTS,
    "dbrx": {
        "d_model": 32,
        "n_layers": 4,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "deepseek": EXPERTS,
    "deepseek_v2": {**EXPERTS, **LATENT, "topk_method": "greedy", "rope_scaling": YARN},
    "deepseek_v3": {**EXPERTS, **LATENT},
    "deepseek_v3+yarn": {**EXPERTS, **LATENT, "rope_scaling": YARN},
    "deepseek_v41": {
        **EXPERTS,
        "head_dim": 32,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 16,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": WINDOW,
        "compress_ratios": [0, 4, 4, 4],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3],
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 8,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
    },
    "deepseek_v32": {**EXPERTS, **LATENT, **_SPARSE},
    "dots1": EXPERTS,
    "ernie4_5_moe": {
        **EXPERTS,
        "use_bias": False,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "glm4_moe": {**EXPERTS, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": {**EXPERTS, **LATENT},
    "glm_moe_dsa": {**EXPERTS, **LATENT, **_SPARSE, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
    "granitemoe": {**EXPERTS, **_SCALED},
    "hunyuan": {
        **EXPERTS,
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
    "kimi_k25": inside(**EXPERTS, **LATENT),
    "kimi_vl": inside(**EXPERTS, **LATENT),
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {**_LONGCAT, "ngram_vocab_size_ratio": 3, "emb_neighbor_num": 3, "emb_split_num": 2},
    "minimax": {**EXPERTS, "shared_intermediate_size": 48, "rotary_dim": 4},
    "minimax_m3_vl": inside(
        **EXPERTS,
        dense_intermediate_size=48,
        shared_intermediate_size=16,
        rotary_dim=4,
        layer_types=["full_attention", "sparse", "sparse", "sparse"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        index_n_heads=2,
        index_head_dim=8,
        index_block_size=8,
        index_topk_blocks=4,
    ),
    "mistral4": {**EXPERTS, **LATENT, "rope_parameters": GROWING},
    "mixtral": EXPERTS,
    "olmoe": EXPERTS,
    "phimoe": {**EXPERTS, "rope_scaling": LONG_ROPE},
    "phixtral": {
        **EXPERTS,
        "num_vocab": VOCABULARY,
        "model_dim": 32,
        "num_heads": 4,
        "num_layers": 4,
        "rotary_dim": 4,
    },
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "qwen3_vl_moe": inside(model_type="qwen3_moe", **EXPERTS, decoder_sparse_step=1, mlp_only_layers=[0]),
    "solar_open": {**EXPERTS, "partial_rotary_factor": 1.0},
}
"""Mixtures of experts with full attention, some of it over a latent head."""


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
        **_SCALED,
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
"""With recurrent, convolutional or other layers whose state has no token axis."""
