"""Rows of a Parquet file. Implements `Rows`. One thread; reads forward, a few hundred rows at a time.

The file is read as bytes for its digest, and its column `custom_id` for the ids; then rows are read in any order. Going
back costs reading from the beginning of a row group.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from stoker.api.chat import CHAT_URL
from stoker.batch.input_file import MAX_LINE_BYTES, BadLine, SourceFile, fingerprint_of, usable_custom_id
from stoker.batch.prompts import PLACE, Prompts
from stoker_shared.errors import RequestTooLarge
from stoker_shared.job_data import read_json

_AT_ONCE: Final = 256
_BUFFER_BYTES: Final = 2**20
_ID: Final = "custom_id"


class ParquetRows(SourceFile):
    """`schema` has the file's columns, without the other notes of its writer."""

    def __init__(self, path: Path, prompts: Prompts | None = None, column: str | None = None) -> None:
        """
        Args:
            prompts: how to ask the rows' prompts; ``None`` if the rows are lines of a batch.
            column: the column of the prompts; by default `messages`, else `prompt`.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not a regular Parquet file, or lacks a column.
        """
        super().__init__(path)
        self._prompts = prompts
        try:
            self._parquet = self._opened()
            self.schema: pa.Schema = self._parquet.schema_arrow.remove_metadata()
            self._asked = self._column_of(column)
        except BaseException:
            self.close()
            raise
        wanted = (_ID, "method", "url", "body") if prompts is None else (_ID, self._asked)
        self._columns = [name for name in wanted if name in self.schema.names]
        metadata = self._parquet.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._group_firsts = list(accumulate(sizes, initial=1))
        self._ahead: Iterator[list[dict[str, Any]]] = iter(())
        self._first, self._rows = metadata.num_rows + 1, list[dict[str, Any]]()
        self.digest = ""

    def read_through(self) -> Iterator[str | None]:
        self._file.seek(0)
        kind = [] if self._prompts is None else [self._asked, asdict(self._prompts)]
        self.digest = fingerprint_of(hashlib.file_digest(self._file, "sha256").hexdigest(), kind)
        if _ID not in self._columns:
            yield from map(str, range(1, self._parquet.metadata.num_rows + 1))
            return
        for batch in self.batches([_ID]):
            yield from map(_id_of, batch.column(0).to_pylist())

    def row(self, number: int) -> bytes:
        self._require_unchanged()
        if not self._first <= number < self._first + len(self._rows):
            self._go_to(number)
        row = self._rows[number - self._first]
        custom_id = _id_of(row[_ID]) if _ID in row else str(number)
        try:
            return self._line(custom_id, row)
        except RequestTooLarge as error:
            raise BadLine(number, custom_id, "request_too_large", str(error)) from None
        except (TypeError, ValueError, RecursionError) as error:
            raise BadLine(number, custom_id, "invalid_value", f"{self._asked!r}: {error}", self._asked) from None

    def batches(
        self, columns: Sequence[str] | None = None, groups: Sequence[int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Rows in their order, a few hundred at a time, of all columns and row groups or of these. Raises
        `InputChanged`; `OSError`: the file is damaged."""
        try:
            for batch in self._parquet.iter_batches(_AT_ONCE, row_groups=groups, columns=columns, use_threads=False):
                self._require_unchanged()
                yield batch
        except pa.ArrowException as error:
            raise OSError(f"{self._path} cannot be read: {error}") from None

    def _line(self, custom_id: str | None, row: dict[str, Any]) -> bytes:
        row = _without_nulls(row)
        asked = row.get(self._asked)
        if self._prompts is not None:
            return self._prompts.line(custom_id, asked)
        body = read_json(asked.encode(), MAX_LINE_BYTES) if isinstance(asked, str) else asked
        return json.dumps({"method": "POST", "url": CHAT_URL, **row, _ID: custom_id, "body": body}).encode()

    def _column_of(self, column: str | None) -> str:
        names = self.schema.names
        of_prompts = column or ("messages" if "messages" in names else "prompt")
        wanted = "body" if self._prompts is None else of_prompts
        if wanted not in names:
            hint = "; give --prompts for a column of prompts" if self._prompts is None else "; --column names another"
            raise ValueError(f"{self._path} has no column {wanted!r}; it has {', '.join(map(repr, names))}{hint}")
        if self._prompts is not None and self._prompts.template != PLACE:
            kind = self.schema.field(wanted).type
            if pa.types.is_list(kind) or pa.types.is_large_list(kind):
                raise ValueError(f"a template is for prompts that are texts; {wanted!r} has conversations")
        return wanted

    def _go_to(self, number: int) -> None:
        """Read on until this row is in memory. Begin at its row group if that is shorter, or if the row is behind those
        in memory."""
        group = bisect_right(self._group_firsts, number) - 1
        if number < self._first or self._group_firsts[group] > self._first + len(self._rows):
            self._first, self._rows = self._group_firsts[group], []
            groups = range(group, self._parquet.num_row_groups)
            self._ahead = (batch.to_pylist() for batch in self.batches(self._columns, groups))
        while number >= self._first + len(self._rows):
            self._first += len(self._rows)
            self._rows = next(self._ahead)

    def _opened(self) -> pq.ParquetFile:
        try:
            # With a buffer, a column's part of a row group is read piece by piece, not as a whole.
            return pq.ParquetFile(self._file, pre_buffer=False, buffer_size=_BUFFER_BYTES)
        except pa.ArrowException as error:
            raise ValueError(f"{self._path} is no Parquet file: {error}") from None


def _id_of(value: object) -> str | None:
    return usable_custom_id(str(value) if type(value) is int else value)


def _without_nulls(value: Any) -> Any:
    """A column of objects has every key in every row, with `None` where a row lacks it."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
