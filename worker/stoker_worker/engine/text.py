"""The text of a growing sequence of tokens, and the first stop string in it. Owns one sequence's text; no MLX.

Tokens are decoded as they come, so the work per token does not grow with the text. Stop strings and characters may
cross tokens.
"""

from collections.abc import Sequence
from typing import Final

from stoker_worker.ports import TokenizerPort

_INCOMPLETE: Final = "\ufffd"

_MOST_BEFORE_LAST: Final = 3
"""Tokens that may wait for the last byte of their character: UTF-8 has at most four bytes."""


class GrowingText:
    """Takes token ids, and counts a character as soon as its last byte is there.

    Attributes:
        text: all whole characters so far.
        n_read: the number of tokens whose text is in it.
    """

    def __init__(self, tokenizer: TokenizerPort) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._decoded_from = 0  # earlier ids only give context: a tokenizer's first token may lose its space
        self.n_read = 0
        self.text = ""

    @property
    def n_tokens(self) -> int:
        """Tokens taken so far."""
        return len(self._ids)

    def decoded(self, start: int, stop: int) -> str:
        """The text of the tokens [start, stop) by themselves."""
        return self._tokenizer.decode(self._ids[start:stop])

    def add(self, token_ids: Sequence[int], *, is_end: bool = False) -> bool:
        """Take more tokens; ``True`` if the text has grown. `is_end`: none follow, so a cut-off character counts."""
        self._ids += token_ids
        context = self.decoded(self._decoded_from, self.n_read)
        grown, read_to = self.decoded(self._decoded_from, self.n_tokens), self.n_tokens
        if grown.endswith(_INCOMPLETE) and not is_end:
            read_to = max(self.n_read, read_to - _MOST_BEFORE_LAST)
            settled = self.decoded(self._decoded_from, read_to)
            grown = settled if grown.startswith(settled) else ""
        if len(grown) <= len(context):
            return False
        self.text += grown[len(context) :]
        self._decoded_from, self.n_read = self.n_read, read_to
        return True


class StopScanner:
    """Takes token ids, and finds the first stop string in their text and the place to cut. `found` is that stop string.
    As at vLLM, one that the first `min_tokens` tokens complete does not count."""

    def __init__(self, tokenizer: TokenizerPort, stops: Sequence[str], *, min_tokens: int = 0) -> None:
        self._min_tokens = min_tokens
        self._growing = GrowingText(tokenizer)
        self._stops = tuple(stops)
        self._overlap = max(len(stop) for stop in stops) - 1
        self._boundaries: list[tuple[int, int]] = [(0, 0)]  # (tokens, characters) at every whole-character point
        self._cut: int | None = None
        self.found: str | None = None

    @property
    def text(self) -> str:
        """The text that later tokens cannot take back: without an end that may begin a stop string."""
        text = self._growing.text
        for length in range(min(self._overlap, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return text[:-length]
        return text

    def add(self, token_id: int) -> bool:
        """Take one more token; ``True`` if a stop string is complete."""
        return self._take([token_id])

    def end(self) -> bool:
        """No token follows; ``True`` if an incomplete character at the end completes a stop string (U+FFFD)."""
        return self._take([], is_end=True)

    def _take(self, token_ids: Sequence[int], *, is_end: bool = False) -> bool:
        n_before = len(self._growing.text)
        if not self._growing.add(token_ids, is_end=is_end):
            return False
        self._boundaries.append((self._growing.n_read, len(self._growing.text)))
        if self._growing.n_tokens <= self._min_tokens:
            return False
        # Each stop string is sought only where new text is part of it: an earlier occurrence did not count.
        ends = ((stop, max(0, n_before - len(stop) + 1)) for stop in self._stops)
        found = [(at, stop) for stop, start in ends if (at := self._growing.text.find(stop, start)) >= 0]
        self._cut, self.found = min(found, default=(None, None))
        return self.found is not None

    def cut(self) -> tuple[str, int, str]:
        """After `add` or `end` returned ``True``: the text before the stop string, the number of tokens wholly inside
        that text, and the rest of it after these tokens."""
        assert self._cut is not None
        text = self._growing.text[: self._cut]
        after = next(i for i, (_, characters) in enumerate(self._boundaries) if characters > self._cut)
        kept, characters = self._boundaries[after - 1]
        # Tokens without text, and bytes that no later one completed, have no boundary of their own.
        start = self._boundaries[max(0, after - 2)][0]
        context = self._growing.decoded(start, kept)
        for n_tokens in range(self._boundaries[after][0] - 1, kept, -1):
            decoded = self._growing.decoded(start, n_tokens)
            if decoded.startswith(context) and text.startswith(decoded[len(context) :], characters):
                return text, n_tokens, text[characters + len(decoded) - len(context) :]
        return text, kept, text[characters:]
