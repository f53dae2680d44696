"""Text, chat template and token ids of a loaded model. Imports neither MLX nor transformers. Owns its copy of the
tokenizer; each thread uses its own `fork()`."""

import copy
import inspect
import json
import re
import secrets
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from stoker_shared.errors import ModelNotLoadable, TemplateError
from stoker_shared.message import Message

_NAMES_DEVELOPER: Final = re.compile(r"""(['"])developer\1""")
_THINKING: Final = ("reasoning_content", "reasoning", "thinking")
"""Names of the field for the thinking before an answer, the most specific first."""

_TRIED: Final = ("stoker_try", "stoker_name", "stoker_value")
_MISQUOTED: Final = (r"\"stoker_name", "'stoker_name")
"""Signs of wrong arguments in a rendered call: JSON text that was encoded again, and an object in Python's notation."""

_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "stoker_tool",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {"stoker_field": {"type": "string", "description": ""}},
            "required": [],
        },
    },
}
"""Shares no word with the call that is tried, so words of the call cannot come from the list of tools."""

Apply = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], str]
"""Renders messages, perhaps with tools, through the template. May raise any exception."""


@dataclass(frozen=True)
class _CallForm:
    """One way to write a message with tool calls.

    Attributes:
        no_content: the fields that a message without content gets.
        parsed: whether a call's arguments become an object; else they become JSON text.
    """

    no_content: Mapping[str, Any]
    parsed: bool

    def of(self, message: Mapping[str, Any]) -> dict[str, Any]:
        calls = [self._call(call) for call in message["tool_calls"]]
        return {**({} if "content" in message else self.no_content), **message, "tool_calls": calls}

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call.get("function")
        if not isinstance(function, Mapping) or "arguments" not in function:
            return call
        arguments = function["arguments"]
        arguments = _parsed(arguments) if self.parsed else _as_text(arguments)
        return {**call, "function": {**function, "arguments": arguments}}


_FORMS: Final = tuple(
    _CallForm(no_content, parsed) for parsed in (True, False) for no_content in ({"content": ""}, {"content": None}, {})
)


class TemplateForms:
    """Writes messages in the form that a chat template renders correctly."""

    def __init__(self, apply: Apply, template: str) -> None:
        """`template`: the text of the chat template, or of all templates if the model has several."""
        self._apply = apply
        self._developer = "developer" if _NAMES_DEVELOPER.search(template) else "system"
        fields = (name for name in _THINKING if re.search(rf"""[.'"]{name}\b""", template))  # not the word in prose
        self._thinking = next(fields, _THINKING[0])
        self._form_of = cache(self._find_form)

    def fit(self, message: Mapping[str, Any], *, with_tools: bool) -> Mapping[str, Any]:
        """The message in the form for this template."""
        if message.get("role") == "developer":
            message = {**message, "role": self._developer}
        if "reasoning_content" in message:
            message = {self._thinking if name == "reasoning_content" else name: x for name, x in message.items()}
        return self._form_of(with_tools).of(message) if message.get("tool_calls") else message

    def _find_form(self, with_tools: bool) -> _CallForm:
        """The first form in which a call is rendered whole; if there is none, that of mlx-lm's own server."""
        return next((form for form in _FORMS if self._is_whole(form, with_tools)), _FORMS[0])

    def _is_whole(self, form: _CallForm, with_tools: bool) -> bool:
        silent = self._tried(form, with_tools)
        if not all(word in silent for word in _TRIED) or any(bad in silent for bad in _MISQUOTED):
            return False
        return silent.count("None") <= self._tried(form, with_tools, content="!").count("None")

    def _tried(self, form: _CallForm, with_tools: bool, **content: str) -> str:
        """A call in this form, rendered; empty if the template refuses it."""
        name, key, value = _TRIED
        call = {"name": name, "arguments": {key: value}}
        call_id = "stoker000"  # Mistral's templates want nine letters or digits
        calling = {"role": "assistant", "tool_calls": [{"type": "function", "id": call_id, "function": call}]}
        messages = [
            {"role": "user", "content": "?"},
            form.of({**calling, **content}),
            {"role": "tool", "content": "!", "name": name, "tool_call_id": call_id},
        ]
        try:
            return self._apply(messages, [_TOOL] if with_tools else None)
        except Exception:  # a template is a program and may raise anything
            return ""


