"""SmolLM2 in float32 with engines over it and mlx-lm's own answers as the reference, for tests marked `model`.

Owns the loaded model: one for all tests of a process.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stoker_shared import build_request
from stoker_worker.ports import GenerationWork, LoadedModel


class RealModel:
    def __init__(self, folder: Path) -> None:
        from mlx_lm.utils import load_tokenizer

        from stoker_worker.models.loading import load_model

        self.network, loaded = load_model(str(folder), "float32")
        self.loaded: LoadedModel = loaded
        self.tokenizer = load_tokenizer(folder)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.loaded.tokenizer.encode(text, special_start=True))

    def engine(self, *, blocks: int = 64, max_batch: int = 8) -> Any:
        from stoker_worker.engine.batch_engine import assemble

        return assemble(
            self.network,
            self.loaded,
            max_bytes=blocks * self.loaded.spec.bytes_per_block,
            max_batch=max_batch,
            prefill_tokens=64,
            max_step_s=10.0,
        )

    def work(self, ids: tuple[int, ...], max_tokens: int) -> GenerationWork:
        return GenerationWork(build_request({"agent_id": "a", "prompt": "x", "max_tokens": max_tokens}), ids)

    def alone(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        """The reference: mlx-lm itself, one sequence, no cache, greedy."""
        from mlx_lm import stream_generate

        steps = stream_generate(self.network, self.tokenizer, list(ids), max_tokens=max_tokens)
        return [step.token for step in steps]


def behind_the_likeliest(network: Any, ids: Sequence[int], generated: Sequence[int]) -> float:
    """By how much a generated token's logit is under the largest one, at most: 0 for a greedy answer, but for rounding.

    One pass over all tokens, which takes a fraction of the time of generating them once more.
    """
    import mlx.core as mx

    logits = network(mx.array([[*ids, *generated[:-1]]]))[0, len(ids) - 1 :]
    chosen = mx.take_along_axis(logits, mx.array(list(generated))[:, None], axis=-1)
    return float((logits.max(axis=-1, keepdims=True) - chosen).max().item())


@pytest.fixture(scope="session")
def real_model(smollm2: Path) -> RealModel:
    return RealModel(smollm2)
