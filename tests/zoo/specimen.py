"""One tiny model: the engine over it in any mode, and its own single, uncached runs as the reference."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.worker.engine import layouts
from tests.zoo.architectures import config_of, make_model

from stoker_worker.models.loading import context_tokens
from stoker_worker.ports import CompletedGeneration, GenerationWork, LoadedModel, SequenceCache
from stoker_worker.ports.model import ServingMode

N_TOP = 20
"""The number of compared log-probabilities per step: the most that the engine returns."""


@dataclass(frozen=True)
class Alone:
    """A sequence alone: its generated tokens, and their log-probabilities (tokens, vocabulary)."""

    said: tuple[int, ...]
    logprobs: NDArray[np.float32]


class Specimen:
    """No token ends a sequence here: each generates `max_tokens` tokens."""

    def __init__(self, name: str, *, seed: int = 0, dtype: str = "float32") -> None:
        import mlx.core as mx

        from stoker_worker.models.cache_probe import read_cache_spec

        self.name = name
        self.model = make_model(name, seed)
        self.model.set_dtype(getattr(mx, dtype))
        self.spec = read_cache_spec(self.model)
        tokenizer: Any = layouts.Numbers(frozenset({10**9}))
        self.loaded = LoadedModel(name, name, "t", context_tokens(config_of(name)), self.spec, tokenizer)
        self._alone: dict[tuple[tuple[int, ...], int], Alone] = {}

    def alone(self, ids: Sequence[int], max_tokens: int) -> Alone:
        """mlx-lm's own greedy run of one sequence without a cache, in its own chunks."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        key = tuple(ids), max_tokens
        if key not in self._alone:
            steps = list(generate_step(mx.array(list(ids)), self.model, max_tokens=max_tokens))
            logprobs = np.stack([np.asarray(logprobs.astype(mx.float32)) for _, logprobs in steps])
            self._alone[key] = Alone(tuple(token for token, _ in steps), logprobs)
        return self._alone[key]

    def engine(self, mode: ServingMode, *, max_batch: int, prefill_tokens: int, draft_ngram: bool = False) -> Any:
        from stoker_worker.engine.batch_engine import assemble

        return assemble(
            self.model,
            replace(self.loaded, mode=mode),
            max_bytes=1 << 40,
            max_batch=max_batch,
            prefill_tokens=prefill_tokens,
            max_step_s=60.0,
            draft_ngram=draft_ngram,
        )

    def apart(self, work: GenerationWork, done: CompletedGeneration) -> float:
        """The distance from the answer of the sequence alone: the largest difference of any log-probability.

        It compares up to the first different token, since the sequences differ from there on. It is infinite if that
        token differs although the two were not equally likely.
        """
        alone = self.alone(work.prompt_ids, work.request.max_tokens)
        assert done.logprobs is not None
        furthest = 0.0
        for said, expected, told, logprobs in zip(
            done.generated_ids, alone.said, done.logprobs.content, alone.logprobs, strict=True
        ):
            for top in told.top_logprobs:
                distance = abs(float(logprobs[_token_id(top.token)]) - top.logprob)
                furthest = max(furthest, np.inf if math.isnan(distance) else distance)
            if said != expected:
                gap = float(logprobs[expected] - logprobs[said])
                return furthest if gap <= 2 * furthest else np.inf
        return furthest


def work(ids: Sequence[int], max_tokens: int, prefix: SequenceCache | None = None) -> GenerationWork:
    return layouts.work(ids, max_tokens, prefix, logprobs=True, top_logprobs=N_TOP)


def _token_id(text: str) -> int:
    return int(text.strip("<>"))
