"""Text as a terminal may show it. Pure; any thread.

Other people's text must neither steer a terminal, with control characters of ASCII and of C1, nor change how the text
around it is read, with marks of direction and invisible characters.
"""

import unicodedata
from typing import Final

_NOT_SHOWN: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_JOINERS: Final = "\u200c\u200d"  # format characters, yet half of all emoji, and words of Persian, are built with them


def printable(text: str, *, lines: bool = False) -> str:
    r"""The text with escapes such as ``\x1b`` in place of what is not shown.

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
