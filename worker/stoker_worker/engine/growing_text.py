"""The text of a growing sequence of tokens, as far as it is whole characters. Owns one row's text; no MLX.

Tokens are decoded as they come, so the work per token does not grow with the text.
"""

from collections.abc import Sequence

from stoker_worker.ports import TextCodec

_INCOMPLETE = "\ufffd"


class GrowingText:
    """Feed it token ids. Characters may cross token borders: text counts from the moment its last byte is there.

    Attributes:
        text: all whole characters so far.
        n_tokens: how many tokens it was fed.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._decoded_from = 0  # ids before this only serve as context: a tokenizer's first token may lose its space
        self._read_to = 0
        self.text = ""

    @property
    def n_tokens(self) -> int:
        return len(self._ids)

    def add(self, token_ids: Sequence[int]) -> bool:
        """Take more tokens; whether the text has grown."""
        if not token_ids:
            return False
        self._ids += token_ids
        context = self._codec.decode(self._ids[self._decoded_from : self._read_to])
        grown = self._codec.decode(self._ids[self._decoded_from :])
        if len(grown) <= len(context) or grown.endswith(_INCOMPLETE):
            return False
        self.text += grown[len(context) :]
        self._decoded_from, self._read_to = self._read_to, len(self._ids)
        return True
