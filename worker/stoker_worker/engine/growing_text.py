"""The text of a growing sequence of tokens, as far as it is whole characters. Owns one sequence's text; no MLX.

Tokens are decoded as they come, so the work per token does not grow with the text.
"""

from collections.abc import Sequence
from typing import Final

from stoker_worker.ports import TokenizerPort

_INCOMPLETE: Final = "\ufffd"

_MOST_BEFORE_LAST: Final = 3
"""Tokens that may wait for the last byte of their character: UTF-8 has at most four bytes."""


class GrowingText:
    """Takes token ids. Characters may cross token borders: one counts as soon as its last byte is there.

    Attributes:
        text: all whole characters so far.
        n_tokens: tokens taken so far.
    """

    def __init__(self, tokenizer: TokenizerPort) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._decoded_from = 0  # earlier ids only give context: a tokenizer's first token may lose its space
        self._read_to = 0
        self.text = ""

    @property
    def n_tokens(self) -> int:
        return len(self._ids)

    @property
    def n_read(self) -> int:
        """How many of the tokens have their text in `text`."""
        return self._read_to

    def decoded(self, start: int, stop: int) -> str:
        """The text of the tokens [start, stop) by themselves."""
        return self._tokenizer.decode(self._ids[start:stop])

    def add(self, token_ids: Sequence[int], *, is_end: bool = False) -> bool:
        """Take more tokens; ``True`` when the text has grown.

        Args:
            is_end: whether none will follow, so an incomplete character at the end is text as well.
        """
        self._ids += token_ids
        context = self.decoded(self._decoded_from, self._read_to)
        grown, read_to = self.decoded(self._decoded_from, self.n_tokens), self.n_tokens
        if grown.endswith(_INCOMPLETE) and not is_end:
            read_to = max(self._read_to, read_to - _MOST_BEFORE_LAST)
            settled = self.decoded(self._decoded_from, read_to)
            grown = settled if grown.startswith(settled) else ""
        if len(grown) <= len(context):
            return False
        self.text += grown[len(context) :]
        self._decoded_from, self._read_to = self._read_to, read_to
        return True
