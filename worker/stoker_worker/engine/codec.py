"""Text, chat templates and token ids of a loaded model. Owns the tokenizer it was made with; each thread uses its own
`fork()`. Imports neither MLX nor transformers: it is handed a tokenizer."""

import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stoker_shared.errors import ModelNotLoadable, TemplateError
from stoker_shared.request import Message
from stoker_worker.engine.control_tokens import ControlTokens
from stoker_worker.engine.template_forms import TemplateForms

_ERROR_CHARACTERS: Final = 300
"""Of a template's own error message: some quote the whole conversation."""

_NORMALIZER_SHRINKS: Final = 4
"""At most this many bytes become one where a tokenizer normalizes text (NFC makes 3 of 9 in the worst case)."""


class ModelCodec:
    """`TextCodec` over mlx-lm's tokenizer wrapper."""

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
        """Every id that ends a generation, as mlx-lm sees it."""
        return frozenset(self._wrapper.eos_token_ids)

    @property
    def max_token_bytes(self) -> int:
        """Bytes of text one token can stand for at most."""
        return self._max_token_bytes

    def fork(self) -> "ModelCodec":
        """A codec that shares nothing with this one: encoding changes a tokenizer's settings for a moment."""
        return ModelCodec(copy.deepcopy(self._wrapper))

    def encode(self, text: str, *, special_start: bool) -> list[int]:
        """Token ids of `text`; control tokens written in it count. `special_start` is what mlx-lm does to a prompt."""
        bos = self._tokenizer.bos_token
        add = special_start and (bos is None or not text.startswith(bos))
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The exact text of `token_ids`: control tokens included, no space tidied away."""
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
        """The conversation as the template writes it, in escaped form: for `encode_rendered` and for comparing.

        Control tokens in anything but assistant messages are escaped (see `control_tokens`); `plain_text` undoes it.

        Raises:
            TemplateError: there is no template, it refused the messages, or `template_kwargs` has a reserved name.
        """
        if not self._wrapper.has_chat_template:
            raise TemplateError("this model has no chat template: send a prompt instead of messages")
        extra = self._control.escape(template_kwargs or {})
        reserved = sorted(self._reserved & set(extra))
        if reserved:
            raise TemplateError(f"'chat_template_kwargs' must not set {', '.join(reserved)}")
        conversation = [
            self._control.escape(
                self._forms.fit(message.as_template_input(), with_tools=bool(tools)),
                own_words=message.role == "assistant",
            )
            for message in messages
        ]
        extra["add_generation_prompt"] = add_generation_prompt
        try:
            return self._apply(conversation, self._control.escape(tools) if tools is not None else None, **extra)
        except Exception as error:  # templates are programs: they raise whatever they like
            raise TemplateError(f"the chat template refused the messages: {_one_line(error)}") from None

    def _apply(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, **extra: Any
    ) -> str:
        rendered: str = self._wrapper.apply_chat_template(list(messages), tokenize=False, tools=tools, **extra)
        return rendered

    def encode_rendered(self, rendered: str) -> list[int]:
        """Token ids of what `render` gave, or of its end.

        Raises:
            TemplateError: a control token quoted in a message cannot be written as plain text with this tokenizer.
        """
        return self._control.encode(rendered)

    def rest_of(self, rendered: str, *, after: str) -> str | None:
        """What of `rendered` follows the plain text `after`; ``None`` when it does not begin with it."""
        return self._control.rest_of(rendered, after)

    def plain_text(self, rendered: str) -> str:
        """What `render` gave, as a person would read it."""
        return self._control.unescape(rendered)


def chat_template_text(wrapper: Any) -> str:
    """Every chat template of the model as one canonical text; empty when it has none."""
    template = wrapper._tokenizer.chat_template
    if template is None:
        return ""
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True, ensure_ascii=False)


def _max_token_bytes(tokenizer: Any) -> int:
    """An upper bound: byte-level tokens are spelled with one character per byte, all others with their own text."""
    backend = tokenizer.backend_tokenizer
    byte_level = type(backend.decoder).__name__ == "ByteLevel"
    own = max((len(token) if byte_level else len(token.encode()) for token in backend.get_vocab(False)), default=1)
    added = max((len(token.content.encode()) for token in tokenizer.added_tokens_decoder.values()), default=1)
    return max(own, added) * (_NORMALIZER_SHRINKS if backend.normalizer is not None else 1)


def _one_line(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:_ERROR_CHARACTERS]
