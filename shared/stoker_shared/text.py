"""Text that people read or write: one line for an error, without control characters and passwords; durations. Pure."""

import re
import unicodedata
from typing import Final

_NOT_SHOWN: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_JOINERS: Final = "\u200c\u200d"  # format characters, yet half of all emoji, and words of Persian, are built with them


def printable(text: str, *, lines: bool = False) -> str:
    r"""The text as a terminal may show it, with escapes such as ``\x1b`` in place of what is not shown.

    Other people's text must neither steer a terminal, with control characters of ASCII and of C1, nor change how the
    text around it is read, with marks of direction and invisible characters.

    Args:
        lines: line feeds and tabs stay.
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
    """The whole message with its white space folded."""
    return " ".join(str(error).split())


def refusal_line(error: BaseException) -> str:
    """The message of a Redis server that refused a client. If it wants a password, it names commands of its protocol,
    which nobody has given."""
    line = message_line(error)
    return _WITH_PASSWORD if _NO_PASSWORD.match(line) else line


MASK: Final = "***"


def mask_url(url: str) -> str:
    """The URL with its passwords masked, also where an unquoted one breaks it; masked as a whole if it is no URL."""
    if "://" not in url:
        return MASK
    without_query = re.sub(r"(?i)(password=)[^&]*", rf"\1{MASK}", url)
    return re.sub(r"(?s)(://[^:/@]*):.*@", rf"\1:{MASK}@", without_query)


def mask_text(text: str, password: object) -> str:
    """The text with the password masked: old servers quote the command they refuse, AUTH and its argument included."""
    return text.replace(str(password), MASK) if password else text


_UNITS_S: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_S: Final = 3650 * 86_400


def seconds_of(duration: str, *, needs_unit: bool = False) -> int:
    """The seconds of a duration as people write it: 90m, 12h, 30d.

    Args:
        needs_unit: whether a number alone, which means seconds, is refused.

    Raises:
        ValueError: it is no duration, 0, or longer than 3650 days.
    """
    found = re.fullmatch("([0-9]{1,9})([smhd]?)", duration)
    seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if found is None or (needs_unit and not found[2]) or not 0 < seconds <= _LONGEST_S:
        raise ValueError("expected a number and a unit, as in 90m, 12h or 7d; 3650d at the most")
    return seconds
