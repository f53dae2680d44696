"""Why lines of a batch failed: counted by kind, with the first of each kind in words. Pure."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

_MAX_KINDS: Final = 50
_HINTS: Final[Mapping[str, str]] = {"model_not_found": "--any-model, or --model-alias THEIRS=OURS, runs such lines"}


class Causes:
    """
    Attributes:
        counts: failed lines by kind: the code of the answer's error, or the name of the worker's.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._news: list[str] = []

    def note(self, number: int, answer: Mapping[str, Any]) -> None:
        """One more line that failed."""
        error = answer["error"] or answer["response"]["body"]["error"]
        message = str(error["message"]).removeprefix(f"line {number}: ")
        kind = error["code"] or message.partition(":")[0]
        if kind not in self.counts:
            kind = kind if len(self.counts) < _MAX_KINDS else "other"
            hint = f" ({_HINTS[kind]})" if kind in _HINTS else ""
            self._news.append(f"line {number:,} failed: {message}{hint}")
        self.counts[kind] += 1

    def take_news(self) -> list[str]:
        """The first line of each kind that has come up since the last call."""
        news, self._news = self._news, []
        return news

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {kind}" for kind, count in self.counts.most_common())
