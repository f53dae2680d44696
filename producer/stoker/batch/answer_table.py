"""The table of a batch's answers, a Parquet file: a row for each line, in their order, with the input's own columns.

It appears complete, once every line is answered. Before and afterwards, the answers are in an `OutputFile`, from which
the table can be made again. One thread; it holds about 32 MiB of rows, and 8 bytes for each line.
"""

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq

from stoker.batch.input_file import Rows, line_of_answer
from stoker.batch.output_file import OutputRefused
from stoker.batch.parquet_rows import ParquetRows
from stoker_shared.durable_file import draft_of

_BATCH: Final = b"stoker_batch"
_AT_ONCE: Final = 256
_GROUP_BYTES: Final = 32 * 2**20
_CUSTOM_ID: Final = pa.field("custom_id", pa.string())
_USAGE: Final = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
_ANSWER: Final = (
    pa.field("text", pa.string()),
    pa.field("status", pa.int32()),
    pa.field("error", pa.string()),
    pa.field("usage", pa.struct([(name, pa.int64()) for name in _USAGE])),
)


class AnswerTable:
    """The table at `path`; `answers` is the path of its `OutputFile`."""

    def __init__(self, path: Path, batch: str) -> None:
        """Raises `OutputRefused`: the file exists and is not the table of this batch, or its answers are gone. Raises
        `OSError`: it cannot be read."""
        self.answers = path.with_name(f"{path.name}.jsonl")
        self.path = path
        self._batch = batch
        if path.exists() and self._batch_of_file() != batch:
            raise OutputRefused(f"{path} is not the table of batch {batch}, and was not changed. Give another --out")
        if path.exists() and not self.answers.exists():
            raise OutputRefused(f"{path} is complete, but {self.answers} is gone; remove {path} to run all rows again")

    def write(self, n_lines: int, rows: Rows | None) -> None:
        """Write the table. Raises `InputChanged`; `OSError`: a file cannot be read or written, and the table is as it
        was.

        Args:
            n_lines: all of them are answered, or blank.
            rows: the input, if available: the table gets the columns of a Parquet file.
        """
        rows = rows if isinstance(rows, ParquetRows) else None
        own = rows.schema if rows is not None else pa.schema([])
        schema = _schema_with(own).with_metadata({_BATCH: self._batch})
        with draft_of(self.path) as draft, self.answers.open("rb") as file, pq.ParquetWriter(draft, schema) as table:
            found = _Answers(file, n_lines)
            group: list[pa.RecordBatch] = []
            for batch in _of_rows(found, rows, schema) if rows is not None else _of_answers(found, n_lines, schema):
                group.append(batch)
                if sum(part.nbytes for part in group) > _GROUP_BYTES:
                    table.write_table(pa.Table.from_batches(group, schema))
                    group = []
            table.write_table(pa.Table.from_batches(group, schema))

    def _batch_of_file(self) -> str | None:
        try:
            found: bytes | None = (pq.read_schema(self.path).metadata or {}).get(_BATCH)
        except pa.ArrowException:
            return None
        return None if found is None else found.decode(errors="replace")


def _schema_with(own: pa.Schema) -> pa.Schema:
    """The input's columns, then the answers'. An input column with the name of one of those is renamed."""
    names = {field.name for field in _ANSWER}

    def renamed(field: pa.Field) -> pa.Field:
        name = field.name
        while name in names or (name != field.name and name in own.names):
            name = f"input_{name}"
        return field.with_name(name)

    ids = [] if _CUSTOM_ID.name in own.names else [_CUSTOM_ID]
    return pa.schema([*map(renamed, own), *ids, *_ANSWER])


class _Answers:
    """The answers in an `OutputFile`, by line number."""

    def __init__(self, file: BinaryIO, n_lines: int) -> None:
        self._file = file
        self._places = array("Q", bytes(8 * (n_lines + 1)))  # from 1; 0 for no answer
        at = 1
        for raw in file:
            found = line_of_answer(json.loads(raw)["id"])
            if found is not None and found[1] <= n_lines:
                self._places[found[1]] = at
            at += len(raw)

    def __contains__(self, number: int) -> bool:
        return self._places[number] != 0

    def row(self, number: int) -> dict[str, Any]:
        """The answer's part of the table's row."""
        self._file.seek(self._places[number] - 1)
        answer = json.loads(self._file.readline())
        response = answer["response"] or {"status_code": None, "body": {}}
        error = answer["error"] or response["body"].get("error")
        return {
            "custom_id": answer["custom_id"],
            "text": _text_of(response["body"]),
            "status": response["status_code"],
            "error": _plain(error["message"]) if error else None,
            "usage": _usage_of(response["body"].get("usage")),
        }


def _of_rows(answers: _Answers, rows: ParquetRows, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    first = 1
    for batch in rows.batches():
        yield _batch(batch.columns, [answers.row(number) for number in range(first, first + len(batch))], schema)
        first += len(batch)


def _of_answers(answers: _Answers, n_lines: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for first in range(1, n_lines + 1, _AT_ONCE):
        numbers = range(first, min(first + _AT_ONCE, n_lines + 1))
        yield _batch([], [answers.row(number) for number in numbers if number in answers], schema)


def _batch(own: Sequence[pa.Array], answers: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    added = pa.array(answers, pa.struct(list(schema)[len(own) :])).flatten()
    return pa.RecordBatch.from_arrays([*own, *added], schema=schema)


def _text_of(body: Mapping[str, Any]) -> str | None:
    """The text of the first choice, or of a response; ``None`` if there is none, as with tool calls alone."""
    if "output" in body:
        parts = [part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"]]
        return _plain("".join(parts))
    for choice in body.get("choices", ()):
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        return None if text is None else _plain(text)
    return None


def _plain(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON can have and a table cannot."""
    return text.encode(errors="replace").decode()


def _usage_of(usage: Mapping[str, Any] | None) -> dict[str, int] | None:
    """The token counts by the table's names; Responses have other names for them."""
    if usage is None:
        return None
    read, made = ("prompt", "completion") if "prompt_tokens" in usage else ("input", "output")
    return {
        "prompt_tokens": usage[f"{read}_tokens"],
        "completion_tokens": usage[f"{made}_tokens"],
        "cached_tokens": usage[f"{read}_tokens_details"]["cached_tokens"],
        "reasoning_tokens": usage[f"{made}_tokens_details"]["reasoning_tokens"],
    }
