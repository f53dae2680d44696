"""Finds the first stop string in a growing sequence of tokens. Owns one row's text so far; no MLX.

Tokens are decoded a few at a time, so the work per token does not grow with the text. Stop strings may cross token
borders and characters may cross token borders: text counts from the moment its last byte is there.
"""

from collections.abc import Sequence

from stoker_worker.ports import TextCodec

_INCOMPLETE = "\ufffd"


class StopScanner:
    """Feed it token ids; it says when a stop string stands in their text, and where to cut."""

    def __init__(self, codec: TextCodec, stops: Sequence[str]) -> None:
        self._codec = codec
        self._stops = tuple(stops)
        self._overlap = max(len(stop) for stop in stops) - 1
        self._ids: list[int] = []
        self._decoded_from = 0  # ids before this only serve as context: a tokenizer's first token may lose its space
        self._read_to = 0
        self._text = ""
        self._boundaries: list[tuple[int, int]] = [(0, 0)]  # (tokens, characters) at every whole-character point
        self._cut: int | None = None

    def add(self, token_id: int) -> bool:
        """Take one more token; ``True`` once a stop string is complete."""
        self._ids.append(token_id)
        context = self._codec.decode(self._ids[self._decoded_from : self._read_to])
        grown = self._codec.decode(self._ids[self._decoded_from :])
        if len(grown) <= len(context) or grown.endswith(_INCOMPLETE):
            return False
        search_from = max(0, len(self._text) - self._overlap)
        self._text += grown[len(context) :]
        self._decoded_from, self._read_to = self._read_to, len(self._ids)
        self._boundaries.append((len(self._ids), len(self._text)))
        found = [at for stop in self._stops if (at := self._text.find(stop, search_from)) >= 0]
        self._cut = min(found, default=None)
        return self._cut is not None

    def cut(self) -> tuple[str, int, str]:
        """After `add` said ``True``.

        Returns:
            the text before the stop string; how many tokens lie wholly inside it; the rest of it that those tokens do
            not cover.
        """
        if self._cut is None:
            raise ValueError("no stop string has been found")
        text = self._text[: self._cut]
        kept, characters = next(pair for pair in reversed(self._boundaries) if pair[1] <= self._cut)
        return text, kept, text[characters:]
