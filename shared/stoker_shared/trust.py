"""How far a model is trusted with a class of tasks: the class, the counts of verdicts and a lower bound. Pure.

Both sides use it. Redis keeps the counts (`TRUST_KEY`); workers add to them with a script that computes the same. A
caller that knows its tasks names the class, with `task`; otherwise a few features of the request make the class.
"""

import math
import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import Final, Self

from stoker_shared.request import GenerationRequest

KEPT: Final = 0.99
"""A verdict weighs 1, times this with each later one. So the verdicts of a pair add up to 100 at most, and some dozens
of verdicts reveal a model that has become worse."""

MOST_PAIRS: Final = 10_000
"""Most pairs of a model and a class that are counted; producers read all of them twice a second."""

_LOOKED_AT: Final = 4000
"""Characters from the end of the input, where the task usually is."""

_LENGTHS: Final = ((2_000, "short"), (16_000, "medium"))
_CODE_SHARE: Final = 0.05
"""Share of characters that are common in code and rare in prose."""

_OF_CODE: Final = frozenset("{}[]()<>=;_#`\\|&*/")
_LANGUAGES: Final = {"HIRAGANA": "japanese", "KATAKANA": "japanese", "CJK": "chinese", "HANGUL": "korean"}

_Z: Final = 1.6448536269514722
"""Quantile of the normal distribution: the true rate is above the bound in 95 of 100 cases."""


@dataclass(frozen=True)
class Counts:
    """Weights of the accepted and of the rejected answers."""

    accepted: float = 0.0
    rejected: float = 0.0

    @classmethod
    def parsed(cls, value: bytes | None) -> Self:
        """The counts from their text in Redis; zero if it cannot be read."""
        try:
            accepted, rejected = map(float, (value or b"").decode().split(" "))
        except ValueError:
            return cls()
        if not math.isfinite(accepted + rejected) or min(accepted, rejected) < 0:
            return cls()
        return cls(accepted, rejected)

    def __str__(self) -> str:
        return f"{self.accepted:.4f} {self.rejected:.4f}"

    @property
    def total(self) -> float:
        return self.accepted + self.rejected

    @property
    def rate(self) -> float:
        """The share of accepted answers; 0 before the first verdict."""
        return self.accepted / self.total if self.total else 0.0

    def after(self, *, accepted: bool) -> "Counts":
        """The counts after one more verdict."""
        return Counts(self.accepted * KEPT + accepted, self.rejected * KEPT + (not accepted))

    def corrected(self, *, accepted: bool) -> "Counts":
        """With one verdict reversed, to `accepted`."""
        change = 1 if accepted else -1
        return Counts(max(0.0, self.accepted + change), max(0.0, self.rejected - change))

    def lower_bound(self) -> float:
        """Wilson's lower bound of the rate of acceptance; 0 before the first verdict."""
        n, z2 = self.total, _Z * _Z
        if n <= 0:
            return 0.0
        spread = _Z * math.sqrt(self.rate * self.rejected + z2 / 4)
        return max(0.0, (self.accepted + z2 / 2 - spread) / (n + z2))


def field_of(model: str, task: str) -> str:
    """The field of `TRUST_KEY` for a model and a class; the class contains no space."""
    return f"{task} {model}"


def model_and_task(field: str) -> tuple[str, str]:
    task, _, model = field.partition(" ")
    return model, task


def task_of(request: GenerationRequest) -> str:
    """The request's own `task`, else its features: length, form of the answer, whether there is code, script."""
    if request.task is not None:
        return request.task
    text = _input_of(request)
    end = text[-_LOOKED_AT:]
    length = next((name for limit, name in _LENGTHS if len(text) <= limit), "long")
    return "/".join(filter(None, (length, _form_of(request), "code" if _has_code(end) else "", _script_of(end))))


def _input_of(request: GenerationRequest) -> str:
    if request.prompt is not None:
        return request.prompt
    return "\n".join(message.content or "" for message in request.messages or () if message.role != "system")


def _form_of(request: GenerationRequest) -> str:
    if request.offered_tools:
        return "tools"
    has_form = request.is_formed or request.guide is not None
    return "schema" if has_form or (request.check is not None and request.check.json_schema is not None) else ""


def _has_code(text: str) -> bool:
    return sum(character in _OF_CODE for character in text) > _CODE_SHARE * len(text)


def _script_of(text: str) -> str:
    """The script of most letters, in lower case, or the language for those of East Asia; empty without letters.

    Kana count as ten letters: a Japanese text has more Chinese characters than kana.
    """
    found: Counter[str] = Counter()
    for letter, n_times in Counter(filter(str.isalpha, text)).items():
        script = unicodedata.name(letter, "").partition(" ")[0]
        name = _LANGUAGES.get(script, script.lower())
        found[name] += n_times * (10 if name == "japanese" else 1)
    return found.most_common(1)[0][0] if found else ""
