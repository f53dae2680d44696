"""EXP-006 with a real model: round trips through the engine, and whole answers with and without a restored cache.

A turn follows a job's way through the worker (`bench.py`); no token ends it early.
"""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from bench import Bench, Prepared
from common import Json, note, percentiles, spread
from prompts import text_of
from stopwatch import Stopwatch
from synthetic_cache import same

from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import CompletedGeneration, LayerKV
from stoker_worker.ports.cache_spec import BLOCK_TOKENS

ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Answered:
    """A turn and its seconds since the prompt came: until it was restored, until the first token, until the last."""

    turn: Prepared
    completion: CompletedGeneration
    restored_s: float
    first_s: float
    total_s: float


@dataclass(frozen=True)
class Serving:
    """Turns of one agent, one at a time. They are not saved yet."""

    bench: Bench
    store: AgentCacheStore
    engine: Any
    text: str
    max_tokens: int

    def answer(self, cache: str) -> Answered:
        """
        Raises:
            RuntimeError: the cache was to be read alone, and not all tokens but the last were restored.
        """
        begin = time.perf_counter()
        fields = {"agent_id": "agent", "prompt": self.text, "max_tokens": self.max_tokens, "cache": cache}
        turn = self.bench.prepare(self.store, fields)
        restored = time.perf_counter()
        uid, first, done = self.engine.submit(turn.work), 0.0, []
        while not done:
            done = self.engine.step()
            if not first and (done or self.engine.progress()[uid].tokens):
                first = time.perf_counter()
        end = time.perf_counter()
        if cache == "read" and turn.cached != len(turn.prompt.ids) - 1:
            raise RuntimeError(f"{turn.cached} of {len(turn.prompt.ids)} tokens restored")
        return Answered(turn, done[0], restored - begin, first - begin, end - begin)


def round_trips(bench: Bench, folder: Path, *, blocks: int, rounds: int, tokens: int = 10) -> Json:
    """Restore, generate, extract and save one agent's turn again and again, as the seed's third benchmark does.

    Each turn is the first one, made anew: the same prompt, of one token more than `blocks`.
    """
    from stoker_worker.engine import batch_engine

    note(f"{rounds} round trips of {blocks} blocks with the model")
    n_tokens = blocks * BLOCK_TOKENS
    text = text_of(bench.encode, "English", n_tokens + 1)
    samples: dict[str, list[float]] = {name: [] for name in ("restore", "generate", "extract", "save", "whole")}
    same_tokens = exact = same_new = True
    furthest = 0.0
    with closing(AgentCacheStore(folder)) as store, closing(bench.engine()) as engine:
        serving = Serving(bench, store, engine, text, tokens)
        first = serving.answer("readwrite")
        bench.save(store, first.turn, first.completion)
        cold = [tuple(np.array(side) for side in pair) for pair in first.completion.cache.layers]
        alone = bench.uncached(first.turn.prompt.ids, tokens)
        same_tokens = list(first.completion.generated_ids[: len(alone)]) == alone
        for _ in range(rounds):
            watch = Stopwatch()
            timing = watch.timing("extract", batch_engine.cache_to_save)
            with patch.object(batch_engine, "cache_to_save", timing):
                one = serving.answer("readwrite")
            if one.turn.cached != n_tokens:
                raise RuntimeError(f"{one.turn.cached} of {n_tokens} tokens restored")
            extract_s = watch.seconds["extract"]
            save_s = bench.save(store, one.turn, one.completion)
            generate_s = one.total_s - one.restored_s - extract_s
            parts = (one.restored_s, generate_s, extract_s, save_s, one.total_s)
            for name, seconds in zip(samples, parts, strict=True):
                samples[name].append(1000 * seconds)
            warm = one.completion.cache.layers
            same_tokens = same_tokens and one.completion.generated_ids == first.completion.generated_ids
            exact = exact and same(warm, cold, n_tokens)
            same_new = same_new and same(warm, cold, one.completion.cache.n_tokens)
            furthest = max(furthest, _furthest(warm, cold, n_tokens))
    return {"blocks": blocks, "layers": len(cold), "answer_tokens": tokens,
            "ms": {name: percentiles(values) for name, values in samples.items()},
            "same_tokens": same_tokens, "exact": exact, "answers_bytes_equal": same_new,
            "largest_difference": furthest}  # fmt: skip


def _furthest(got: Sequence[LayerKV], wanted: Sequence[LayerKV], start: int) -> float:
    """The largest difference of two caches from token `start` on."""
    pairs = (sides for layers in zip(got, wanted, strict=True) for sides in zip(*layers, strict=True))
    return max(float(np.abs(left[:, start:] - right[:, start:]).max()) for left, right in pairs)


def whole_answers(bench: Bench, folder: Path, lengths: Sequence[int], *, quick: bool) -> list[Json]:
    """A prompt's first token and its whole answer, cold and from its restored cache; the longest run cold once."""
    rows = []
    tokens = 3 if quick else ANSWER_TOKENS
    with closing(bench.engine()) as engine:
        for n in lengths:
            note(f"{n} tokens with and without cache")
            text = text_of(bench.encode, "English", n)
            with closing(AgentCacheStore(folder / f"{n}")) as store:
                serving = Serving(bench, store, engine, text, tokens)
                if n == lengths[0]:
                    serving.answer("off")  # a warm-up
                cold = [serving.answer("readwrite")]
                bench.save(store, cold[0].turn, cold[0].completion)
                warm = []
                for repetition in range(1 if quick else 3):
                    warm.append(serving.answer("read"))
                    if repetition < 2 and n <= 1024:
                        cold.append(serving.answer("off"))
            row: Json = {"tokens": n, "answer_tokens": tokens}
            row["mb"] = round((n - 1) * bench.model.spec.bytes_per_token / 1e6, 1)
            for name, ones in (("cold", cold), ("warm", warm)):
                row[f"{name}_s"] = spread([one.first_s for one in ones])
                row[f"{name}_total_s"] = spread([one.total_s for one in ones])
            row["store_ms"] = spread([1000 * one.restored_s for one in warm])
            row["speedup"] = round(row["cold_s"]["median"] / row["warm_s"]["median"], 1)
            row["total_speedup"] = round(row["cold_total_s"]["median"] / row["warm_total_s"]["median"], 1)
            row["same_tokens"] = len({one.completion.generated_ids for one in (*cold, *warm)}) == 1
            rows.append(row)
    return rows
