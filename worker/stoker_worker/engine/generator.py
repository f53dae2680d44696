"""The generator's interface: sequences run through a model, step by step. Pure; engine thread.

Owns the values that cross between the engine and a generator. `RowsGenerator`, `BatchedGenerator` and `SingleGenerator`
implement it.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from stoker_shared.result import PromptLogprobs
from stoker_worker.ports import AnswerGuide


class Sampling(Protocol):
    """How the next token of one sequence is drawn: `SequenceSampling`, without MLX's types."""

    sampler: Any
    processors: Any
    error: Exception | None

    def start(self, n_drawn: int) -> None: ...


class Scorer(Protocol):
    """Scores the prompt of one sequence: `PromptScorer`, without MLX's types."""

    error: Exception | None

    @property
    def n_reusable(self) -> int: ...
    def restart(self) -> None: ...
    def take(self, logits: Any, n_before: int) -> None: ...
    def result(self) -> PromptLogprobs: ...


@dataclass(frozen=True)
class SequenceStart:
    """A sequence for the generator.

    Attributes:
        segments: token ids to prefill; the generator reports the end of each segment.
        caches: the model's own caches, holding `cached_ids`; ``None`` for a fresh start.
        prefix: from `Generator.share`: the first of `cached_ids`, which the generator drops from `caches`.
        guide: at its place after the last token of `segments`.
        end_ids: a generated token of these is the sequence's last.
        scorer: gets the logits of the prompt's tokens; those from the last token on, it ignores.
    """

    segments: list[list[int]]
    caches: list[Any] | None
    cached_ids: list[int]
    max_tokens: int
    sampler: Any
    processors: Any
    prefix: Any = None
    guide: AnswerGuide | None = None
    end_ids: frozenset[int] = frozenset()
    scorer: Scorer | None = None


@dataclass(frozen=True)
class Prefilled:
    """Progress of a sequence's prefill: `n_tokens` of the tokens that it was inserted with."""

    uid: int
    n_tokens: int
    at_segment_end: bool
    at_prompt_end: bool


@dataclass(frozen=True)
class TokenOutput:
    """A sequence's next token, which is in its cache now. `caches` comes with its last token."""

    uid: int
    token: int
    logprobs: Any
    caches: list[Any] | None


@dataclass(frozen=True)
class TakenOut:
    """A sequence's caches with `n_tokens` tokens, and `pending`, which was sampled and is not in them. Until they are
    evaluated, they refer to a shared prefix instead of having a copy of it."""

    caches: list[Any]
    n_tokens: int
    pending: int | None
    pending_logprobs: Any


class Generator(Protocol):
    """Decodes some sequences and prefills others, step by step."""

    def insert(self, start: SequenceStart) -> int:
        """Begin a sequence's prefill with the next step; returns its uid."""
        ...

    def next(self, chunk_tokens: int) -> tuple[list[Prefilled], list[TokenOutput]]:
        """One decode step of every sequence that decodes, and up to `chunk_tokens` tokens of every one in prefill. A
        sequence may get several consecutive tokens."""
        ...

    def peek(self, uid: int) -> list[Any]:
        """A sequence's own caches, lazily: only arrays that are evaluated cost anything."""
        ...

    def beginning(self, uid: int, n_tokens: int) -> list[Any]:
        """Caches of a sequence's first `n_tokens` tokens for another one, lazily. Raises `ValueError` if they cannot be
        cut."""
        raise ValueError("these caches cannot be cut")

    def share(self, uid: int, n_tokens: int) -> Any:
        """The first `n_tokens` tokens of a sequence's caches, for other sequences to refer to by
        `SequenceStart.prefix`. The value has `n_tokens`, and `stored`: the tokens in memory, so many or more. Raises
        `ValueError` if the caches cannot be cut."""
        raise ValueError("these caches cannot be cut")

    def take_out(self, uid: int) -> TakenOut:
        """End a sequence that will be inserted again; returns its state."""
        ...

    def remove(self, uid: int) -> None:
        """End a sequence."""
        ...

    def close(self) -> None: ...
