"""Sequences that a self-test runs, and running them to their end. Drives the engine by its interface alone."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Final

from stoker_shared import build_request
from stoker_shared.errors import EngineFailed
from stoker_worker.ports import CompletedGeneration, GenerationEnginePort, GenerationWork, LoadedModel, RestoredPrefix

_TEXT: Final = (
    "A ferry leaves the north pier at six, and another at half past nine. Who wants to cross with a bicycle pays two "
    "coins more, and children pay nothing. In winter the second one stays in the harbour when the wind is above seven. "
    "def fare(age, bicycle): return 0 if age < 6 else 4 + 2 * bicycle. The timetable of 1987 hangs in the museum. "
)


class Texts:
    """Prompts of any length from one text, as token ids of a model."""

    def __init__(self, model: LoadedModel) -> None:
        eos = model.tokenizer.eos_ids
        encoded = model.tokenizer.encode(_TEXT, special_start=False)
        self._ids = [token for token in encoded if token not in eos]
        self._context = model.context_tokens

    def fitting(self, n_prompt: int, max_tokens: int) -> int:
        """As many prompt tokens of `n_prompt` as the model's context has room for beside the answer; at least one."""
        return max(1, min(n_prompt, self._context - max_tokens))

    def ids(self, n_tokens: int, *, begin: int = 0) -> tuple[int, ...]:
        """`n_tokens` ids; those of another `begin` begin otherwise."""
        at = 7 * begin % len(self._ids)
        return tuple(islice(cycle([*self._ids[at:], *self._ids[:at]]), n_tokens))


def work_of(
    ids: tuple[int, ...], max_tokens: int, *, prefix: RestoredPrefix | None = None, save_from: int | None = None
) -> GenerationWork:
    """A greedy sequence of exactly `max_tokens` tokens."""
    request = build_request({"prompt": "doctor", "max_tokens": max_tokens, "ignore_eos": True})
    return GenerationWork(request, ids, prefix=prefix, save_from=save_from)


def run(engine: GenerationEnginePort, work: GenerationWork) -> CompletedGeneration:
    """One sequence alone. Raises `EngineFailed`."""
    return run_together(engine, [work], [])[0]


def run_together(
    engine: GenerationEnginePort, first: Sequence[GenerationWork], joining: Sequence[GenerationWork]
) -> list[CompletedGeneration]:
    """Sequences in one batch: `joining` join when the first have begun to decode.

    Returns:
        Their completions, in the order of `first` and `joining`.

    Raises:
        EngineFailed: one failed.
    """
    done: dict[int, CompletedGeneration] = {}
    uids = [engine.submit(work) for work in first]
    try:
        while joining and engine.in_flight and not any(one.tokens for one in engine.progress().values()):
            _step(engine, done)
        uids += [engine.submit(work) for work in joining]
        while engine.in_flight:
            _step(engine, done)
    finally:  # after a failure the next check has the engine to itself
        for uid in uids:
            engine.cancel(uid)
    return [done[uid] for uid in uids]


def _step(engine: GenerationEnginePort, done: dict[int, CompletedGeneration]) -> None:
    for completion in engine.step():
        if completion.outcome != "finished":
            raise EngineFailed(f"a sequence of the self-test {completion.outcome}: {completion.error}")
        done[completion.uid] = completion
