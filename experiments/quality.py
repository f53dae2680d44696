"""How a changed cache changes what a model says: log-likelihoods of given tokens and perplexity. Experiments only.

MLX is imported after the BLAS library is loaded.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bench import Bench
from common import Json
from prompts import text_of

from stoker_worker.ports import SequenceCache

GREEDY_KINDS = ("English", "French", "Python", "German", "Spanish", "Portuguese")
"""The texts that greedy answers continue."""


@dataclass(frozen=True)
class Plan:
    """An experiment's size.

    Attributes:
        scored: texts whose first `long` tokens are prefilled, and whose next `continuation` ones are scored.
        greedy: answers of `answer` tokens to prompts of `short` tokens and more.
    """

    scored: tuple[str, ...]
    long: int
    continuation: int
    greedy: int
    short: int
    answer: int

    def greedy_texts(self, encode: Callable[[str], list[int]]) -> dict[str, str]:
        """The prompts by name."""
        kinds = [(GREEDY_KINDS[n % len(GREEDY_KINDS)], self.short + 7 * n) for n in range(self.greedy)]
        return {f"{kind} {length}": text_of(encode, kind, length) for kind, length in kinds}


def log_likelihoods(bench: Bench, prefix: SequenceCache, ids: Sequence[int]) -> Any:
    """Natural log-likelihood of each of `ids` except the first, after `prefix`, teacher-forced in one pass."""
    import mlx.core as mx

    from stoker_worker.engine.transfer import prefix_to_caches

    caches = prefix_to_caches(bench.network, prefix, bench.model.spec)
    rest = list(ids[prefix.n_tokens :])
    logits = bench.network(mx.array([rest[:-1]]), cache=caches)[0].astype(mx.float32)
    scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    picked = mx.take_along_axis(scores, mx.array(rest[1:])[:, None], axis=-1)[:, 0]
    mx.eval(picked)
    return np.asarray(picked, dtype=np.float64)


def change_of(scores: Any, reference: Any) -> Json:
    """How log-likelihoods differ from others of the same tokens."""
    change = scores - reference
    return {
        "mean_change": round(float(change.mean()), 6),
        "rms_change": round(float(np.sqrt((change**2).mean())), 6),
        "most_change": round(float(np.abs(change).max()), 5),
        "perplexity_ratio": round(math.exp(-change.mean()), 6),
    }


def mean_ratio(found: Iterable[Json]) -> float:
    """The geometric mean of the `perplexity_ratio` of all texts."""
    return round(math.exp(statistics.fmean(math.log(one["perplexity_ratio"]) for one in found)), 5)
