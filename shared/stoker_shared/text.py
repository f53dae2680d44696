"""Text that people read or write: one line for an error, without control characters and passwords; durations. Pure."""

import re
import unicodedata
from typing import Final

_NOT_SHOWN: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_JOINERS: Final = "\u200c\u200d"  # format characters, but half of all emoji, and Persian words, need them


def printable(text: str, *, lines: bool = False) -> str:
    r"""The text as a terminal may show it: characters that are not shown become escapes such as ``\x1b``.

    Foreign text must not control a terminal (ASCII and C1 control characters), nor change how the text around it reads
    (marks of direction, invisible characters).

    Args:
        lines: keep line feeds and tabs.
    """
    if text.isprintable():
        return text
    kept = _JOINERS + "\n\t" if lines else _JOINERS
    return "".join(
        ascii(character)[1:-1] if unicodedata.category(character) in _NOT_SHOWN and character not in kept else character
        for character in text
    )


_NO_PASSWORD: Final = re.compile(r"(NOAUTH )?(HELLO must be called|Authentication required)")
_WITH_PASSWORD: Final = (
    "it needs a password, as in redis://:PASSWORD@HOST; the URL of an embedded server is in ~/.stoker/redis.url"
)
_MOST_CHARACTERS: Final = 300
"""Some libraries quote their whole input, as chat templates quote the conversation."""


def one_line(error: BaseException) -> str:
    """``ErrorName: message`` in at most 300 characters, for errors of other libraries."""
    return f"{type(error).__name__}: {message_line(error) or 'no reason given'}"[:_MOST_CHARACTERS]


def message_line(error: BaseException) -> str:
    """The complete message, with its white space folded."""
    return " ".join(str(error).split())


def refusal_line(error: BaseException) -> str:
    """The message of a Redis server that refused a client. A demand for a password is replaced: the server's text names
    protocol commands that the user never typed."""
    line = message_line(error)
    return _WITH_PASSWORD if _NO_PASSWORD.match(line) else line


MASK: Final = "***"


def mask_url(url: str) -> str:
    """The URL with its passwords masked, even if an unquoted one makes the URL malformed; all of it if it is no URL."""
    if "://" not in url:
        return MASK
    without_query = re.sub(r"(?i)(password=)[^&]*", rf"\1{MASK}", url)
    return re.sub(r"(?s)(://[^:/@]*):.*@", rf"\1:{MASK}@", without_query)


def mask_text(text: str, password: object) -> str:
    """The text with the password masked: old servers quote the refused command, AUTH with its argument."""
    return text.replace(str(password), MASK) if password else text


_UNITS_S: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_S: Final = 3650 * 86_400


def seconds_of(duration: str, *, needs_unit: bool = False) -> int:
    """The seconds of a duration such as 90m, 12h or 30d. A number alone means seconds; `needs_unit` refuses it. Raises
    `ValueError`: it is not a duration, 0, or longer than 3650 days."""
    found = re.fullmatch("([0-9]{1,9})([smhd]?)", duration)
    seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if found is None or (needs_unit and not found[2]) or not 0 < seconds <= _LONGEST_S:
        raise ValueError("expected a number and a unit, as in 90m, 12h or 7d; 3650d at the most")
    return seconds
