"""Data that anyone may have written: unpacks what RQ compressed, and reads JSON, both within limits. No I/O.

The limits are checked before any value is built. A text of 8 MiB can have four million values: Python needs gigabytes
and minutes to build and check them, and blocks all other threads, including the one that renews a worker's lease.
"""

import json
import math
import zlib
from typing import Any, Final

from stoker_shared.errors import RequestTooLarge
from stoker_shared.wire import MAX_REQUEST_BYTES

MAX_DATA_BYTES: Final = MAX_REQUEST_BYTES + 4096
"""The request plus RQ's frame around it, uncompressed."""

MAX_RESULT_BYTES: Final = 2**29
"""Redis's own limit for one value, so also that of a result without compression."""

MAX_REASON_BYTES: Final = 2**20
"""Limit for the text of a failure, which can be a traceback."""


def unpacked(data: bytes, at_most: int = MAX_DATA_BYTES) -> bytes:
    """The data uncompressed, cut off one byte over the limit: a kilobyte may unpack to a megabyte. Data that is not a
    complete zlib stream is returned as it is, because clients in other languages need not compress."""
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(data, at_most + 1)
    except zlib.error:
        return bytes(data[: at_most + 1])
    is_whole = unpacking.eof or len(text) > at_most
    return text if is_whole else bytes(data[: at_most + 1])


MOST_VALUES: Final = 200_000
"""All values in one text: numbers, strings, objects, arrays. A turn with a tool call has about 15."""

MOST_LEVELS: Final = 100
"""Nested objects and arrays."""

MOST_DIGITS: Final = 400
"""The longest integer: the time to read and to write one grows with the square of its length."""

_BRACKETS: Final = b"[]{}"
_NO_BRACKETS: Final = bytes(set(range(256)) - set(_BRACKETS))


def read_json(text: bytes, at_most: int = MAX_REQUEST_BYTES, *, is_echoed: bool = False) -> Any:
    """The value of a JSON text in UTF-8, with or without a byte order mark.

    Args:
        is_echoed: parts of it will be written as JSON again, so all its numbers must be finite.

    Raises:
        RequestTooLarge: it has more than `at_most` bytes, `MOST_VALUES` values or `MOST_LEVELS` levels, or an integer
            of more than `MOST_DIGITS` digits, or with `is_echoed` a number that no double holds.
        ValueError: it is not JSON.
    """
    require_bounds(text, at_most)
    strict: dict[str, Any] = {"parse_float": _finite, "parse_constant": refuse_constant} if is_echoed else {}
    return json.loads(text.decode("utf-8-sig"), parse_int=_integer, **strict)


def is_within_bounds(text: bytes) -> bool:
    """True if `require_bounds` accepts it."""
    try:
        require_bounds(text)
    except RequestTooLarge:
        return False
    return True


def require_bounds(text: bytes, at_most: int = MAX_REQUEST_BYTES) -> None:
    """Raises `RequestTooLarge` as `read_json` does, except for digits. Text that is not JSON may pass."""
    if len(text) > at_most:
        raise RequestTooLarge(f"the request is {len(text)} bytes of JSON, the limit is {at_most}")
    if _n_values(text) <= MOST_LEVELS:  # a quick check that nearly all texts without tool calls pass
        return
    # The text may be hostile: use only `bytes` methods that take time in proportion to it.
    text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    n_strings = text.count(b'"') // 2
    if n_strings <= 2 * MOST_VALUES:  # keys are strings too
        text = b"".join(text.split(b'"')[::2])  # the text outside of strings
        if _n_values(text) <= MOST_VALUES:
            _require_levels(text.translate(None, _NO_BRACKETS))
            return
    raise RequestTooLarge(f"the request has more than {MOST_VALUES} values")


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise RequestTooLarge(f"the request has a number of {len(digits)} digits, the limit is {MOST_DIGITS}")
    return int(digits)


def _finite(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise RequestTooLarge(f"the request has the number {digits[:MOST_DIGITS]}, which no double holds")
    return value


def refuse_constant(constant: str) -> None:
    """For `parse_constant` of `json.loads`. Raises `ValueError`: NaN and infinities are not JSON."""
    raise ValueError(f"{constant} is not JSON")


def _n_values(text: bytes) -> int:
    """An upper bound: each value but the first follows a comma or opens its array or object."""
    return 1 + text.count(b",") + text.count(b"[") + text.count(b"{")


def _require_levels(brackets: bytes) -> None:
    for _ in range(MOST_LEVELS):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")  # the innermost level
    if brackets:
        raise RequestTooLarge(f"the request has more than {MOST_LEVELS} levels of objects and arrays")
