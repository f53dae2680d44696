"""Control tokens in a rendered conversation: tells the template's own from text that only looks like them.

Owns the escaping and the encoding of escaped text; rendering and ordinary encoding are `tokenizer.py`'s. Not
thread-safe.

A message that quotes ``<|im_end|>`` must not end its turn. Before rendering, every control token in text that is not
the model's own is replaced by two private-use characters: `_ESCAPE` and a stand-in for the token. `_ESCAPE` itself is
doubled. The template's own text stays as it is. Equal texts have equal escapes, so that a rendered history is still a
string prefix of the rendered conversation.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stoker_shared.errors import TemplateError

_ESCAPE: Final = "\U0010fffd"
_FIRST: Final = 0x100000
"""Code point of the first control token's stand-in; the plane has room for 65,000."""


class ControlTokens:
    """The control tokens of one tokenizer.

    Control tokens are the special ones, and those added tokens that the chat template mentions (``<tool_response>``
    is not special in Qwen's vocabulary, yet only the template should write it).
    """

    def __init__(self, tokenizer: Any, chat_template: str) -> None:
        """
        Args:
            tokenizer: a `transformers` tokenizer with a `tokenizers` backend.
            chat_template: all templates of the model, as one text.
        """
        self._tokenizer = tokenizer
        self._contents: Sequence[str] = tuple(
            token.content
            for _, token in sorted(tokenizer.added_tokens_decoder.items())
            if token.special or (token.content in chat_template and not token.content.isspace())
        )
        self._stand_ins = {content: chr(_FIRST + index) for index, content in enumerate(self._contents)}
        longest_first = sorted(self._contents, key=len, reverse=True)  # as tokenizers match them
        tokens = "|".join(re.escape(content) for content in longest_first)
        self._in_text = re.compile(f"{_ESCAPE}|{tokens}" if tokens else _ESCAPE)
        self._in_rendered = re.compile(f"{_ESCAPE}(.)|{tokens}" if tokens else f"{_ESCAPE}(.)", re.DOTALL)
        self._marked: _MarkedTokenizer | None = None

    def escape(self, value: Any, *, own_words: bool = False) -> Any:
        """`value` with every string in it, at any depth, escaped; dict keys too.

        Args:
            own_words: the text is the model's own, so its control tokens stay control tokens.
        """
        if isinstance(value, str):
            if own_words:
                return value.replace(_ESCAPE, _ESCAPE * 2)
            return self._in_text.sub(lambda found: _ESCAPE + self._stand_ins.get(found[0], _ESCAPE), value)
        if isinstance(value, Mapping):
            return {
                self.escape(key, own_words=own_words): self.escape(item, own_words=own_words)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.escape(item, own_words=own_words) for item in value]
        return value

    def unescape(self, rendered: str) -> str:
        """The text without its escapes."""
        return self._in_rendered.sub(lambda found: self._literal(found) or found[0], rendered)

    def rest_of(self, rendered: str, after: str) -> str | None:
        """The part of the escaped text after the plain text `after`.

        ``None`` when the text does not begin with `after`, or when `after` ends inside a control token, quoted or real:
        its two halves cannot be encoded apart.
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
        """Token ids of an escaped text, nothing added: the tokenizer's own where nothing had to be escaped.

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
        """The text of an escape; ``None`` for a control token of the template's own."""
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

    One pass over the whole text keeps everything else as it is, such as spaces swallowed around tokens and prefixes at
    the start of a text; encoding piece by piece would not. The mark is random, so no text can contain it.
    """

    def __init__(self, tokenizer: Any, contents: Sequence[str]) -> None:
        from tokenizers import AddedToken, Tokenizer

        self.mark = "".join(chr(0xF100 + byte) for byte in secrets.token_bytes(8))
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state["added_tokens"] = []
        self._backend = Tokenizer.from_str(json.dumps(state))
        control = set(contents)
        self._true_ids: dict[int, int] = {}
        for true_id, token in sorted(tokenizer.added_tokens_decoder.items()):
            content = self.mark + token.content if token.content in control else token.content
            flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            self._backend.add_tokens([AddedToken(content, special=False, **flags)])
            marked_id: Any = self._backend.token_to_id(content)
            self._true_ids[marked_id] = true_id
        self._control_ids = {tokenizer.convert_tokens_to_ids(content) for content in contents} - set(self._true_ids)

    def encode(self, text: str) -> list[int]:
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if not self._control_ids.isdisjoint(ids):
            raise TemplateError("a message quotes a control token that this tokenizer cannot write as plain text")
        return [self._true_ids.get(token_id, token_id) for token_id in ids]
