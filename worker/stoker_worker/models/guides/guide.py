"""An answer's guide: its thinking first, then its grammar, then its end. No MLX.

One thread at a time: the loader makes it, then it is the engine thread's.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np

from stoker_shared.errors import GuideRefused, StokerError
from stoker_worker.models.guides.grammar import Grammar, allow, allows, forbid
from stoker_worker.models.guides.thinking import Thinking
from stoker_worker.ports.engine import TokenMask


@dataclass(frozen=True)
class Vocabulary:
    """
    Attributes:
        n_tokens: how many token ids the tokenizer has; the model may have logits for more.
        eos_ids: the ids that end an answer.
        no_thought: ids that must not come in thinking which a grammar follows: they would end it, or begin a call.
    """

    n_tokens: int
    eos_ids: frozenset[int]
    no_thought: frozenset[int] = frozenset()

    def none(self) -> TokenMask:
        """A mask that allows nothing."""
        most = max(self.n_tokens - 1, *self.eos_ids, 0)
        return np.zeros(most // 32 + 1, np.uint32)

    def only(self, ids: Sequence[int]) -> TokenMask:
        mask = self.none()
        allow(mask, np.array(ids))
        return mask

    def thoughts(self) -> TokenMask:
        mask = ~self.none()
        forbid(mask, np.array(sorted(self.eos_ids | self.no_thought)))
        return mask


@dataclass
class Guide:
    """Implements `AnswerGuide`.

    Attributes:
        grammar: of what follows the thinking; ``None``: it is free.
        thinking: ``None`` for a model that does not think, or whose thinking needs no watching.
    """

    vocabulary: Vocabulary
    grammar: Grammar | None
    thinking: Thinking | None
    error: StokerError | None = field(default=None, init=False)
    _has_ended: bool = field(default=False, init=False)
    _in_grammar: bool = field(init=False)
    _may_open: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """At the beginning of the answer."""
        self._in_grammar = self.thinking is None
        if self.thinking is not None and self.grammar is not None:
            # A grammar that wants the marker itself gets it.
            marker = self.thinking.start_ids[0]
            self._may_open = not allows(self.grammar.mask(), marker)

    def fork(self) -> "Guide":
        grammar = self.grammar.fork() if self.grammar else None
        other = Guide(self.vocabulary, grammar, copy(self.thinking))
        other.start(())
        return other

    def start(self, generated: Sequence[int]) -> None:
        self._has_ended, self._in_grammar = False, self.thinking is None
        if self.thinking is not None:
            self.thinking.restart()
        if self.grammar is not None:
            self.grammar.start(())
        for token in generated:
            self._take(token)

    def after(self, token: int | None) -> TokenMask | None:
        if self.error is not None:
            return None
        if token is not None:
            self._take(token)
        mask = self._mask()
        problem = self.grammar.problem if self.grammar else None
        if problem is None and mask is not None and not mask.any():
            problem = "nothing may follow here"
        if problem is not None:
            self.error = GuideRefused(f"the answer cannot go on: {problem}")
        return None if problem else mask

    def _take(self, token: int) -> None:
        if token in self.vocabulary.eos_ids:
            self._has_ended = True
        elif self._in_grammar:
            if self.grammar is not None:
                self.grammar.take(token)
        elif self.thinking is not None:
            self._take_before_grammar(self.thinking, token)

    def _take_before_grammar(self, thinking: Thinking, token: int) -> None:
        if self.grammar is None:
            thinking.take(token)
        elif thinking.is_inside:
            thinking.take(token)
            self._in_grammar = not thinking.is_inside
        elif thinking.n_begun or (self._may_open and token == thinking.next_of_marker):
            thinking.take(token)
        else:
            self._in_grammar = True
            self.grammar.take(token)

    def _mask(self) -> TokenMask | None:
        thinking, grammar = self.thinking, self.grammar
        if thinking is not None and not self._in_grammar:
            if (forced := thinking.forced) is not None:
                return self.vocabulary.only([forced])
            if thinking.is_inside or grammar is None:
                return None if grammar is None else self.vocabulary.thoughts()
            if thinking.n_begun:
                return self.vocabulary.only([thinking.next_of_marker])
        if grammar is None:
            return None
        if self._has_ended:
            return self.vocabulary.only(sorted(self.vocabulary.eos_ids))
        mask = grammar.mask()
        if thinking is not None and not self._in_grammar and self._may_open:
            allow(mask, np.array([thinking.next_of_marker]))
        return mask
