"""How much room rows get, and which of them share it. Pure: numbers only.

A row's price (`kv_cost.py`) covers the most that these numbers let it take.
"""

from typing import Final

MOST_SHARED_TOKENS: Final = 256
"""A longer row joins no other: copying it, when it comes and when it goes, costs more than the wider updates save. A
group that grows to twice as much is dissolved."""

MOST_APART: Final = 64
"""Most tokens by which the rows of a group differ in length when they join: the shorter ones waste as many."""

_STEP_TOKENS: Final = 64
_LONG_TOKENS: Final = 2 * MOST_SHARED_TOKENS
_LONG_STEP_TOKENS: Final = 256
"""A long row grows by more at a time: growing copies it."""

GROW_STEPS: Final = 32
"""A row alone grows in so many steps, a part of its layers in each."""

SPARE_SHARE: Final = 8
"""A group has at most one spare place for so many rows, so that a row that joins after another left is copied alone."""


def room_for(n_tokens: int, n_left: int, *, is_shared: bool) -> int:
    """Tokens of room for a row of `n_tokens` that may generate `n_left` more; it may have to grow later."""
    step = _STEP_TOKENS if is_shared or n_tokens <= _LONG_TOKENS else _LONG_STEP_TOKENS
    return -(-(n_tokens + min(n_left, step)) // step) * step


def most_room(n_tokens: int) -> int:
    """Most tokens of room that a row of `n_tokens` takes, its share of spare places included."""
    if n_tokens > _LONG_TOKENS:
        return n_tokens + 2 * _LONG_STEP_TOKENS
    place = n_tokens + MOST_APART + 2 * _STEP_TOKENS
    return place + -(-place // SPARE_SHARE)
