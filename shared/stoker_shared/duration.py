"""Durations as people write them: 90m, 12h, 30d. Pure."""

import re
from typing import Final

_UNITS_S: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_MOST_S: Final = 3650 * 86_400


def seconds_of(duration: str, *, needs_unit: bool = False) -> int:
    """
    Args:
        needs_unit: whether a number alone, which means seconds, is refused.

    Raises:
        ValueError: it is no duration, 0, or longer than 3650 days.
    """
    found = re.fullmatch("([0-9]{1,9})([smhd]?)", duration)
    seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if found is None or (needs_unit and not found[2]) or not 0 < seconds <= _MOST_S:
        raise ValueError("expected a number and a unit, as in 90m, 12h or 7d; 3650d at the most")
    return seconds
