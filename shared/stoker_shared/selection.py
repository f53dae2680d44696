"""Chooses the model with which a job begins: the cheapest one that is trusted. Pure, but for the dice that it is given.

A model that is not trusted yet, or not any more, is tried now and then: as often as its counts leave it possible that
it is good enough (Thompson sampling), and in one of a hundred jobs whatever they are, because models change.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from stoker_shared.route import Step
from stoker_shared.trust import NO_COUNTS, Counts

USUAL_TRUST: Final = 0.8
"""The share of acceptable answers that is asked for where the costs do not tell."""

_LOOKS: Final = 0.01
_PROMPT_TOKENS: Final = 1000.0
_TOKENS: Final = 250.0
"""The job by which costs are compared."""


@dataclass(frozen=True)
class Candidate:
    """A model that could answer, and what is known of it in the job's class."""

    step: Step
    counts: Counts = NO_COUNTS


def route_of(
    candidates: Sequence[Candidate], *, min_trust: float | None, escalates: bool, dice: random.Random
) -> tuple[Step, ...]:
    """The models to ask, in order: from the first that is trusted, or tried, to the last.

    Args:
        candidates: the cheapest first.
        min_trust: the share of acceptable answers that a model needs to begin with. ``None``: the share from which
            beginning with it is cheaper, since a rejected answer costs the next model's too; `USUAL_TRUST` where that
            does not apply.
        escalates: whether the next model is asked if an answer is rejected.
    """
    for place, candidate in enumerate(candidates[:-1]):
        needed = min_trust
        if needed is None:
            needed = _break_even(candidate.step, candidates[place + 1].step) if escalates else USUAL_TRUST
        counts = candidate.counts
        if counts.lower_bound() >= needed or _is_tried(counts, needed, dice):
            return tuple(later.step for later in candidates[place:])
    return tuple(last.step for last in candidates[-1:])


def cheapest_first(steps: Iterable[Step]) -> list[Step]:
    """By their measured costs; those without come last, by name."""

    def key(step: Step) -> tuple[bool, float, str]:
        cost_s = _usual_cost_s(step)
        return cost_s is None, cost_s or 0.0, step.model

    return sorted(steps, key=key)


def _usual_cost_s(step: Step) -> float | None:
    if step.prompt_token_s is None or step.token_s is None:
        return None
    return step.cost_s(_PROMPT_TOKENS, _TOKENS)


def _break_even(step: Step, dearer: Step) -> float:
    """Costs are measured under the load of each worker, and a model that is rarely asked has no full batch, in which
    tokens are cheap. So it would stay dear: `USUAL_TRUST` is enough, whatever was measured."""
    cost_s, dearer_s = _usual_cost_s(step), _usual_cost_s(dearer)
    if cost_s is None or not dearer_s:
        return USUAL_TRUST
    return min(USUAL_TRUST, cost_s / dearer_s)


def _is_tried(counts: Counts, needed: float, dice: random.Random) -> bool:
    drawn = dice.betavariate(counts.accepted + 1, counts.rejected + 1)
    return dice.random() < _LOOKS or drawn >= needed
