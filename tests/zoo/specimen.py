"""One tiny model: the engine over it in any mode, and its own single, uncached runs as the reference."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.worker.engine.layouts import Codec
from tests.zoo.architectures import config_of, make_model
from tests.zoo.common import VOCABULARY

from stoker_shared import build_request
from stoker_worker.cache_spec import ModelCacheSpec
from stoker_worker.engine.provider import context_tokens
from stoker_worker.ports import Completion, GenerationWork, LoadedModel, RestoredPrefix
from stoker_worker.serving_mode import ServingMode

N_TOP = 20
"""Of each step's log-probabilities, those of so many tokens are compared: the most that the engine hands over."""


@dataclass(frozen=True)
class Alone:
    """What a row says alone: its tokens, and the log-probabilities (tokens, vocabulary) it says them with."""

    said: tuple[int, ...]
    logprobs: NDArray[np.float32]


class Specimen:
    """No token ends a row here: all say as many tokens as they are asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model = make_model(name)
        self.spec = ModelCacheSpec.from_model(self.model)
        codec: Any = _NoEnd()
        self.loaded = LoadedModel(name, name, "t", context_tokens(config_of(name)), self.spec, codec)
        self._alone: dict[tuple[tuple[int, ...], int], Alone] = {}

    def alone(self, ids: Sequence[int], max_tokens: int) -> Alone:
        """mlx-lm's own greedy run of one sequence from nothing, in its own chunks."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        key = tuple(ids), max_tokens
        if key not in self._alone:
            steps = list(generate_step(mx.array(list(ids)), self.model, max_tokens=max_tokens))
            logprobs = np.stack([np.asarray(logprobs.astype(mx.float32)) for _, logprobs in steps])
            self._alone[key] = Alone(tuple(token for token, _ in steps), logprobs)
        return self._alone[key]

    def engine(self, mode: ServingMode, *, max_batch: int, prefill_tokens: int) -> Any:
        from stoker_worker.engine.build import assemble

        return assemble(
            self.model,
            replace(self.loaded, mode=mode),
            max_bytes=1 << 40,
            max_batch=max_batch,
            prefill_tokens=prefill_tokens,
            max_step_s=60.0,
        )

    def apart(self, work: GenerationWork, done: Completion) -> float:
        """How far the answer is from what the row says alone: the largest difference of any log-probability.

        Up to the first token that is not the same: behind it the two rows are different ones. Infinite when it is not
        the same for another reason than that the two were as likely.
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


def work(ids: Sequence[int], max_tokens: int, prefix: RestoredPrefix | None = None) -> GenerationWork:
    request = build_request(
        {"agent_id": "a", "prompt": "x", "max_tokens": max_tokens, "logprobs": True, "top_logprobs": N_TOP}
    )
    return GenerationWork(request, tuple(ids), prefix)


class _NoEnd(Codec):
    def __init__(self) -> None:
        super().__init__(eos_ids=frozenset({10 * VOCABULARY}))


def _token_id(text: str) -> int:
    return int(text.strip("<>"))
