"""The histories of sequences in the zoo, and how far each moves their answers from those of the sequences alone.

Owns the lengths, widths and chunks: unequal sequences from the start and joined midway, as many as K/V heads and more,
across windows and sparse budgets, in chunks that are no multiples of a window, and second turns on restored caches.
Deliberately more than the proof at load has time for.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from tests.worker.engine.layouts import prefix_of
from tests.zoo.configs import VOCABULARY
from tests.zoo.specimen import Specimen, work

from stoker_worker.ports import CompletedGeneration, GenerationWork
from stoker_worker.ports.model import ServingMode

TOLERANCE: Final = 2e-3
"""The largest difference of a log-probability that still counts as rounding."""


@dataclass(frozen=True)
class History:
    """
    Attributes:
        lengths: each sequence's prompt, in tokens.
        joining: how many of the sequences (the last ones) join while the others decode.
        chunk_tokens: most tokens of a sequence prefilled at once.
    """

    name: str
    lengths: tuple[int, ...]
    joining: int
    max_batch: int
    chunk_tokens: int
    may_break: bool = False
    """Whether a step may raise: the engine restarts with fewer sequences, which costs time but changes no answer."""

    def answer_tokens(self, number: int) -> int:
        """Different, so that the sequences end at different steps."""
        return 4 + 3 * number % 7


HISTORIES: Final = (
    History("two sequences", (41, 7), 0, 2, 128),
    History("two sequences of one length", (24, 24), 0, 2, 128),
    History("four sequences", (5, 70, 23, 38), 0, 4, 128),
    History("five sequences in small chunks", (33, 9, 52, 4, 20), 0, 5, 13),
    History("sequences that join", (30, 12, 50, 6), 2, 4, 128),
    History("sequences that join, in small chunks", (15, 61, 8, 34), 2, 3, 13),
    History("sequences of a token or two", (1, 19, 2), 0, 3, 128, may_break=True),
)


@dataclass(frozen=True)
class Fault:
    """A fault: its history, and the distance of the worst sequence from its answer alone, or the exception."""

    where: str
    apart: float
    error: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.error or f'{self.apart:.2g} apart'}"


def faults(specimen: Specimen, mode: ServingMode) -> Iterator[Fault]:
    """Every history in which some sequence's answer in `mode` differs from its answer alone."""
    for history in HISTORIES:
        seen = play(specimen, mode, history)
        if seen.error or seen.apart > TOLERANCE:
            yield seen


def play(specimen: Specimen, mode: ServingMode, history: History) -> Fault:
    """Run a history's sequences, and their second turn where the mode has memory; return the worst fault."""
    rng = random.Random(f"{history.name} {specimen.name}")
    first = [work(_ids(rng, n), history.answer_tokens(i)) for i, n in enumerate(history.lengths)]
    first = [replace(one, checkpoints_at=(len(one.prompt_ids) // 2,)) for one in first]
    seen, done = _turn(specimen, mode, history, first, history.name)
    if seen.error or seen.apart > TOLERANCE or not (mode.memory and specimen.spec.can_be_stored):
        return seen
    second = [_next(rng, *pair, number) for number, pair in enumerate(zip(first, done, strict=True))]
    again, _ = _turn(specimen, mode, history, second, f"{history.name}, restored")
    return max(seen, again, key=lambda fault: math.inf if fault.error else fault.apart)


def _next(rng: random.Random, was: GenerationWork, done: CompletedGeneration, number: int) -> GenerationWork:
    """A next turn: from the end of the last turn, from just before its prompt's end, from a checkpoint, or uncached."""
    ids = (*was.prompt_ids, *done.generated_ids)
    assert done.cache is not None
    places = [snapshot.n_tokens for snapshot in (*done.cache.checkpoints, *done.cache.snapshots)]
    if not done.cache.snapshots:
        places = [len(ids), len(was.prompt_ids) - 1, 5]
    places = [place for place in (*places[::-1], 0) if place <= len(ids)]
    place = places[number % len(places)]
    prefix = prefix_of(done.cache, place) if place > 0 else None
    return work((*ids, *_ids(rng, 1 + 7 * number % 19)), 5, prefix)


def _turn(
    specimen: Specimen, mode: ServingMode, history: History, works: list[GenerationWork], where: str
) -> tuple[Fault, list[CompletedGeneration]]:
    try:
        done = _run(specimen, mode, history, works)
        error = next((str(one.error) for one in done if one.error is not None), "")
    except Exception as raised:
        done, error = [], f"{type(raised).__name__}: {raised}"
    if error:
        return Fault(where, math.inf, error.splitlines()[0]), []
    return Fault(where, max(specimen.apart(*pair) for pair in zip(works, done, strict=True))), done


def _run(
    specimen: Specimen, mode: ServingMode, history: History, works: list[GenerationWork]
) -> list[CompletedGeneration]:
    broke: list[Exception] = []
    engine = specimen.engine(mode, max_batch=history.max_batch, prefill_tokens=history.chunk_tokens)
    if not history.may_break:
        _listen(engine, broke.append)
    done: dict[int, CompletedGeneration] = {}
    at_once = len(works) - history.joining
    uids = [engine.submit(one) for one in works[:at_once]]
    while not done and min(one.tokens for one in engine.progress().values()) < 2:
        done |= {completion.uid: completion for completion in engine.step()}
    uids += [engine.submit(one) for one in works[at_once:]]
    while engine.in_flight and not broke:
        done |= {completion.uid: completion for completion in engine.step()}
    engine.close()
    if broke:
        raise broke[0]
    return [done[uid] for uid in uids]


def _listen(engine: Any, broke: Callable[[Exception], None]) -> None:
    """Notice a failed step: the engine goes on with fewer sequences, which would hide it."""
    start_over = engine._start_over

    def heard(error: Exception) -> Iterator[CompletedGeneration]:
        broke(error)
        return start_over(error)

    engine._start_over = heard


def _ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(n)]
