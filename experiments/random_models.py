"""Models of mlx-lm's own classes with random weights, and turns through the product's engine and store. No tokenizer.

Owns the configurations of EXP-001 and EXP-007 in a narrow form. All that the cache depends on (layers, their pattern,
K/V heads, head dim, window) is as in the model's config.json; hidden size, vocabulary, experts and feed-forward are
not.
"""

import json
import random
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from synthetic_cache import save_turn
from works import answers, work

from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import CompletedGeneration, LoadedModel

VOCABULARY = 128
_NARROW = {"vocab_size": VOCABULARY, "intermediate_size": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}

CONFIGS: dict[str, dict[str, Any]] = {
    "Gemma 3 12B": {
        "model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 48, "num_attention_heads": 8,
        "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024, "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    },
    "Llama 3.1 8B": {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 32, "num_attention_heads": 8,
        "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e5, "max_position_embeddings": 131072,
    },
    "Qwen 2.5 7B": {  # no head_dim of its own: hidden size / attention heads is 128 as in the real one
        "model_type": "qwen2", "hidden_size": 512, "num_hidden_layers": 28, "num_attention_heads": 4,
        "num_key_value_heads": 4, "rope_theta": 1e6,
    },
    "Qwen1.5-MoE-A2.7B": {  # likewise: 16 K/V heads of 128 make the hidden size the true one
        "model_type": "qwen2_moe", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32, "rope_theta": 1e6,
    },
    "Qwen2-0.5B": {
        "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "rope_theta": 1e6,
    },
    "plain: llama": {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 5e5, "max_position_embeddings": 131072,
    },
    "window: gemma3_text": {
        "model_type": "gemma3_text", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 512, "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 16, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    },
    "hybrid: falcon_h1": {
        "model_type": "falcon_h1", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 16, "mamba_d_ssm": 32, "mamba_d_head": 8, "mamba_n_heads": 4,
        "mamba_d_state": 16, "mamba_expand": 1, "max_position_embeddings": 16384, "rope_theta": 1e11,
    },
    "window, 130 M": {  # Gemma 3 270M: five windows to one full layer; fewer layers, a smaller vocabulary
        "model_type": "gemma3_text", "hidden_size": 640, "num_hidden_layers": 12, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "vocab_size": 49152, "intermediate_size": 2048, "eos_token_id": 2,
    },
    "hybrid, 125 M": {  # Falcon-H1-Tiny-90M, with another vocabulary
        "model_type": "falcon_h1", "hidden_size": 512, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 768, "mamba_d_head": 32, "mamba_n_heads": 24,
        "mamba_d_state": 64, "mamba_expand": 2, "max_position_embeddings": 16384, "rope_theta": 1e11,
        "vocab_size": 49152, "intermediate_size": 768, "eos_token_id": 2,
    },
    "tiny": {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8,
    },
}  # fmt: skip


def random_network(name: str, dtype: str) -> Any:
    """A model of `CONFIGS[name]`, its weights large enough that answers depend on the whole prompt."""
    import mlx.core as mx
    from mlx.utils import tree_map

    config = {**_NARROW, **CONFIGS[name]}
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(7)
    network = module.Model(module.ModelArgs.from_dict(config))
    network.update(tree_map(lambda x: x * 3 if x.ndim > 1 else x, network.parameters()))
    network.set_dtype(getattr(mx, dtype))
    mx.eval(network.parameters())
    network.eval()
    return network


def write_model(name: str, folder: Path, tokenizer: Path) -> None:
    """The model of `CONFIGS[name]` as a folder that servers load, with the tokenizer of another folder."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    weights = dict(tree_flatten(random_network(name, "float32").parameters()))
    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**_NARROW, **CONFIGS[name]}))


class NumberTokenizer:
    """Takes a tokenizer's place: a token's text is its number, and no token ends a text."""

    eos_ids = frozenset({10**9})
    max_token_bytes = 4

    def fork(self) -> "NumberTokenizer":
        return self

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


@dataclass
class RandomModel:
    """A network with the facts that engine and store need."""

    network: Any
    loaded: LoadedModel

    @classmethod
    def make(cls, name: str, dtype: str = "float32") -> "RandomModel":
        from stoker_worker.models.cache_probe import read_cache_spec

        network = random_network(name, dtype)
        spec = read_cache_spec(network)
        tokenizer: Any = NumberTokenizer()
        fingerprint = f"{name} {spec.describe()}".encode().hex()[:64]
        return cls(network, LoadedModel(name, fingerprint, "t", 10**6, spec, tokenizer))

    def engine(self, *, max_batch: int, blocks: int, prefill_tokens: int = 256) -> Any:
        from stoker_worker.engine.batch_engine import assemble
        from stoker_worker.engine.kv_memory import KVCost

        return assemble(
            self.network,
            self.loaded,
            max_bytes=blocks * KVCost(self.loaded.spec, prefill_tokens).block_bytes,
            max_batch=max_batch,
            prefill_tokens=prefill_tokens,
            max_step_s=60.0,
        )

    def uncached(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        """mlx-lm's own uncached run of one sequence, greedy."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        return [token for token, _ in generate_step(mx.array(list(ids)), self.network, max_tokens=max_tokens)]

    def turn(self, store: AgentCacheStore, ids: Sequence[int], max_tokens: int) -> tuple[CompletedGeneration, int]:
        """One turn of the agent, restored from the store and saved to it, and the number of cached tokens."""
        agent = store.open_agent("agent")
        restored = store.restore(ids, agent=agent, model=self.loaded, salt=None)
        asked = work(ids, max_tokens, restored.prefix, is_saved=True)
        with closing(self.engine(max_batch=2, blocks=64)) as engine:
            (completion,) = answers(engine, [asked])
        save_turn(store, self.loaded, "agent", (*ids, *completion.generated_ids), completion.cache)
        return completion, restored.prefix.n_tokens if restored.prefix else 0


def random_ids(dice: random.Random, n: int) -> list[int]:
    return [dice.randrange(VOCABULARY) for _ in range(n)]
