"""Sequences for an engine without queue and store, and engines that run to their end. Experiments only; no MLX."""

from collections.abc import Iterable, Sequence
from typing import Any

from stoker_shared import build_request
from stoker_worker.ports import CompletedGeneration, GenerationWork, LoadedModel, SequenceCache


class Endless:
    """A model's tokenizer without an end of sequence: no sequence may leave during a measurement."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eos_ids: frozenset[int] = frozenset()

    def fork(self) -> "Endless":
        return Endless(self._tokenizer.fork())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def work(
    ids: Iterable[int], max_tokens: int, prefix: SequenceCache | None = None, *, is_saved: bool = False
) -> GenerationWork:
    """A greedy sequence of given tokens."""
    request = build_request({"agent_id": "agent", "prompt": "given as tokens", "max_tokens": max_tokens})
    return GenerationWork(request, tuple(ids), prefix, is_saved)


def chat_work(model: LoadedModel, text: str, **fields: Any) -> GenerationWork:
    """A chat of one message, in the model's template, and with its guide where the fields ask for one.

    Raises:
        GuideRefused: a grammar or a schema is wrong or not supported.
    """
    request = build_request({"messages": [{"role": "user", "content": text}], **fields})
    rendered = model.tokenizer.render(
        request.messages or (), add_generation_prompt=True, tools=None, template_kwargs=None
    )
    ids = tuple(model.tokenizer.encode_rendered(rendered))
    guide = model.guides.guide_for(request, ids) if model.guides else None
    return GenerationWork(request, ids, None, None, guide=guide)


def finished(engine: Any) -> list[CompletedGeneration]:
    """Run an engine until it is empty."""
    done: list[CompletedGeneration] = []
    while engine.in_flight:
        done += engine.step()
    return done


def answers(engine: Any, works: Sequence[GenerationWork]) -> list[CompletedGeneration]:
    """The ends of all these sequences, in their order, from one batch."""
    uids = [engine.submit(one) for one in works]
    done = {end.uid: end for end in finished(engine)}
    return [done[uid] for uid in uids]


def let_decode(engine: Any, n_tokens: int = 1) -> None:
    """Step until every sequence has generated so many tokens."""
    while min(progress.tokens for progress in engine.progress().values()) < n_tokens:
        engine.step()
