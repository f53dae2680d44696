"""A row that decodes: its tokens so far, and how its next ones are drawn. Engine thread. Owns no keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.models.cache import TokenBuffer

from stoker_worker.engine.rows.ngram_lookup import NgramLookup
from stoker_worker.engine.rows.shared_prefix import SharedPrefix
from stoker_worker.ports import AnswerGuide


@dataclass(eq=False)
class Row:
    """
    Attributes:
        tokens: those in its cache, the prefix included.
        sampler, processors, end_ids: as in `SequenceStart`.
        guide: as in `SequenceStart`; it follows the tokens that are fed.
        prefix: what its cache begins with and other rows' too.
        context: the tokens as an array, for processors.
        has_generated: whether its next token was generated; until then that is the last one of the prompt.
        lookup: where its drafts come from.
    """

    uid: int
    tokens: list[int]
    max_tokens: int
    sampler: Any
    processors: Sequence[Any]
    end_ids: frozenset[int]
    prefix: SharedPrefix | None = None
    guide: AnswerGuide | None = None
    context: Any = None
    has_generated: bool = False
    n_generated: int = 0
    lookup: NgramLookup = field(default_factory=NgramLookup)

    @property
    def n_own(self) -> int:
        """Its tokens after the prefix."""
        return len(self.tokens) - (0 if self.prefix is None else self.prefix.n_tokens)

    @property
    def n_left(self) -> int:
        return self.max_tokens - self.n_generated

    def begin_context(self) -> None:
        if self.processors:
            self.context = TokenBuffer(list(self.tokens))

    def take_back(self, n_drawn: int) -> None:
        """Forget its newest draws, which followed wrong drafts. `tokens` are right by now."""
        if n_drawn and self.sampler is not None:
            self.sampler.take_back(n_drawn)
        if n_drawn:
            self.begin_context()


@dataclass(frozen=True)
class Joiner:
    """A row whose caches hold its prompt after the prefix and without `last_token`."""

    row: Row
    caches: list[Any]
    last_token: int
