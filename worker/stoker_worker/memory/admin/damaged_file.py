"""Reads a damaged SQLite database page by page: no index, no inner page and no checksum of its log has to be right.

Owns as much of SQLite's file format as that needs (https://sqlite.org/fileformat2.html). The caller checks every row:
what is read here may be damaged. Reads only; the files must not change meanwhile.
"""

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

PAGE: Final = 4096
_WAL_HEADER: Final = 32
_FRAME: Final = 24 + PAGE
_TABLE_LEAF, _TABLE_INNER, _INDEX_LEAF, _INDEX_INNER = 0x0D, 0x05, 0x0A, 0x02
_MOST_LOCAL: Final = {_TABLE_LEAF: PAGE - 35, _INDEX_LEAF: (PAGE - 12) * 64 // 255 - 23}
_LEAST_LOCAL: Final = (PAGE - 12) * 32 // 255 - 23
_INT_SIZES: Final = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}


@dataclass(frozen=True)
class Row:
    """A row as it lies in a page.

    Attributes:
        number: its rowid; ``None`` in an index, and in a table without rowids.
        values: `int`, `float`, `str`, `bytes`, ``None``.
    """

    number: int | None
    values: tuple[Any, ...]


class DamagedFile:
    """A database and its log.

    Attributes:
        bad_frames: frames of the log, before its last commit, that are not as they were written.
    """

    def __init__(self, path: Path, *, whole_log: bool) -> None:
        """
        Args:
            whole_log: also what comes after the first bad frame of the log, which SQLite leaves out.

        Raises:
            OSError: a file cannot be read.
        """
        self.bad_frames = 0
        self._file = _mapped(path)
        log = path.with_name(f"{path.name}-wal")
        self._log = log.read_bytes() if log.exists() else b""
        self._in_log: dict[int, int] = {}
        self.n_pages = len(self._file) // PAGE
        self._read_log(whole_log)

    def rows(self, roots: Iterable[int]) -> Iterator[Row]:
        """Every row of every table and index that can be read, each at least once.

        Args:
            roots: the first page of each table and index. Needed where the list of free pages is damaged: a free page
                still has rows, which were deleted.
        """
        free = self._free_pages()
        if free is None:
            yield from self.rows_below(roots)
            return
        for number in range(1, self.n_pages + 1):
            if number not in free:
                yield from self.rows_in(number)

    def rows_below(self, roots: Iterable[int]) -> Iterator[Row]:
        """Every row of these tables and indexes, as far as their inner pages can be read."""
        seen: set[int] = set()
        waiting = list(roots)
        while waiting:
            number = waiting.pop()
            if number not in seen and 0 < number <= self.n_pages:
                seen.add(number)
                yield from self.rows_in(number)
                waiting += self._children(number)

    def _page(self, number: int) -> bytes:
        """Zeros if it is not there."""
        at = self._in_log.get(number)
        if at is not None:
            return bytes(self._log[at : at + PAGE])
        return bytes(self._file[(number - 1) * PAGE : number * PAGE]).ljust(PAGE, b"\0")

    def _read_log(self, whole: bool) -> None:
        order = "<u4" if self._log[:4] != b"\x37\x7f\x06\x83" else ">u4"
        salt, seed = self._log[16:24], _words(self._log[24:32], ">u4")
        if _add(self._log[:24], order, (0, 0)) != seed and not whole:
            return
        if whole and len(self._log) > _WAL_HEADER + 16:
            salt = max(salt, self._log[_WAL_HEADER + 8 : _WAL_HEADER + 16], key=self._log.count)
        pages: dict[int, int] = {}
        bad = 0
        for at in range(_WAL_HEADER, len(self._log) - _FRAME + 1, _FRAME):
            header, data = self._log[at : at + 24], self._log[at + 24 : at + _FRAME]
            written = _words(header[16:], ">u4")
            is_right = header[8:16] == salt and _add(data, order, _add(header[:8], order, seed)) == written
            if not is_right and not whole:
                break
            # The seed of the next frame is the checksum that this one names: one bad frame does not hide the others.
            bad, seed = bad + (not is_right), written
            number, n_pages = _words(header[:8], ">u4")
            if header[8:16] == salt:
                pages[number] = at + 24
                if n_pages:  # the last frame of a transaction
                    self._in_log.update(pages)
                    self.n_pages, self.bad_frames, pages = n_pages, bad, {}

    def _free_pages(self) -> set[int] | None:
        """``None``: the list of them is damaged."""
        header = self._page(1)
        trunk, n_free = _words(header[32:40], ">u4")
        free: set[int] = set()
        n_listed = 0
        while trunk:
            if n_listed >= n_free or trunk > self.n_pages or n_free > self.n_pages:
                return None
            page = self._page(trunk)
            following, n_leaves = _words(page[:8], ">u4")
            leaves = _words(page[8 : 8 + 4 * n_leaves], ">u4")
            free.update((trunk, *leaves))
            n_listed += 1 + n_leaves
            trunk = following
        is_whole = len(free) == n_listed == n_free and all(1 < number <= self.n_pages for number in free)
        return free if is_whole else None

    def _children(self, number: int) -> list[int]:
        kind, page, cells = self._cells(number)
        if kind not in (_TABLE_INNER, _INDEX_INNER):
            return []
        start = 100 if number == 1 else 0
        return [*_words(page[start + 8 : start + 12], ">u4"), *(_words(page[at : at + 4], ">u4")[0] for at in cells)]

    def _cells(self, number: int) -> tuple[int, bytes, list[int]]:
        """The kind of the page, the page, and where its cells begin."""
        page, start = self._page(number), 100 if number == 1 else 0
        kind = page[start]
        first = start + (12 if kind in (_TABLE_INNER, _INDEX_INNER) else 8)
        n_cells = int.from_bytes(page[start + 3 : start + 5], "big")
        at = np.frombuffer(page, ">u2", min(n_cells, (PAGE - first) // 2), first).tolist()
        return kind, page, [x for x in at if x <= PAGE - 4]

    def rows_in(self, number: int) -> Iterator[Row]:
        """Every row that can be read in one page."""
        kind, page, cells = self._cells(number)
        if kind not in (_TABLE_LEAF, _INDEX_LEAF, _INDEX_INNER):
            return
        for cell in cells:
            try:
                size, at = _varint(page, cell + (4 if kind == _INDEX_INNER else 0))
                row_number = None
                if kind == _TABLE_LEAF:
                    row_number, at = _varint(page, at)
                yield Row(row_number, _values(self._payload(page, kind, at, size)))
            except (ValueError, IndexError):
                continue

    def _payload(self, page: bytes, kind: int, at: int, size: int) -> bytes:
        """The content of a cell, and what follows on overflow pages. Raises `ValueError`, `IndexError`."""
        most = _MOST_LOCAL[_TABLE_LEAF if kind == _TABLE_LEAF else _INDEX_LEAF]
        if size <= most:
            return page[at : at + size]
        if size > self.n_pages * PAGE:
            raise ValueError("longer than the file")
        local = _LEAST_LOCAL + (size - _LEAST_LOCAL) % (PAGE - 4)
        local = local if local <= most else _LEAST_LOCAL
        parts, left = [page[at : at + local]], size - local
        following = _words(page[at + local : at + local + 4], ">u4")[0]
        while left > 0:
            if not 1 < following <= self.n_pages:
                raise ValueError("the rest is missing")
            page = self._page(following)
            parts.append(page[4 : 4 + left])
            left -= PAGE - 4
            following = _words(page[:4], ">u4")[0]
        return b"".join(parts)


def _mapped(path: Path) -> "mmap.mmap | bytes":
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""


def _words(data: bytes, order: str) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, order, len(data) // 4).tolist())


def _add(data: bytes, order: str, seed: Sequence[int]) -> tuple[int, ...]:
    """The checksum of the log, continued."""
    if len(seed) != 2:
        return ()
    one, two = seed
    words = _words(data, order)
    for first, second in zip(words[::2], words[1::2], strict=True):
        one = (one + first + two) & 0xFFFFFFFF
        two = (two + second + one) & 0xFFFFFFFF
    return one, two


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number and where it ends. Raises `IndexError`."""
    value = 0
    for index in range(9):
        byte = data[at + index]
        if index == 8:
            value = value << 8 | byte
        else:
            value = value << 7 | byte & 0x7F
            if byte < 0x80:
                break
    return value - (value >> 63 << 64), at + index + 1


def _values(payload: bytes) -> tuple[Any, ...]:
    """The columns of a row. Raises `ValueError`, `IndexError`."""
    body, at = _varint(payload, 0)
    values: list[Any] = []
    end = body
    while at < end:
        kind, at = _varint(payload, at)
        size = (kind - 12) // 2 if kind >= 12 else 8 if kind == 7 else _INT_SIZES.get(kind, 0)
        data = payload[body : body + size]
        if len(data) < size or kind < 0:
            raise ValueError("cut short")
        body += size
        if kind == 7:
            values.append(float(np.frombuffer(data, ">f8")[0]))
        elif kind < 12:
            values.append(
                None if kind == 0 else kind - 8 if kind in (8, 9) else int.from_bytes(data, "big", signed=True)
            )
        else:
            values.append(data.decode() if kind % 2 else data)
    return tuple(values)
