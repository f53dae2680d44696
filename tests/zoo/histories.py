"""What rows go through in the zoo, and how far that leaves them from what each says alone.

Owns the lengths, widths and chunks: unequal rows from the start and joined midway, as many as there are K/V heads and
more, across windows and sparse budgets, in chunks that are no multiples of a window, and second turns on restored
caches. Deliberately more than the proof at load has time for.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from tests.worker.engine.layouts import prefix_of
from tests.zoo.common import VOCABULARY
from tests.zoo.specimen import Specimen, work

from stoker_worker.ports import Completion, GenerationWork
from stoker_worker.serving_mode import ServingMode

TOLERANCE: Final = 2e-3
"""Largest difference of a log-probability that is rounding."""


@dataclass(frozen=True)
class History:
    """
    Attributes:
        lengths: tokens of each row's prompt.
        joining: how many of the rows, the last ones, come in when the others decode.
        chunk_tokens: most tokens of a row that are prefilled at once.
    """

    name: str
    lengths: tuple[int, ...]
    joining: int
    max_batch: int
    chunk_tokens: int
    may_break: bool = False
    """Whether a step may raise: the engine starts over with fewer rows, which costs time and no answer."""

    def answer_tokens(self, number: int) -> int:
        """Rows end at different steps."""
        return 4 + 3 * number % 7


HISTORIES: Final = (
    History("two rows", (41, 7), 0, 2, 128),
    History("four rows", (5, 70, 23, 38), 0, 4, 128),
    History("five rows in small chunks", (33, 9, 52, 4, 20), 0, 5, 13),
    History("rows that join", (30, 12, 50, 6), 2, 4, 128),
    History("rows that join, in small chunks", (15, 61, 8, 34), 2, 3, 13),
    History("rows of a token or two", (1, 19, 2), 0, 3, 128, may_break=True),
)


@dataclass(frozen=True)
class Fault:
    """What is wrong: in which history, and how far the worst row is from itself alone (or what was raised)."""

    where: str
    apart: float
    error: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.error or f'{self.apart:.2g} apart'}"


def faults(specimen: Specimen, mode: ServingMode) -> Iterator[Fault]:
    """Every history in which a row does not say in `mode` what it says alone."""
    for history in HISTORIES:
        seen = play(specimen, mode, history)
        if seen.error or seen.apart > TOLERANCE:
            yield seen


def play(specimen: Specimen, mode: ServingMode, history: History) -> Fault:
    """Run a history's rows, and where the mode has memory a second turn of them; the worst of what was seen."""
    rng = random.Random(f"{history.name} {specimen.name}")
    first = [work(_ids(rng, n), history.answer_tokens(i)) for i, n in enumerate(history.lengths)]
    seen, done = _turn(specimen, mode, history, first, history.name)
    if seen.error or seen.apart > TOLERANCE or not (mode.memory and specimen.spec.can_be_stored):
        return seen
    second = [_next(rng, *pair, number) for number, pair in enumerate(zip(first, done, strict=True))]
    again, _ = _turn(specimen, mode, history, second, f"{history.name}, restored")
    return max(seen, again, key=lambda fault: math.inf if fault.error else fault.apart)


def _next(rng: random.Random, was: GenerationWork, done: Completion, number: int) -> GenerationWork:
    """A next turn: from the end of the last one, from just before its prompt's end, or uncached."""
    ids = (*was.prompt_ids, *done.generated_ids)
    assert done.cache is not None
    places = [snapshot.n_tokens for snapshot in done.cache.snapshots] or [len(ids), len(was.prompt_ids) - 1, 5]
    places = [place for place in (*places[::-1], 0) if place <= len(ids)]
    place = places[number % len(places)]
    prefix = prefix_of(done.cache, place) if place > 0 else None
    return work((*ids, *_ids(rng, 1 + 7 * number % 19)), 5, prefix)


def _turn(
    specimen: Specimen, mode: ServingMode, history: History, works: list[GenerationWork], where: str
) -> tuple[Fault, list[Completion]]:
    try:
        done = _run(specimen, mode, history, works)
        error = next((str(one.error) for one in done if one.error is not None), "")
    except Exception as raised:
        done, error = [], f"{type(raised).__name__}: {raised}"
    if error:
        return Fault(where, math.inf, error.splitlines()[0]), []
    return Fault(where, max(specimen.apart(*pair) for pair in zip(works, done, strict=True))), done


def _run(specimen: Specimen, mode: ServingMode, history: History, works: list[GenerationWork]) -> list[Completion]:
    broke: list[Exception] = []
    engine = specimen.engine(mode, max_batch=history.max_batch, prefill_tokens=history.chunk_tokens)
    if not history.may_break:
        _listen(engine, broke.append)
    done: dict[int, Completion] = {}
    at_once = len(works) - history.joining
    uids = [engine.submit(one) for one in works[:at_once]]
    while not done and min(row.tokens for row in engine.progress().values()) < 2:
        done |= {completion.uid: completion for completion in engine.step()}
    uids += [engine.submit(one) for one in works[at_once:]]
    while engine.in_flight and not broke:
        done |= {completion.uid: completion for completion in engine.step()}
    engine.close()
    if broke:
        raise broke[0]
    return [done[uid] for uid in uids]


def _listen(engine: Any, broke: Callable[[Exception], None]) -> None:
    """Hear of a step that breaks: the engine goes on with fewer rows, which would hide it."""
    start_over = engine._start_over

    def heard(error: Exception) -> Iterator[Completion]:
        broke(error)
        return start_over(error)

    engine._start_over = heard


def _ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(n)]
