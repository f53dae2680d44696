"""Reads and writes many pieces of memory as one file, a megabyte with each system call. Any thread; knows no format.

A call for each piece costs more than the copy of its bytes, and joining the pieces first costs another copy.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Final

_AT_ONCE_BYTES: Final = 1 << 20
"""Few enough to be still in the processor's cache when the caller looks at them."""
_MOST_PIECES: Final = 256
"""Every system allows at least 1024 in one call."""


def write_all(file: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Write the pieces one after the other. Raises `OSError`."""
    for part in in_parts(pieces):
        missing = part
        while missing:
            missing = _behind(missing, os.writev(file, missing))


def fill(file: int, targets: list[memoryview]) -> bool:
    """Read until the targets, one part of `in_parts`, are full; false when the file ends first. Raises `OSError`."""
    missing = targets
    while missing:
        n_read = os.readv(file, missing)
        if n_read == 0:
            return False
        missing = _behind(missing, n_read)
    return True


def in_parts(pieces: Iterable[bytes | memoryview]) -> Iterator[list[memoryview]]:
    """The same memory in the same order, without empty pieces, in parts for one system call."""
    part: list[memoryview] = []
    room = _AT_ONCE_BYTES
    for stretch in _stretches(pieces):
        if part and (len(stretch) > room or len(part) == _MOST_PIECES):
            yield part
            part, room = [], _AT_ONCE_BYTES
        part.append(stretch)
        room -= len(stretch)
    if part:
        yield part


def _stretches(pieces: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        view = memoryview(piece)
        yield from (view[at : at + _AT_ONCE_BYTES] for at in range(0, len(view), _AT_ONCE_BYTES))


def _behind(pieces: list[memoryview], n_bytes: int) -> list[memoryview]:
    """The memory behind the first `n_bytes`: a signal, or a file system, may end a call early."""
    for index, piece in enumerate(pieces):
        if n_bytes < len(piece):
            return [piece[n_bytes:], *pieces[index + 1 :]]
        n_bytes -= len(piece)
    return []
