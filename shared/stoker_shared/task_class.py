"""The class of a task, under which the verdicts on a model's answers count. Pure; both sides use it.

A caller that knows its tasks better names the class itself, with `task`. Without it, the class is made of a few
features that can be read off the request.
"""

import unicodedata
from collections import Counter
from typing import Final

from stoker_shared.request import GenerationRequest

_LOOKED_AT: Final = 4000
"""Characters from the end of the input, where the task usually is."""

_LENGTHS: Final = ((2_000, "short"), (16_000, "medium"))
_CODE_SHARE: Final = 0.05
"""Share of characters that are common in code and rare in prose."""

_OF_CODE: Final = frozenset("{}[]()<>=;_#`\\|&*/")
_LANGUAGES: Final = {"HIRAGANA": "japanese", "KATAKANA": "japanese", "CJK": "chinese", "HANGUL": "korean"}


def task_of(request: GenerationRequest) -> str:
    """The request's own `task`, else its features: length, form of the answer, whether there is code, script."""
    if request.task is not None:
        return request.task
    text = _input_of(request)
    end = text[-_LOOKED_AT:]
    length = next((name for limit, name in _LENGTHS if len(text) <= limit), "long")
    return "/".join(filter(None, (length, _form_of(request), "code" if _has_code(end) else "", _script_of(end))))


def class_of_verdicts(request: GenerationRequest) -> str | None:
    """The class under which verdicts on the job's answers count; ``None`` if nobody is expected to give any."""
    is_judged = request.check is not None or bool(request.route) or request.task is not None
    return task_of(request) if is_judged else None


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
    """The script of most letters, or the language where a script has one name there; empty if there are no letters.

    Kana count as ten letters: a Japanese text has more Chinese characters than kana.
    """
    found: Counter[str] = Counter()
    for letter, n_times in Counter(filter(str.isalpha, text)).items():
        script = unicodedata.name(letter, "").partition(" ")[0]
        name = _LANGUAGES.get(script, script.lower())
        found[name] += n_times * (10 if name == "japanese" else 1)
    return found.most_common(1)[0][0] if found else ""
