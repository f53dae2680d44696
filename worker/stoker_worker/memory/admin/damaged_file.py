"""Reads a damaged SQLite database page by page: no index, no inner page and no checksum of its log has to be right.

Owns as much of SQLite's file format as that needs (https://sqlite.org/fileformat2.html). The caller checks every row,
which may be damaged. Deleted rows are gone: `secure_delete` overwrites them. Reads only, files that must not change.
What the disk refuses to read counts as zeros.
"""

import os
import struct
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final
from weakref import finalize

PAGE: Final = 4096
_TABLE_LEAF, _INDEX_LEAF, _INDEX_INNER = 0x0D, 0x0A, 0x02
_LEAST_LOCAL: Final = (PAGE - 12) * 32 // 255 - 23
_SIZES: Final = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0)
"""Bytes of a value, by its kind, unless it is a text or a blob."""
_LOG_HEADER: Final = 32
_LOG_CHECKSUM: Final = struct.Struct(">II")
_FRAME_HEADER: Final = struct.Struct(">II8sII")
_FRAME: Final = _FRAME_HEADER.size + PAGE

Row = tuple[int | None, tuple[Any, ...]]
"""The rowid (``None`` in an index, or a table without rowids), and the columns: int, float, str, bytes or ``None``."""


class DamagedFile:
    """A database and its log. `bad_frames`: damaged frames of the log before its last commit."""

    def __init__(self, path: Path, *, whole_log: bool) -> None:
        """`whole_log`: also read the first bad frame of the log and all after it, which SQLite leaves out. Raises
        `OSError`: a file cannot be opened."""
        self.bad_frames = 0
        self._file = os.open(path, os.O_RDONLY)
        finalize(self, os.close, self._file)
        self._n_pages = -(-os.fstat(self._file).st_size // PAGE)  # the last one may be cut short
        self._log = _content(path.with_name(f"{path.name}-wal"))
        self._in_log: dict[int, int] = {}
        self._read_log(whole_log)

    def rows(self) -> Iterator[Row]:
        """Every row of every table and index that can be read."""
        # A store's database never shrinks, so its size in the log, which may be damaged, is not needed.
        new = sorted(number for number in self._in_log if number > self._n_pages)
        for number in chain(range(1, self._n_pages + 1), new):
            yield from self.rows_in(number)

    def rows_in(self, number: int) -> Iterator[Row]:
        """Every row that can be read in one page."""
        page, start = self._page(number), 100 if number == 1 else 0
        kind = page[start]
        if kind not in (_TABLE_LEAF, _INDEX_LEAF, _INDEX_INNER):
            return
        first = start + (12 if kind == _INDEX_INNER else 8)
        n_cells = min(int.from_bytes(page[start + 3 : start + 5], "big"), (PAGE - first) // 2)
        for cell in struct.unpack_from(f">{n_cells}H", page, first):
            try:
                size, at = _varint(page, cell + (4 if kind == _INDEX_INNER else 0))
                rowid, at = _varint(page, at) if kind == _TABLE_LEAF else (None, at)
                most = PAGE - 35 if kind == _TABLE_LEAF else (PAGE - 12) * 64 // 255 - 23
                yield rowid, _values(self._payload(page, at, size, most))
            except (ValueError, IndexError):
                continue

    def _page(self, number: int) -> bytes:
        """Zeros if the page is not there."""
        at = self._in_log.get(number)
        return _read(self._file, (number - 1) * PAGE) if at is None else self._log[at : at + PAGE]

    def _read_log(self, whole: bool) -> None:
        log = self._log.ljust(_LOG_HEADER, b"\0")
        order = ">" if log[:4] == b"\x37\x7f\x06\x83" else "<"
        salt, seed = log[16:24], _LOG_CHECKSUM.unpack_from(log, 24)
        if whole:  # the header may be damaged, too
            salt = max(salt, log[40:48], key=log.count)
        elif _add(log[:24], order, (0, 0)) != seed:
            return
        pages: dict[int, int] = {}
        bad = 0
        for at in range(_LOG_HEADER, len(log) - _FRAME + 1, _FRAME):
            number, size, its_salt, *written = _FRAME_HEADER.unpack_from(log, at)
            right = _add(log[at + 24 : at + _FRAME], order, _add(log[at : at + 8], order, seed))
            is_right = its_salt == salt and right == (*written,)
            if not is_right and not whole:
                break
            # The seed of the next frame is the checksum in this one: one bad frame does not hide the others.
            bad, seed = bad + (not is_right), (*written,)
            if its_salt == salt:
                pages[number] = at + 24
                if size:  # the last frame of a transaction
                    self._in_log.update(pages)
                    self.bad_frames, pages = bad, {}

    def _payload(self, page: bytes, at: int, size: int, most: int) -> bytes:
        """A row, of which a page holds `most` bytes; the rest follows on other pages. Raises `ValueError`."""
        if size <= most:
            return page[at : at + size]
        if size > (self._n_pages + len(self._in_log)) * PAGE:
            raise ValueError("longer than the file")
        local = _LEAST_LOCAL + (size - _LEAST_LOCAL) % (PAGE - 4)
        end = at + (local if local <= most else _LEAST_LOCAL)
        parts, left = [page[at:end]], size - (end - at)
        following = page[end : end + 4]
        while left > 0:
            number = int.from_bytes(following, "big")
            if number < 2 or (number > self._n_pages and number not in self._in_log):
                raise ValueError("the rest is missing")
            page = self._page(number)
            parts.append(page[4 : 4 + left])
            left, following = left - (PAGE - 4), page[:4]
        return b"".join(parts)


def _content(path: Path) -> bytes:
    """Empty if there is no such file. Raises `OSError`: it cannot be opened."""
    if not path.exists():
        return b""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        return b"".join(_read(file.fileno(), at) for at in range(0, size, PAGE))[:size]


def _read(file: int, at: int) -> bytes:
    """A page; zeros if it is not there, or if the disk refuses it, which would kill a process that maps the file."""
    try:
        return os.pread(file, PAGE, at).ljust(PAGE, b"\0")
    except OSError:
        return bytes(PAGE)


def _add(data: bytes, order: str, seed: tuple[int, ...]) -> tuple[int, ...]:
    """The checksum of the log, continued."""
    one, two = seed
    for first, second in struct.iter_unpack(f"{order}II", data):
        one = (one + first + two) & 0xFFFFFFFF
        two = (two + second + one) & 0xFFFFFFFF
    return one, two


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number and where it ends. Raises `IndexError`."""
    value = 0
    for end in range(at, at + 8):
        value = value << 7 | data[end] & 0x7F
        if data[end] < 0x80:
            return value, end + 1
    value = value << 8 | data[at + 8]
    return value - (value >> 63 << 64), at + 9


def _values(payload: bytes) -> tuple[Any, ...]:
    """The columns of a row. Raises `ValueError`, `IndexError`."""
    body, at = _varint(payload, 0)
    values: list[Any] = []
    end = body
    while at < end:
        kind, at = _varint(payload, at)
        size = (kind - 12) // 2 if kind >= 12 else _SIZES[kind]
        data = payload[body : body + size]
        if len(data) < size:
            raise ValueError("cut short")
        body += size
        if kind >= 12:
            values.append(data.decode() if kind % 2 else data)
        elif kind == 7:
            values.append(struct.unpack(">d", data)[0])
        elif size:
            values.append(int.from_bytes(data, "big", signed=True))
        else:
            values.append({8: 0, 9: 1}.get(kind))
    return tuple(values)