def _parsed(arguments: Any) -> Any:
    """The object in a JSON text; anything else as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


_ESCAPE: Final = "\U0010fffd"
_FIRST: Final = 0x100000
"""Code point of the first control token's stand-in. The plane has room for 65,000."""


class ControlTokens:
    """The control tokens of one tokenizer: the special ones, and those added tokens that the chat template mentions
    (``<tool_response>`` is not special in Qwen's vocabulary, yet only the template should write it)."""

    def __init__(self, tokenizer: Any, chat_template: str) -> None:
        """`tokenizer`: of `transformers`, with a `tokenizers` backend; `chat_template`: all templates as one text."""
        self._tokenizer = tokenizer
        self._contents: Sequence[str] = tuple(
            token.content
            for _, token in sorted(tokenizer.added_tokens_decoder.items())
            if token.special or (token.content in chat_template and not token.content.isspace())
        )
        self._stand_ins = {content: chr(_FIRST + index) for index, content in enumerate(self._contents)}
        longest_first = sorted(self._contents, key=len, reverse=True)  # as tokenizers match them
        tokens = [re.escape(content) for content in longest_first]
        self._in_text = re.compile("|".join([_ESCAPE, *tokens]))
        self._in_rendered = re.compile("|".join([f"{_ESCAPE}(.)", *tokens]), re.DOTALL)
        self._marked: _MarkedTokenizer | None = None
        normalizer = tokenizer.backend_tokenizer.normalizer
        self._compose: Callable[[str], str] = normalizer.normalize_str if type(normalizer).__name__ == "NFC" else str

    def escape(self, value: Any, *, own_words: bool = False) -> Any:
        """`value` with every string in it escaped, at any depth and in dict keys too, and composed (NFC) if the
        tokenizer does that. In the model's `own_words`, control tokens stay control tokens."""
        if isinstance(value, str):
            if own_words:
                return value.replace(_ESCAPE, _ESCAPE * 2)
            if not value.isascii():  # else the text of the token ids, which `rest_of` compares, is another one
                value = self._compose(value)
            return self._in_text.sub(lambda found: _ESCAPE + self._stand_ins.get(found[0], _ESCAPE), value)
        if isinstance(value, Mapping):
            return {self.escape(k, own_words=own_words): self.escape(v, own_words=own_words) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape(item, own_words=own_words) for item in value]
        return value

    def unescape(self, rendered: str) -> str:
        """The text without its escapes."""
        return self._in_rendered.sub(lambda found: self._literal(found) or found[0], rendered)

    def rest_of(self, rendered: str, after: str) -> str | None:
        """The part of the escaped text after the plain text `after`.

        ``None`` if the text does not begin with `after`, or if `after` ends inside a control token, quoted or real: its
        two halves cannot be encoded apart.
        """
        start = done = 0
        for found in self._in_rendered.finditer(rendered):
            literal = self._literal(found) or found[0]
            chunk = rendered[start : found.start()]
            if done + len(chunk) >= len(after):
                break
            if not after.startswith(chunk + literal, done):
                return None
            done += len(chunk) + len(literal)
            start = found.end()
        tail = after[done:]
        return rendered[start + len(tail) :] if rendered.startswith(tail, start) else None

    def encode(self, rendered: str) -> list[int]:
        """Token ids of an escaped text, with nothing added: the tokenizer's own if nothing was escaped.

        Raises:
            TemplateError: the tokenizer makes a control token of plain text, or an escape was torn apart.
        """
        if not any(found[1] and found[1] != _ESCAPE for found in self._in_rendered.finditer(rendered)):
            ids: list[int] = self._tokenizer.encode(self.unescape(rendered), add_special_tokens=False)
            return ids
        if self._marked is None:
            self._marked = _MarkedTokenizer(self._tokenizer, self._contents)
        mark = self._marked.mark
        return self._marked.encode(
            self._in_rendered.sub(lambda found: self._literal(found) or mark + found[0], rendered)
        )

    def _literal(self, found: re.Match[str]) -> str | None:
        """The text of an escape; ``None`` for a control token that is not escaped."""
        stand_in = found[1]
        if stand_in is None:
            return None
        if stand_in == _ESCAPE:
            return _ESCAPE
        index = ord(stand_in) - _FIRST
        if not 0 <= index < len(self._contents):
            raise TemplateError("the chat template took an escaped control token apart")
        return self._contents[index]


