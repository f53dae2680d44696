"""Runs the rows of a plan through the engine in one mode, and compares each with itself alone. Engine thread.

The engine is the real one, with its own saving and restoring. Only two things are done from outside: rows say the
tokens that the plan gives them, so that one early difference does not turn into a different text, and the model's
log-probabilities at every step are listened to.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from stoker_shared.request import GenerationRequest
from stoker_worker.engine.build import assemble
from stoker_worker.engine.generator import Generator
from stoker_worker.engine.trial_rows import SECOND_ANSWER, TrialPlan, TrialRow
from stoker_worker.engine.watched_generator import WatchedGenerator
from stoker_worker.ports import CacheSlice, GenerationWork, LoadedModel, RestoredPrefix, TextCodec

Logprobs = NDArray[np.float32]

_MOST_APART: Final = {"float32": 5e-3, "float16": 0.05, "bfloat16": 0.07}
"""How far the log-probabilities of a row in a batch may be from those of the row alone, by the dtype of the logits.

Root mean square of the difference, in standard deviations of the row's own."""

_TIMES_ROUNDING: Final = 3.0
"""In half precision also: times as far as the row is from itself when it runs alone in steps. Among all architectures
right modes were at most 1.3 times as far, wrong ones at least 7 times."""

_ENOUGH_BYTES: Final = 1 << 50  # the pool is not what is tried


@dataclass(frozen=True)
class Limit:
    """How far a row may be from itself alone.

    Attributes:
        apart: as `_MOST_APART` counts it.
        at_every_step: else at half of a row's steps: in half precision a mixture of experts may take another expert for
            one token.
    """

    apart: float
    at_every_step: bool

    @classmethod
    def of(cls, dtype: str, rounding: float | None = None) -> "Limit":
        """
        Args:
            dtype: of the logits.
            rounding: how far rows were from themselves that ran alone in steps, if that is known.
        """
        most = _MOST_APART.get(dtype, _MOST_APART["float32"])
        # A row that is rounded alike in steps and in one pass must not make every other rounding a fault.
        apart = most if rounding is None else min(most, max(most / 4, _TIMES_ROUNDING * rounding))
        return cls(apart, at_every_step=dtype == "float32")


@dataclass(frozen=True)
class Found:
    """
    Attributes:
        fresh: what is wrong with rows that begin from nothing; ``None`` when nothing is.
        restored: what is wrong with rows restored from their own caches; likewise.
        apart: the largest difference seen, as `_MOST_APART` counts it.
        may_pass: whether what is wrong may pass by itself.
    """

    fresh: str | None
    restored: str | None
    apart: float
    may_pass: bool = False


class Reference:
    """Every row alone and uncached, in one pass: what a batch is compared with."""

    def __init__(self, model: Any, plan: TrialPlan) -> None:
        self._rows = {row.ids: _alone(model, row) for row in plan.rows}

    def apart(self, row: TrialRow, n_tokens: int, logprobs: Logprobs) -> float:
        """How far `logprobs` behind the row's first `n_tokens` tokens are from those alone."""
        alone = self._rows[row.ids][n_tokens - 1]
        seen = np.isfinite(alone)
        spread = float(alone[seen].std()) or 1.0
        distance = math.sqrt(float(np.mean((alone[seen] - logprobs[seen]) ** 2))) / spread
        return distance if math.isfinite(distance) else math.inf


def may_pass(error: Exception) -> bool:
    """Whether another try may end otherwise: MLX raises `RuntimeError` when memory is short."""
    return isinstance(error, (RuntimeError, MemoryError))


def try_rows(
    model: Any, loaded: LoadedModel, plan: TrialPlan, reference: Reference, *, max_batch: int, limit: Limit
) -> Found:
    """Run `plan` in the mode of `loaded`; with `loaded.has_memory`, its rows then go on from their own caches."""
    trial = _Trial(model, loaded, plan, max_batch=max_batch)
    fresh = trial.first_turn()
    wrong, apart = _wrong(fresh, reference, limit) if trial.error is None else (trial.error, math.inf)
    if wrong is not None or not loaded.has_memory:
        trial.close()
        return Found(wrong, None, apart, trial.may_pass)
    again = trial.second_turn()
    trial.close()
    if trial.error is not None:
        return Found(None, trial.error, math.inf, trial.may_pass)
    wrong, apart_again = _wrong(again, reference, limit)
    return Found(None, wrong, max(apart, apart_again))


@dataclass(frozen=True)
class _Heard:
    """Log-probabilities behind the first `n_tokens` tokens of a row."""

    row: TrialRow
    n_tokens: int
    logprobs: Logprobs


