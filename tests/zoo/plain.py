"""Tiny configs of architectures with full attention and dense layers only: what each needs beyond the common keys."""

from typing import Final

from tests.zoo.common import GROWING, LATENT, LONG_ROPE, Config, inside

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
    "afm7": {
        "hidden_dim": 32,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "apertus": {"post_norm": True, "qk_norm": True},
    "cohere": {"logit_scale": 1.0},
    "ernie4_5": {"use_bias": False},
    "exaone": {"num_layers": 4},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 8.0},
    "glm": {},
    "glm4": {"partial_rotary_factor": 0.5},
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
    "phi3small": {  # it writes to logits of reserved tokens, the last of which is the 100,352nd
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
