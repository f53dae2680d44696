"""Guides of answers: most tokens of thinking, then a grammar compiled by llguidance, then the end. No MLX.

One thread at a time: the loader makes a guide, then the engine thread uses it. llguidance refuses grammars that it does
not support. Its matcher does not raise: after an error it stays in a state of error.
"""

import json
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from stoker_shared.errors import GuideRefused, StokerError
from stoker_shared.request import GenerationRequest, Guide
from stoker_shared.text import message_line
from stoker_worker.models.call_grammars import JSON_OPTIONS, CallTokens, call_grammar, literal
from stoker_worker.ports.engine import TokenMask
from stoker_worker.ports.model import AnswerFormat


def grammar_text(request: GenerationRequest, calls: Callable[[], CallTokens]) -> str | None:
    """The grammar of an answer; ``None``: it may have any form. `calls` makes the model's `CallTokens`.

    Raises:
        GuideRefused: no grammar can be written.
    """
    if request.guide is not None:
        return _of_guide(request.guide)
    if request.is_formed and request.response_format is not None:
        wanted = request.response_format.json_schema
        schema = {"type": "object"} if wanted is None else wanted.schema_
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_OPTIONS))  # type: ignore[arg-type]
    if request.tool_choice is not None and request.must_call:
        return call_grammar(request.tool_choice, request.tools or (), calls())
    return None


def _of_guide(guide: Guide) -> str:
    if guide.regex is not None:
        return str(LLMatcher.grammar_from_regex(guide.regex))
    if guide.lark is not None:
        return str(LLMatcher.grammar_from_lark(guide.lark))
    choices = " | ".join(literal(choice) for choice in guide.choice or ())
    return str(LLMatcher.grammar_from_lark(f"start: {choices}"))


