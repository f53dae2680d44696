"""An input file: read through once to know it, then line by line from anywhere. Owns no Redis.

What is kept per line is where it begins, 8 bytes; the lines themselves are read when their turn comes.
"""

import hashlib
import os
import stat
from array import array
from pathlib import Path
from types import TracebackType
from typing import Self

from stoker.batch.fields import LineOptions
from stoker.batch.line_set import LineSet
from stoker.batch.lines import MAX_LINE_BYTES, BadLine, Line, custom_id_of, read_line


class InputChanged(Exception):
    """The file is not what it was when it was read through."""


class InputFile:
    """Lines are numbered from 1, as editors do; blank ones count and ask for nothing.

    Attributes:
        digest: SHA-256 of the file, in hex.
        n_lines: the number of the last line.
        n_requests: lines that are not blank.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            OSError: it cannot be read.
            ValueError: it is no regular file; lines are read a second time when their turn comes.
        """
        self._file = path.open("rb")
        self._path = path
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._file.close()
            raise ValueError(f"{path} is no file that can be read twice; write the lines to one first")
        self._starts = array("Q")
        self._blank, self._repeated = LineSet(), LineSet()
        self._stamp = self._stat()
        self.digest = self._read_through()
        self.n_lines = len(self._starts)
        self.n_requests = self.n_lines - len(self._blank)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def is_blank(self, number: int) -> bool:
        return number in self._blank

    def line(self, number: int, options: LineOptions) -> Line:
        """
        Raises:
            BadLine: it cannot be run.
            InputChanged: somebody wrote to the file.
        """
        raw = self._raw(number)
        if number in self._repeated:
            name = custom_id_of(number, raw)
            raise BadLine(number, None, "duplicate_custom_id", f"custom_id {name!r} is an earlier line's", "custom_id")
        return read_line(number, raw, options)

    def custom_id(self, number: int) -> str | None:
        """As the answer to this line has it."""
        return None if number in self._repeated else custom_id_of(number, self._raw(number))

    def _raw(self, number: int) -> bytes:
        if self._stat() != self._stamp:
            raise InputChanged(f"{self._path} was changed while it was read")
        self._file.seek(self._starts[number - 1])
        return self._file.readline(MAX_LINE_BYTES + 1)

    def _stat(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def _read_through(self) -> str:
        """Its digest; where lines begin, which are blank, and which have an earlier line's `custom_id`."""
        digest, seen, at = hashlib.sha256(), set[int](), 0
        while raw := self._file.readline(MAX_LINE_BYTES + 1):
            self._starts.append(at)
            number, at = len(self._starts), at + len(raw)
            digest.update(raw)
            custom_id = custom_id_of(number, raw)
            if len(raw) > MAX_LINE_BYTES:
                at += self._skip_line(digest)
            elif not raw.strip():
                self._blank.add(number)
            elif custom_id is not None:
                # 8 bytes of a digest: a false match among a million ids is as likely as one in 10 ** 7 batches.
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
