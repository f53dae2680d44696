"""Rows of a file of OpenAI Batch lines. Implements `Rows`.

The file is read once from beginning to end to index it, then line by line in any order; the index has 8 bytes for each
line, the position where it begins.
"""

import hashlib
from array import array
from collections.abc import Iterator
from pathlib import Path

from stoker.batch.input_file import BLANK, MAX_LINE_BYTES, BadLine, SourceFile, custom_id_of


class JsonLines(SourceFile):
    def __init__(self, path: Path, *, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        """Raises as `SourceFile`. Lines longer than `max_line_bytes` are bad ones."""
        super().__init__(path)
        self._max_line_bytes = max_line_bytes
        self._starts = array("Q")
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def read_through(self) -> Iterator[str | None]:
        at = 0
        while raw := self._file.readline(self._max_line_bytes + 1):
            self._starts.append(at)
            at += len(raw)
            self._digest.update(raw)
            if len(raw) > self._max_line_bytes:
                at += self._skip_line()
                yield None
            else:
                yield custom_id_of(len(self._starts), raw) if raw.strip() else BLANK

    def row(self, number: int) -> bytes:
        self._require_unchanged()
        self._file.seek(self._starts[number - 1])
        raw = self._file.readline(self._max_line_bytes + 1)
        if len(raw) > self._max_line_bytes:
            raise BadLine(number, None, "invalid_json_line", f"over {self._max_line_bytes} bytes")
        return raw

    def _skip_line(self) -> int:
        skipped = 0
        while raw := self._file.readline(2**20):
            self._digest.update(raw)
            skipped += len(raw)
            if raw.endswith(b"\n"):
                break
        return skipped