class Grammar:
    """llguidance's matcher, and the model's own `eos_ids`, which end a complete answer even if it lacks them."""

    def __init__(self, matcher: Any, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_ids = np.array(sorted(eos_ids))

    def fork(self) -> "Grammar":
        """A copy at the same place."""
        return Grammar(self._matcher.deep_copy(), frozenset(self._eos_ids.tolist()))

    @property
    def problem(self) -> str | None:
        """The matcher's error in one line; ``None`` if there is none."""
        if not self._matcher.is_error():
            return None
        return self._matcher.get_error().split("\n", 1)[0].strip() or "no reason given"

    def start(self, tokens: Sequence[int]) -> None:
        self._matcher.reset()
        self._matcher.consume_tokens(list(tokens))

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)

    def mask(self) -> TokenMask:
        """The tokens that may come next; the end too if the answer is complete."""
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        n_words = max(len(words), int(self._eos_ids.max(initial=0)) // 32 + 1)
        mask = np.zeros(n_words, np.uint32)
        if not self._matcher.is_stopped():
            mask[: len(words)] = words
        if self._matcher.is_accepting():
            allow(mask, self._eos_ids)
        return mask


def allows(mask: TokenMask, token: int) -> bool:
    return token < 32 * len(mask) and bool(mask[token // 32] >> np.uint32(token % 32) & np.uint32(1))


def allow(mask: TokenMask, ids: "np.ndarray[Any, Any]") -> None:
    """Set the bits of `ids`. `mask` has room for all of them."""
    np.bitwise_or.at(mask, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))


def forbid(mask: TokenMask, ids: "np.ndarray[Any, Any]") -> None:
    """Clear those bits of `ids` that `mask` has."""
    inside = ids[ids < 32 * len(mask)]
    np.bitwise_and.at(mask, inside // 32, ~(np.uint32(1) << (inside % 32).astype(np.uint32)))


@dataclass
class Marked:
    """The part of an answer between two markers: its thinking, or its calls.

    Attributes:
        start_ids, end_ids: the markers.
        opened: whether the prompt ends inside the part.
        most: most tokens in it, without markers; ``None``: any number.
        is_inside: whether the answer is in it now. Outside, its start marker may come.
        has_ended: whether an end marker has come.
        n_tokens: its tokens so far, with the beginning of an end marker.
    """

    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    opened: bool = False
    most: int | None = None
    is_inside: bool = field(init=False)
    has_ended: bool = field(init=False)
    n_tokens: int = field(init=False)
    _newest: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Go back to the beginning of the answer."""
        self.is_inside, self.has_ended, self.n_tokens, self._newest = self.opened, False, 0, ()

    def take(self, token: int) -> None:
        marker = self._marker
        self.n_tokens += self.is_inside
        self._newest = (*self._newest, token)[-len(marker) :]
        if self._newest == marker:
            self.n_tokens -= len(marker) * self.is_inside
            self.has_ended = self.has_ended or self.is_inside
            self.is_inside, self._newest = not self.is_inside, ()

    @property
    def forced(self) -> int | None:
        """The only token that may come next, the end marker's, once the part has `most` tokens; else ``None``."""
        if not self.is_inside or self.most is None or self.n_tokens < self.most:
            return None
        return self.next_of_marker

    @property
    def next_of_marker(self) -> int:
        """The next token of the marker that may come next, or of which a part is there."""
        return self._marker[self.n_begun]

    @property
    def n_begun(self) -> int:
        """The number of tokens of that marker that the answer ends with."""
        longest = min(len(self._newest), len(self._marker) - 1)
        return next((n for n in range(longest, 0, -1) if self._newest[-n:] == self._marker[:n]), 0)

    @property
    def _marker(self) -> tuple[int, ...]:
        return self.end_ids if self.is_inside else self.start_ids


@dataclass(frozen=True)
class Vocabulary:
    """The token ids of a model.

    Attributes:
        n_tokens: the tokenizer's number of ids; the model may have logits for more.
        eos_ids: the ids that end an answer.
        no_thought: ids that must not come in thinking before a grammar: they would end it, or begin a call.
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
class GrammarGuide:
    """Implements `AnswerGuide`.

    Attributes:
        grammar: for the part after the thinking; ``None``: anything may follow.
        thinking: ``None`` if the model does not think.
        first_call: the calls of an answer without a grammar that ends with its first call.
    """

    vocabulary: Vocabulary
    grammar: Grammar | None
    thinking: Marked | None
    first_call: Marked | None = None
    error: StokerError | None = field(default=None, init=False)
    _has_ended: bool = field(init=False)
    _in_grammar: bool = field(init=False)
    _may_open: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.start(())
        if self.thinking is not None and self.grammar is not None:
            # A grammar that wants the marker itself gets it.
            self._may_open = not allows(self.grammar.mask(), self.thinking.start_ids[0])

    def fork(self) -> "GrammarGuide":
        grammar = self.grammar.fork() if self.grammar else None
        return GrammarGuide(self.vocabulary, grammar, copy(self.thinking), copy(self.first_call))

    def start(self, generated: Sequence[int]) -> None:
        self._has_ended, self._in_grammar = False, self.thinking is None
        for marked in (self.thinking, self.first_call):
            if marked is not None:
                marked.restart()
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
        if self.first_call is not None and not (self.thinking is not None and self.thinking.is_inside):
            self.first_call.take(token)
        if token in self.vocabulary.eos_ids:
            self._has_ended = True
        elif self._in_grammar:
            if self.grammar is not None:
                self.grammar.take(token)
        elif self.thinking is not None:
            self._take_before_grammar(self.thinking, token)

    def _take_before_grammar(self, thinking: Marked, token: int) -> None:
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
        if self.first_call is not None and self.first_call.has_ended:
            return self.vocabulary.only(sorted(self.vocabulary.eos_ids))
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


MOST_GRAMMAR_BYTES: Final = 256 * 1024
_MOST_KEPT: Final = 64
_MOST_REASON: Final = 200

_LIMITS: Final = LLParserLimits(
    max_grammar_size=8_000,  # a row's time grows with the square of this
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_lexer_states=50_000,  # 1 to 2 kB each
    verbose_errors=False,
)
"""Lower than llguidance's defaults, because a slow mask delays every sequence of the batch."""


class GrammarGuides:
    """Implements `GuideMaker`."""

    def __init__(self, wrapper: Any, form: AnswerFormat) -> None:
        """`wrapper` is mlx-lm's `TokenizerWrapper` around a tokenizer with a `tokenizers` backend."""
        self._wrapper = wrapper
        self._form = form
        self._eos_ids = frozenset(wrapper.eos_token_ids)
        self._compiled = lru_cache(_MOST_KEPT)(self._compile)

    def guide_for(self, request: GenerationRequest, prompt_ids: Sequence[int]) -> GrammarGuide | None:
        text = grammar_text(request, self._call_tokens)
        thinking = self._thinking(request, prompt_ids)
        if text is not None and self._form.first_state == "header":
            raise GuideRefused("this model writes headers in its answers, which no grammar can begin after")
        first_call = self._first_call(request) if text is None else None
        is_limited = thinking is not None and request.max_reasoning_tokens is not None
        if text is None and first_call is None and not is_limited:
            return None
        grammar = None if text is None else self._grammar(text)
        return GrammarGuide(self._vocabulary(), grammar, thinking, first_call)

    def _first_call(self, request: GenerationRequest) -> Marked | None:
        """Ends the answer with its first call. ``None`` if more calls may follow, or if no token can be made to follow
        the first one: then only the first of several calls is kept."""
        form = self._form
        ends = not request.ignore_eos and self._eos_ids and form.tool_start_ids and form.tool_end
        if request.parallel_tool_calls or not request.offered_tools or not ends:
            return None
        return Marked(form.tool_start_ids, self._ids_of(form.tool_end or ""))

    def _ids_of(self, marker: str) -> tuple[int, ...]:
        return tuple(self._wrapper._tokenizer.encode(marker, add_special_tokens=False))

    def _thinking(self, request: GenerationRequest, prompt_ids: Sequence[int]) -> Marked | None:
        form = self._form
        if not form.think_start_ids or not form.think_end_ids:
            return None
        opened = form.state_after(prompt_ids) == "reasoning"
        return Marked(form.think_start_ids, form.think_end_ids, opened, request.max_reasoning_tokens)

    def _vocabulary(self) -> Vocabulary:
        calls = self._form.tool_start_ids
        return Vocabulary(len(self._wrapper._tokenizer), self._eos_ids, frozenset(calls if len(calls) == 1 else ()))

    def _grammar(self, text: str) -> Grammar:
        """A copy of the compiled grammar, at its beginning."""
        if len(text.encode()) > MOST_GRAMMAR_BYTES:
            raise GuideRefused(f"the grammar has {len(text.encode())} bytes, the limit is {MOST_GRAMMAR_BYTES}")
        return self._compiled(text).fork()

    def _compile(self, text: str) -> Grammar:
        """Raises `GuideRefused` if the matcher is in error, at once or at its first mask, or if no answer fits."""
        if not self._eos_ids:
            raise GuideRefused("this model has no end-of-sequence token, so no answer could end where its grammar does")
        if isinstance(self._tokenizer, GuideRefused):
            raise self._tokenizer
        grammar = Grammar(LLMatcher(self._tokenizer, text, log_level=0, limits=_LIMITS), self._eos_ids)
        first = grammar.mask()
        problem = grammar.problem or (None if first.any() else "no answer fits it")
        if problem is not None:
            raise GuideRefused(f"this grammar or schema cannot be compiled: {problem[:_MOST_REASON]}")
        return grammar

    @cached_property
    def _tokenizer(self) -> LLTokenizer | GuideRefused:
        """Made, or refused, for the first grammar: it takes up to a second, and most workers need none."""
        backend = deepcopy(self._wrapper._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        known = [token for token in sorted(self._eos_ids) if token < backend.get_vocab_size()]
        try:
            return LLTokenizer(backend.to_str(), eos_token=known or None)
        except Exception as error:  # ValueError for what it does not support, or any error of its parser
            reason = message_line(error)[:_MOST_REASON]
            return GuideRefused(f"no grammar can guide this model's tokenizer: {reason}")

    def _call_tokens(self) -> CallTokens:
        form, tokens = self._form, self._wrapper._tokenizer.backend_tokenizer.get_added_tokens_decoder()
        added = {token.content: token_id for token_id, token in tokens.items()}
        special = {token.content: token_id for token_id, token in tokens.items() if token.special}
        return CallTokens(form.tool_parser, form.tool_start or "", form.tool_end or "", added, special)


class _ByteTokens:
    """The part of a `transformers` tokenizer that guides use: a token for each byte, and special ones after them."""

    def __init__(self, special: Sequence[str]) -> None:
        from tokenizers import AddedToken, Tokenizer, decoders, models

        self.backend_tokenizer = Tokenizer(models.BPE({f"<0x{n:02X}>": n for n in range(256)}, [], byte_fallback=True))
        self.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        self.backend_tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


def byte_guides(form: AnswerFormat, special: Sequence[str]) -> GrammarGuides:
    """Guides of answers whose tokens are bytes. `special` names the tokens from 256 on; the first ends an answer."""
    return GrammarGuides(SimpleNamespace(_tokenizer=_ByteTokens(special), eos_token_ids={256}), form)