def _wrong(heard: Iterable[_Heard], reference: Reference, limit: Limit) -> tuple[str | None, float]:
    """What is wrong with the row that is furthest from itself alone, and how far that is."""
    by_row: dict[TrialRow, list[float]] = defaultdict(list)
    for one in heard:
        by_row[one.row].append(reference.apart(one.row, one.n_tokens, one.logprobs))
    judge: Callable[[list[float]], float] = max if limit.at_every_step else median
    row, apart = max(((row, judge(seen)) for row, seen in by_row.items()), key=lambda pair: pair[1])
    if apart <= limit.apart:
        return None, apart
    return f"a row of {row.n_prompt} tokens is {apart:.2g} standard deviations from itself alone", apart


class _Trial:
    def __init__(self, model: Any, loaded: LoadedModel, plan: TrialPlan, *, max_batch: int) -> None:
        self._plan = plan
        self._snapshots = bool(loaded.spec.snapshot_layers)
        self._heard: list[_Heard] = []
        self._caches: dict[TrialRow, CacheSlice] = {}
        self.error: str | None = None
        self.may_pass = False
        self._engine = assemble(
            model,
            replace(loaded, codec=cast(TextCodec, _NoText())),
            max_bytes=_ENOUGH_BYTES,
            max_batch=max_batch,
            prefill_tokens=plan.chunk_tokens,
            max_step_s=math.inf,
            watch=self._watch,
        )

    def close(self) -> None:
        self._engine.close()

    def first_turn(self) -> list[_Heard]:
        """Some rows from the start, the others once each of those has said a token."""
        at_once = [row for row in self._plan.rows if not row.joins]
        uids = {self._submit(row, row.n_prompt, row.n_answer): row for row in at_once}
        while self.error is None and min((row.tokens for row in self._engine.progress().values()), default=1) < 1:
            self._step(uids)
        uids |= {self._submit(row, row.n_prompt, row.n_answer): row for row in self._plan.rows if row.joins}
        return self._run(uids)

    def second_turn(self) -> list[_Heard]:
        """The rows go on from their own caches, each from another place, beside one that begins from nothing."""
        uids = {}
        *restored, fresh = self._plan.rows
        for number, row in enumerate(restored):
            prefix = _prefix(self._caches[row], self._place(row, number))
            uids[self._submit(row, row.n_second_prompt, SECOND_ANSWER, prefix)] = row
        uids[self._submit(fresh, fresh.n_second_prompt, SECOND_ANSWER)] = fresh
        return self._run(uids)

    def _place(self, row: TrialRow, number: int) -> int:
        """Where the row is taken up again: at the end of its turn, before its last prompt token, or anywhere."""
        places = [row.n_first, row.n_prompt - 1] if self._snapshots else [row.n_first, row.n_prompt - 1, row.n_prompt]
        return places[number % len(places)]

    def _submit(self, row: TrialRow, n_prompt: int, n_answer: int, prefix: RestoredPrefix | None = None) -> int:
        request = GenerationRequest(agent_id="trial", prompt="trial", max_tokens=n_answer)
        return self._engine.submit(GenerationWork(request, row.ids[:n_prompt], prefix))

    def _run(self, uids: dict[int, TrialRow]) -> list[_Heard]:
        while self.error is None and self._engine.in_flight:
            self._step(uids)
        heard, self._heard = self._heard, []
        return heard

    def _step(self, uids: dict[int, TrialRow]) -> None:
        for completion in self._engine.step():
            if completion.error is not None:
                self.error = str(completion.error)
            if completion.cache is not None:
                self._caches[uids[completion.uid]] = completion.cache

    def _watch(self, generator: Generator) -> Generator:
        return WatchedGenerator(generator, self._plan, self._heard_row, self._broke)

    def _heard_row(self, row: TrialRow, n_tokens: int, logprobs: Any) -> None:
        self._heard.append(_Heard(row, n_tokens, np.asarray(logprobs.astype(mx.float32)).reshape(-1)))

    def _broke(self, error: Exception) -> None:
        self.may_pass = self.may_pass or may_pass(error)
        self.error = self.error or f"{type(error).__name__}: {' '.join(str(error).split())}"


class _NoText:
    """Stands for the tokenizer: no token ends a row, and nothing is decoded."""

    eos_ids: frozenset[int] = frozenset()
    max_token_bytes = 0

    def fork(self) -> "_NoText":
        return self

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


def _prefix(cache: CacheSlice, n_tokens: int) -> RestoredPrefix:
    states = next((snapshot.states for snapshot in cache.snapshots if snapshot.n_tokens == n_tokens), ())
    layers = tuple((keys[:, :n_tokens].copy(), values[:, :n_tokens].copy()) for keys, values in cache.layers)
    return RestoredPrefix(n_tokens, layers, states)


def _alone(model: Any, row: TrialRow) -> Logprobs:
    """Log-probabilities (tokens, vocabulary) behind each of the row's tokens."""
    logits = model(mx.array([row.ids]), cache=make_prompt_cache(model))[0].astype(mx.float32)
    return np.asarray(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
