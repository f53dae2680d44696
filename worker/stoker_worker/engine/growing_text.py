"""The text of a growing sequence of tokens, as far as it is whole characters. Owns one sequence's text; no MLX.

Tokens are decoded as they come, so the work per token does not grow with the text.
"""

from collections.abc import Sequence

from stoker_worker.ports import TokenizerPort

_INCOMPLETE = "\ufffd"


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

    def add(self, token_ids: Sequence[int]) -> bool:
        """Take more tokens; ``True`` when the text has grown."""
        if not token_ids:
            return False
        self._ids += token_ids
        context = self._tokenizer.decode(self._ids[self._decoded_from : self._read_to])
        grown = self._tokenizer.decode(self._ids[self._decoded_from :])
        if len(grown) <= len(context) or grown.endswith(_INCOMPLETE):
            return False
        self.text += grown[len(context) :]
        self._decoded_from, self._read_to = self._read_to, len(self._ids)
        return True
