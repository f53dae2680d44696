"""Small random models of mlx-lm's own classes, each with the layer pattern of its family; the zoo has most keys."""

from importlib import import_module
from typing import Any

from tests.zoo.configs import COMMON, EXPERTS, LOCAL_GLOBAL, RECURRENT, WINDOWED

_COMMON = {**COMMON, "max_position_embeddings": 8192}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "num_hidden_layers": 2},
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
    # A mixture of experts whose layers alternate between a window and full attention.
    "gpt_oss": {**_COMMON, **EXPERTS, "head_dim": 16, "sliding_window": 64, "layer_types": LOCAL_GLOBAL},
    # Dense and sparse layers in turn.
    "qwen3_moe": {**_COMMON, **EXPERTS, "head_dim": 16, "decoder_sparse_step": 2, "mlp_only_layers": []},
    "qwen3_next": {**_COMMON, **RECURRENT["qwen3_next"], "head_dim": 16, "partial_rotary_factor": 0.25},
    "lfm2": {**_COMMON, **RECURRENT["lfm2"]},
    "mamba2": {**_COMMON, **RECURRENT["mamba2"], "num_hidden_layers": 2},
    # Two caches in every layer: a recurrent one and full attention.
    "falcon_h1": {**_COMMON, **RECURRENT["falcon_h1"], "num_hidden_layers": 2, "head_dim": 16},
}

WIDE_HEADS: dict[str, dict[str, Any]] = {
    **{name: {"head_dim": 32} for name in ("llama", "gemma3_text", "gpt_oss", "qwen3_moe", "qwen3_next", "falcon_h1")},
    "qwen2": {"hidden_size": 128},
    "qwen3": {"head_dim": 64},
    "lfm2": {"hidden_size": 128, "block_dim": 128},
}
"""What families with full attention change so that their heads have groups of 32 or 64 elements."""

# Three layers in four attend to chunks, with a cache that mlx-lm cannot batch.
UNBATCHABLE = {
    "llama4": {
        "text_config": {
            **WINDOWED["llama4"]["text_config"],
            "max_position_embeddings": 8192,
            "attention_chunk_size": 64,
        }
    }
}


def make_model(name, **changes):
    """A model of family `name` in float32, with weights large enough that its answers depend on the whole prompt."""
    import mlx.core as mx
    from mlx.utils import tree_map

    module = import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    model = module.Model(
        module.ModelArgs.from_dict({"model_type": name, **{**CONFIGS, **UNBATCHABLE}[name], **changes})
    )
    model.update(tree_map(lambda x: x * 3 if x.ndim > 1 else x, model.parameters()))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    model.eval()
    return model
