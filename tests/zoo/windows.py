"""Tiny configs of architectures with some layers that attend to a window, or to chunks."""

from typing import Final

from tests.zoo.common import EXPERTS, GROWING, LOCAL_GLOBAL, ROPES, VOCABULARY, WINDOW, Config, inside

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
