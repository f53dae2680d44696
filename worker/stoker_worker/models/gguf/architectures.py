"""The architectures that GGUF import knows: their tensors' names here and in mlx-lm, and what their config adds. Pure.

One is added only with a test that its import computes what mlx-lm's model of the same weights computes.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from stoker_shared.errors import ModelNotLoadable

Value = Callable[[str], Any]
"""The value of one of the architecture's keys in the file's metadata, without the architecture's name."""

_COMMON: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_DENSE: Final = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS: Final = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}
_HEAD_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_TENSOR: Final = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>[a-z_]+)\.(?P<leaf>weight|bias|scales|biases)")


@dataclass(frozen=True)
class Architecture:
    """
    Attributes:
        name: in GGUF's ``general.architecture``.
        model_type: mlx-lm's name.
        class_name: the name that other tools look for in a config.
        parts: from the name of a tensor in GGUF to its layer in mlx-lm.
        biased: the parts that have a bias.
        pairs_are_neighbours: llama.cpp's converter permutes queries and keys so that rotated pairs are neighbours.
        expert_keys: config keys of a mixture of experts, each with its key in GGUF; empty for a dense model.
        config: what else the config has.
    """

    name: str
    model_type: str
    class_name: str
    parts: Mapping[str, str]
    biased: frozenset[str] = frozenset()
    pairs_are_neighbours: bool = False
    expert_keys: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def mlx_name(self, gguf_name: str) -> str:
        """
        Raises:
            ModelNotLoadable: the tensor is not one of this architecture's.
        """
        match = _TENSOR.fullmatch(gguf_name)
        if match is None or match["part"] not in self.parts:
            raise ModelNotLoadable(f"tensor {gguf_name!r} is unknown in a {self.name} GGUF file")
        if match["leaf"] == "bias" and match["part"] not in self.biased:
            raise ModelNotLoadable(f"tensor {gguf_name!r}: {self.name} models with this bias are not supported")
        prefix = f"model.layers.{match['layer']}." if match["layer"] else ""
        return f"{prefix}{self.parts[match['part']]}.{match['leaf']}"

    def extra_config(self, value: Value) -> dict[str, Any]:
        """What the config has beyond that of every architecture."""
        return {**self.config, **{key: value(gguf_key) for key, gguf_key in self.expert_keys.items()}}


ARCHITECTURES: Final = {
    architecture.name: architecture
    for architecture in (
        Architecture("llama", "llama", "LlamaForCausalLM", {**_COMMON, **_DENSE}, pairs_are_neighbours=True),
        Architecture(
            "qwen2",
            "qwen2",
            "Qwen2ForCausalLM",
            {**_COMMON, **_DENSE},
            biased=frozenset({"attn_q", "attn_k", "attn_v"}),
        ),
        Architecture("qwen3", "qwen3", "Qwen3ForCausalLM", {**_COMMON, **_HEAD_NORMS, **_DENSE}),
        Architecture(
            "qwen3moe",
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            {**_COMMON, **_HEAD_NORMS, **_EXPERTS},
            expert_keys={
                "num_experts": "expert_count",
                "num_experts_per_tok": "expert_used_count",
                "moe_intermediate_size": "expert_feed_forward_length",
            },
            # Not in the file: every layer has experts, and the weights of those chosen add up to 1.
            config={"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
        ),
    )
}


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """
    Raises:
        ModelNotLoadable: it is not one of `ARCHITECTURES`.
    """
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelNotLoadable(
            f"GGUF architecture {name!r} is not supported, only {', '.join(ARCHITECTURES)}: use the model in MLX or "
            "Hugging Face format"
        )
    return ARCHITECTURES[name]