class _MarkedTokenizer:
    """The same tokenizer, but it finds control tokens only after a secret mark: without it they are plain text.

    One pass over the whole text keeps everything else, such as spaces swallowed around tokens and prefixes at the start
    of a text; encoding piece by piece would not. The mark is random, so no text can contain it.
    """

    def __init__(self, tokenizer: Any, contents: Sequence[str]) -> None:
        from tokenizers import AddedToken, Tokenizer

        self.mark = "".join(chr(0xF100 + byte) for byte in secrets.token_bytes(8))
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state["added_tokens"] = []
        self._backend = Tokenizer.from_str(json.dumps(state))
        control, flags = set(contents), ("single_word", "lstrip", "rstrip", "normalized")
        added = {}
        for true_id, token in sorted(tokenizer.added_tokens_decoder.items()):
            content = self.mark + token.content if token.content in control else token.content
            added[true_id] = AddedToken(content, special=False, **{name: getattr(token, name) for name in flags})
        self._backend.add_tokens([*added.values()])  # at once, because a call takes time for all that are there
        id_of: Any = self._backend.token_to_id
        self._true_ids: dict[int, int] = {id_of(token.content): true_id for true_id, token in added.items()}
        self._control_ids = {tokenizer.convert_tokens_to_ids(content) for content in contents} - set(self._true_ids)

    def encode(self, text: str) -> list[int]:
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if not self._control_ids.isdisjoint(ids):
            raise TemplateError("a message quotes a control token that this tokenizer cannot write as plain text")
        return [self._true_ids.get(token_id, token_id) for token_id in ids]


_RAISED: Final = re.compile(r"""raise_exception\(\s*(?:'([^'\\]*)'|"([^"\\]*)")""")
"""The literal text of an error that a template raises."""

_NORMALIZER_SHRINKS: Final = 4
"""At most this many bytes become one when a tokenizer normalizes text (in the worst case NFC makes 3 of 9)."""


class ModelTokenizer:
    """`TokenizerPort` over mlx-lm's tokenizer wrapper."""

    def __init__(self, wrapper: Any) -> None:
        """`wrapper`: mlx-lm's `TokenizerWrapper`. Raises `ModelNotLoadable` if it has no `tokenizers` backend."""
        self._wrapper = wrapper
        tokenizer = wrapper._tokenizer
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ModelNotLoadable(f"tokenizer {type(tokenizer).__name__} has no fast version, which stoker needs")
        self._tokenizer = tokenizer
        self._control = ControlTokens(tokenizer, chat_template_text(wrapper))
        self._forms = TemplateForms(self._apply, chat_template_text(wrapper))
        self._reserved = frozenset(inspect.signature(type(tokenizer).apply_chat_template).parameters) - {"documents"}
        self.eos_ids: frozenset[int] = frozenset(wrapper.eos_token_ids)  # the same as for mlx-lm
        self.max_token_bytes = _max_token_bytes(tokenizer)

    def fork(self) -> "ModelTokenizer":
        """A tokenizer that shares nothing with this one: encoding changes its settings for a moment."""
        return ModelTokenizer(copy.deepcopy(self._wrapper))

    def encode(self, text: str, *, special_start: bool) -> list[int]:
        bos = self._tokenizer.bos_token
        add = special_start and (bos is None or not text.startswith(bos))
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
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
        return self._control.encode(rendered)

    def rest_of(self, rendered: str, *, after: str) -> str | None:
        return self._control.rest_of(rendered, after)


def chat_template_text(wrapper: Any) -> str:
    """All chat templates of the model as one canonical text; empty if it has none."""
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
    """One line about a template's error: its type, its line, and the template's own part of its message.

    The rest of the message may quote the conversation, which must reach neither the log nor the job's failure in Redis.
    """
    lines = [n for frame, n in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    kind = type(error).__name__ + (f" in line {lines[-1]}" if lines else "")
    literals = [found[1] or found[2] or "" for found in _RAISED.finditer(template)]
    own = max((text for text in literals if str(error).startswith(text)), key=len, default="")
    if not own:
        return kind
    return f"{kind}: {' '.join(own.split())}" + ("" if own == str(error) else " ...")
