"""Text, chat template and token ids of a loaded model. Owns its copy of the tokenizer; each thread uses its own
`fork()`. Imports neither MLX nor transformers."""

import copy
import inspect
import json
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stoker_shared.errors import ModelNotLoadable, TemplateError
from stoker_shared.message import Message
from stoker_worker.models.control_tokens import ControlTokens
from stoker_worker.models.template_forms import TemplateForms

_RAISED: Final = re.compile(r"""raise_exception\(\s*(?:'([^'\\]*)'|"([^"\\]*)")""")
"""A message that a template raises, as far as it is written in the template itself."""

_NORMALIZER_SHRINKS: Final = 4
"""At most this many bytes become one where a tokenizer normalizes text (in the worst case NFC makes 3 of 9)."""


class ModelTokenizer:
    """`TokenizerPort` over mlx-lm's tokenizer wrapper."""

    def __init__(self, wrapper: Any) -> None:
        """
        Args:
            wrapper: `mlx_lm.tokenizer_utils.TokenizerWrapper` around a tokenizer with a `tokenizers` backend.

        Raises:
            ModelNotLoadable: the tokenizer has no such backend.
        """
        self._wrapper = wrapper
        tokenizer = wrapper._tokenizer
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ModelNotLoadable(f"tokenizer {type(tokenizer).__name__} has no fast version, which stoker needs")
        self._tokenizer = tokenizer
        self._control = ControlTokens(tokenizer, chat_template_text(wrapper))
        self._forms = TemplateForms(self._apply, chat_template_text(wrapper))
        self._reserved = frozenset(inspect.signature(type(tokenizer).apply_chat_template).parameters) - {"documents"}
        self._max_token_bytes = _max_token_bytes(tokenizer)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends a generation, the same as for mlx-lm."""
        return frozenset(self._wrapper.eos_token_ids)

    @property
    def max_token_bytes(self) -> int:
        """Most bytes of text in one token."""
        return self._max_token_bytes

    def fork(self) -> "ModelTokenizer":
        """A tokenizer that shares nothing with this one: encoding changes its settings for a moment."""
        return ModelTokenizer(copy.deepcopy(self._wrapper))

    def encode(self, text: str, *, special_start: bool) -> list[int]:
        """Token ids of `text`, control tokens in it included; with `special_start` as mlx-lm encodes a prompt."""
        bos = self._tokenizer.bos_token
        add = special_start and (bos is None or not text.startswith(bos))
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The exact text of `token_ids`, control tokens and all spaces included."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        """The conversation as the template writes it, in escaped form: for `encode_rendered` and for comparisons.

        Control tokens in anything but assistant messages are escaped (see `control_tokens`).

        Raises:
            TemplateError: there is no template, it refused the messages, or `template_kwargs` has a reserved name.
        """
        if not self._wrapper.has_chat_template:
            raise TemplateError("this model has no chat template: send a prompt instead of messages")
        extra = self._control.escape(template_kwargs or {})
        reserved = sorted(self._reserved & set(extra))
        if reserved:
            raise TemplateError(f"'chat_template_kwargs' must not set {', '.join(reserved)}")
        extra["add_generation_prompt"] = add_generation_prompt
        try:
            conversation = [
                self._control.escape(
                    self._forms.fit(message.as_template_input(), with_tools=bool(tools)),
                    own_words=message.role == "assistant",
                )
                for message in messages
            ]
            return self._apply(conversation, self._control.escape(tools) if tools is not None else None, **extra)
        except Exception as error:  # a template is a program and may raise anything
            reason = _without_conversation(error, chat_template_text(self._wrapper))
            raise TemplateError(f"the chat template refused the messages: {reason}") from None

    def _apply(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, **extra: Any
    ) -> str:
        rendered: str = self._wrapper.apply_chat_template(list(messages), tokenize=False, tools=tools, **extra)
        return rendered

    def encode_rendered(self, rendered: str) -> list[int]:
        """Token ids of a text from `render`, or of its end.

        Raises:
            TemplateError: a control token quoted in a message cannot be written as plain text with this tokenizer.
        """
        return self._control.encode(rendered)

    def rest_of(self, rendered: str, *, after: str) -> str | None:
        """The part of `rendered` after the plain text `after`; ``None`` when it does not begin with it."""
        return self._control.rest_of(rendered, after)


def chat_template_text(wrapper: Any) -> str:
    """Every chat template of the model as one canonical text; empty when it has none."""
    template = wrapper._tokenizer.chat_template
    if template is None:
        return ""
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True, ensure_ascii=False)


def _max_token_bytes(tokenizer: Any) -> int:
    """An upper bound: byte-level tokens have one character per byte, all others their own text."""
    backend = tokenizer.backend_tokenizer
    byte_level = type(backend.decoder).__name__ == "ByteLevel"
    own = max((len(token) if byte_level else len(token.encode()) for token in backend.get_vocab(False)), default=1)
    added = max((len(token.content.encode()) for token in tokenizer.added_tokens_decoder.values()), default=1)
    return max(own, added) * (_NORMALIZER_SHRINKS if backend.normalizer is not None else 1)


def _without_conversation(error: Exception, template: str) -> str:
    """One line about a template's error: its type, its line, and the part of its message that is the template's own.

    The rest of a message may quote the conversation, which must reach neither the log nor the job's failure in Redis.
    """
    lines = [n for frame, n in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    kind = type(error).__name__ + (f" in line {lines[-1]}" if lines else "")
    literals = [found[1] or found[2] or "" for found in _RAISED.finditer(template)]
    own = max((text for text in literals if str(error).startswith(text)), key=len, default="")
    if not own:
        return kind
    return f"{kind}: {' '.join(own.split())}" + ("" if own == str(error) else " ...")
