"""A generator whose rows say settled tokens, and which is listened to. Engine thread; only in trials of a model.

Owns nothing of the rows: it passes every call on to the generator it is put around.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from stoker_worker.engine.generator import Generator, Prefilled, RowStart, Said, TakenOut
from stoker_worker.engine.trial_rows import TrialPlan, TrialRow


class WatchedGenerator:
    """A generator whose rows say the tokens of a plan, in chunks of the plan's size."""

    def __init__(
        self,
        generator: Generator,
        plan: TrialPlan,
        heard: Callable[[TrialRow, int, Any], None],
        broke: Callable[[Exception], None],
    ) -> None:
        self._generator = generator
        self._plan = plan
        self._heard = heard
        self._broke = broke
        self._at: dict[int, tuple[TrialRow, int]] = {}

    def insert(self, row: RowStart) -> int:
        ids = (*row.cached_ids, *(token for segment in row.segments for token in segment))
        planned = next(one for one in self._plan.rows if one.ids[: len(ids)] == ids)
        uid = self._generator.insert(replace(row, sampler=_says(planned.ids[len(ids) :])))
        self._at[uid] = planned, len(ids)
        return uid

    def next(self, chunk_tokens: int) -> tuple[list[Prefilled], list[Said]]:
        try:
            prefilled, said = self._generator.next(self._plan.chunk_tokens)
            for one in said:
                row, n_tokens = self._at[one.uid]
                self._heard(row, n_tokens, one.logprobs)
                self._at[one.uid] = row, n_tokens + 1
        except Exception as error:
            self._broke(error)
            raise
        return prefilled, said

    def peek(self, uid: int) -> list[Any]:
        return self._generator.peek(uid)

    def take_out(self, uid: int) -> TakenOut:
        return self._generator.take_out(uid)

    def remove(self, uid: int) -> None:
        self._generator.remove(uid)

    @property
    def nbytes(self) -> int:
        return self._generator.nbytes

    def close(self) -> None:
        self._generator.close()


def _says(ids: Sequence[int]) -> Callable[[mx.array], mx.array]:
    """A sampler that draws `ids`, one after the other; mlx-lm asks for one more than it says."""
    left = iter(ids)
    return lambda logprobs: mx.array([next(left, ids[-1])])
