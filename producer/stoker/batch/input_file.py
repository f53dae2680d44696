"""An input file: read once as a whole to index it, then line by line in any order. No Redis.

The index has 8 bytes for each line, the place where it begins; the lines themselves are read again when they are sent.
"""

import hashlib
import os
import stat
from array import array
from pathlib import Path
from typing import Self

from stoker.batch.lines import MAX_LINE_BYTES, BadLine, Line, custom_id_of, read_line
from stoker.openai.rule import BodyOptions


class LineSet:
    """A set of numbers from 1."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        at = number >> 3
        return at < len(self._bits) and bool(self._bits[at] & 1 << (number & 7))

    def add(self, number: int) -> None:
        at = number >> 3
        if at >= len(self._bits):
            self._bits.extend(bytes(at + 1 - len(self._bits)))
        if not self._bits[at] & 1 << (number & 7):
            self._bits[at] |= 1 << (number & 7)
            self._count += 1


class InputChanged(Exception):
    """The file was changed after it was indexed."""


class InputFile:
    """Lines are numbered from 1, as in editors; blank lines have a number but no request.

    Attributes:
        digest: SHA-256 of the file, in hex.
        n_lines: how many lines there are.
        n_requests: how many of them are not blank.
    """

    def __init__(self, path: Path, *, max_line_bytes: int = MAX_LINE_BYTES, max_lines: int | None = None) -> None:
        """
        Args:
            max_line_bytes: longer lines are bad ones.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not a regular file, so it could not be read a second time; or it has over `max_lines`.
        """
        self._file = path.open("rb")
        self._path = path
        self._max_line_bytes = max_line_bytes
        self._max_lines = max_lines
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._file.close()
            raise ValueError(f"{path} cannot be read twice; write its lines to a regular file first")
        self._starts = array("Q")
        self._blank, self._repeated = LineSet(), LineSet()
        self._stamp = self._stat()
        try:
            self.digest = self._read_through()
        except ValueError:
            self._file.close()
            raise
        self.n_lines = len(self._starts)
        self.n_requests = self.n_lines - len(self._blank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def is_blank(self, number: int) -> bool:
        return number in self._blank

    def line(self, number: int, options: BodyOptions) -> Line:
        """
        Raises:
            BadLine: it cannot be run.
            InputChanged: the file was changed.
        """
        raw = self._raw(number)
        if self._is_too_long(raw):
            raise BadLine(number, None, "invalid_json_line", f"over {self._max_line_bytes} bytes")
        if number in self._repeated:
            name = custom_id_of(number, raw)
            raise BadLine(
                number, None, "duplicate_custom_id", f"an earlier line has the custom_id {name!r} too", "custom_id"
            )
        return read_line(number, raw, options)

    def custom_id(self, number: int) -> str | None:
        """The `custom_id` of this line's answer."""
        if number in self._repeated or self._is_too_long(raw := self._raw(number)):
            return None
        return custom_id_of(number, raw)

    def _is_too_long(self, raw: bytes) -> bool:
        return len(raw) > self._max_line_bytes

    def _raw(self, number: int) -> bytes:
        if self._stat() != self._stamp:
            raise InputChanged(f"{self._path} was changed while it was read")
        self._file.seek(self._starts[number - 1])
        return self._file.readline(self._max_line_bytes + 1)

    def _stat(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def _read_through(self) -> str:
        """Index the file: where its lines begin, which are blank, which repeat a `custom_id`. Returns its digest."""
        digest, seen, at = hashlib.sha256(), set[int](), 0
        while raw := self._file.readline(self._max_line_bytes + 1):
            if len(self._starts) == self._max_lines:
                raise ValueError(f"it has over {self._max_lines} lines")
            self._starts.append(at)
            number, at = len(self._starts), at + len(raw)
            digest.update(raw)
            if self._is_too_long(raw):
                at += self._skip_line(digest)
            elif not raw.strip():
                self._blank.add(number)
            elif (custom_id := custom_id_of(number, raw)) is not None:
                # 8 bytes of a digest: a million ids have a false match in about one of 10 ** 7 files.
                short = int.from_bytes(hashlib.blake2b(custom_id.encode(), digest_size=8).digest())
                if short in seen:
                    self._repeated.add(number)
                seen.add(short)
        return digest.hexdigest()

    def _skip_line(self, digest: "hashlib._Hash") -> int:
        skipped = 0
        while raw := self._file.readline(2**20):
            digest.update(raw)
            skipped += len(raw)
            if raw.endswith(b"\n"):
                break
        return skipped
