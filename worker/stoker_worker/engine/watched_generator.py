"""A generator whose sequences output planned tokens, and whose log-probabilities are observed. Engine thread.

Used only in trials of a model. Owns no sequence: it passes every call on to the generator that it wraps.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from stoker_worker.engine.generator import Generator, Prefilled, SequenceStart, TakenOut, TokenOutput
from stoker_worker.engine.trial_sequences import TrialPlan, TrialSequence


class WatchedGenerator:
    """A generator whose sequences output the tokens of a plan, in chunks of the plan's size."""

    def __init__(
        self,
        generator: Generator,
        plan: TrialPlan,
        on_logprobs: Callable[[TrialSequence, int, Any], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """
        Args:
            on_logprobs: called with each sequence, its number of tokens and the log-probabilities after them.
            on_error: called with the exception of a step that breaks, before it is raised.
        """
        self._generator = generator
        self._plan = plan
        self._on_logprobs = on_logprobs
        self._on_error = on_error
        self._at: dict[int, tuple[TrialSequence, int]] = {}

    def insert(self, start: SequenceStart) -> int:
        ids = (*start.cached_ids, *(token for segment in start.segments for token in segment))
        planned = next(sequence for sequence in self._plan.sequences if sequence.ids[: len(ids)] == ids)
        uid = self._generator.insert(replace(start, sampler=_PlannedSampler(planned.ids[len(ids) :])))
        self._at[uid] = planned, len(ids)
        return uid

    def next(self, chunk_tokens: int) -> tuple[list[Prefilled], list[TokenOutput]]:
        try:
            prefilled, outputs = self._generator.next(self._plan.chunk_tokens)
            for output in outputs:
                sequence, n_tokens = self._at[output.uid]
                self._on_logprobs(sequence, n_tokens, output.logprobs)
                self._at[output.uid] = sequence, n_tokens + 1
        except Exception as error:
            self._on_error(error)
            raise
        return prefilled, outputs

    def peek(self, uid: int) -> list[Any]:
        return self._generator.peek(uid)

    def beginning(self, uid: int, n_tokens: int) -> list[Any]:
        return self._generator.beginning(uid, n_tokens)

    def share(self, uid: int, n_tokens: int) -> Any:
        return self._generator.share(uid, n_tokens)

    def take_out(self, uid: int) -> TakenOut:
        return self._generator.take_out(uid)

    def remove(self, uid: int) -> None:
        self._generator.remove(uid)

    def close(self) -> None:
        self._generator.close()


class _PlannedSampler:
    """Draws planned tokens, one after the other; mlx-lm samples one token more than it outputs."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids
        self._n_drawn = 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        self._n_drawn += 1
        return mx.array([self._ids[min(self._n_drawn, len(self._ids)) - 1]])

    def take_back(self, n_tokens: int) -> None:
        self._n_drawn -= n_tokens
