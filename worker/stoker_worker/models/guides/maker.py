"""Makes guides: compiles grammars for the loaded model's tokenizer, and keeps the newest. Loader thread; no MLX."""

from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from stoker_shared.errors import GuideRefused
from stoker_shared.request import GenerationRequest
from stoker_shared.text import message_line
from stoker_worker.models.guides.grammar import Grammar
from stoker_worker.models.guides.grammar_text import CallMarkers, grammar_text
from stoker_worker.models.guides.guide import Guide, Vocabulary
from stoker_worker.models.guides.thinking import Thinking
from stoker_worker.ports.model import AnswerFormat

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
"""Lower than llguidance's own limits, because a mask that takes long delays every sequence of the batch."""


class GrammarGuides:
    """Implements `GuideMaker`."""

    def __init__(self, wrapper: Any, form: AnswerFormat) -> None:
        """
        Args:
            wrapper: `mlx_lm.tokenizer_utils.TokenizerWrapper` around a tokenizer with a `tokenizers` backend.
        """
        self._wrapper = wrapper
        self._form = form
        self._eos_ids = frozenset(wrapper.eos_token_ids)
        self._made: LLTokenizer | GuideRefused | None = None
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()

    def guide_for(self, request: GenerationRequest, prompt_ids: Sequence[int]) -> Guide | None:
        """As `GuideMaker.guide_for`."""
        text = grammar_text(request, self._call_markers())
        thinking = self._thinking(request, prompt_ids)
        if text is None and (thinking is None or request.max_reasoning_tokens is None):
            return None
        grammar = None if text is None else self._grammar(text)
        return Guide(self._vocabulary(), grammar, thinking)

    def _thinking(self, request: GenerationRequest, prompt_ids: Sequence[int]) -> Thinking | None:
        form = self._form
        if not form.think_start_ids or not form.think_end_ids:
            return None
        opened = form.state_after(prompt_ids) == "reasoning"
        return Thinking(form.think_start_ids, form.think_end_ids, opened, request.max_reasoning_tokens)

    def _vocabulary(self) -> Vocabulary:
        calls = self._form.tool_start_ids
        return Vocabulary(len(self._wrapper._tokenizer), self._eos_ids, frozenset(calls if len(calls) == 1 else ()))

    def _grammar(self, text: str) -> Grammar:
        """A copy of the compiled grammar, at its beginning."""
        if len(text.encode()) > MOST_GRAMMAR_BYTES:
            raise GuideRefused(f"the grammar has {len(text.encode())} bytes, the limit is {MOST_GRAMMAR_BYTES}")
        found = self._compiled.pop(text, None)
        if found is None:
            found = self._compile(text)
        self._compiled[text] = found
        while len(self._compiled) > _MOST_KEPT:
            self._compiled.popitem(last=False)
        return found.fork()

    def _compile(self, text: str) -> Grammar:
        """
        Raises:
            GuideRefused: the matcher is in error, at once or at its first mask, or no answer at all fits.
        """
        if self._form.first_state not in {"normal", "reasoning"}:
            raise GuideRefused("this model writes headers in its answers, which no grammar can begin after")
        if not self._eos_ids:
            raise GuideRefused("this model has no end-of-sequence token, so no answer could end where its grammar does")
        grammar = Grammar(LLMatcher(self._tokenizer(), text, log_level=0, limits=_LIMITS), self._eos_ids)
        first = grammar.mask()
        problem = grammar.problem or (None if first.any() else "no answer fits it")
        if problem is not None:
            raise GuideRefused(f"this grammar or schema cannot be compiled: {problem[:_MOST_REASON]}")
        return grammar

    def _tokenizer(self) -> LLTokenizer:
        """Made for the first grammar: it takes up to a second, and most workers need none."""
        if self._made is None:
            self._made = self._make_tokenizer()
        if isinstance(self._made, GuideRefused):
            raise self._made
        return self._made

    def _make_tokenizer(self) -> LLTokenizer | GuideRefused:
        backend = deepcopy(self._wrapper._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        known = [token for token in sorted(self._eos_ids) if token < backend.get_vocab_size()]
        try:
            return LLTokenizer(backend.to_str(), eos_token=known or None)
        except Exception as error:  # it raises ValueError for what it does not know, and what its parser raises
            reason = message_line(error)[:_MOST_REASON]
            return GuideRefused(f"no grammar can guide this model's tokenizer: {reason}")

    def _call_markers(self) -> CallMarkers | None:
        """As token ids: the model has learned these tokens as its markers, not other tokens with the same text."""
        form = self._form
        if not form.is_json_call:
            return None
        after = self._wrapper._tokenizer.encode(form.tool_end or "", add_special_tokens=False)
        return _items(form.tool_start_ids), _items(after)


def _items(ids: Sequence[int]) -> str:
    return " ".join(f"<[{token}]>" for token in ids) or '""'
