"""Parquet files as the input and the output of a batch: rows as requests, and the table of answers."""

import io
import json
import os
from pathlib import Path, PosixPath

import pytest
from tests.producer.played_worker import result_fields

from stoker.api.fields import BodyOptions
from stoker.api.responses import RESPONSES
from stoker.batch.input_file import BadLine, InputChanged, InputFile, answer_id_for, job_id_for
from stoker.batch.output_file import OutputFile, OutputRefused, failure_line, not_run_line, success_line
from stoker.batch.prompts import Prompts
from stoker_shared.result import GenerationResult

pa = pytest.importorskip("pyarrow", reason="pip install 'stoker[parquet]'")
pq = pytest.importorskip("pyarrow.parquet")
answer_table = pytest.importorskip("stoker.batch.answer_table")
ParquetRows = pytest.importorskip("stoker.batch.parquet_rows").ParquetRows

ANY = BodyOptions(any_model=True)
BATCH = "b-1"


def opened(tmp_path, columns, *arguments, group_rows=None):
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=group_rows)
    return InputFile(ParquetRows(tmp_path / "in.parquet", *arguments))


def asked(lines, number):
    line = lines.line(number, ANY)
    return line.custom_id, line.request.messages[-1].content


def test_rows_of_a_batch_are_lines_whose_missing_keys_are_null(tmp_path):
    said = [{"role": "user", "content": "one"}]
    bodies = [{"messages": said, "max_tokens": 7}, {"messages": said, "temperature": 0.5}, None, {"messages": []}]
    columns = {"custom_id": ["a", "b", "c", "d"], "body": bodies, "own": [1, 2, 3, 4]}
    with opened(tmp_path, columns) as lines:
        first, second = (lines.line(number, BodyOptions(any_model=True, max_tokens=9)).request for number in (1, 2))
        assert (first.max_tokens, first.temperature) == (7, 1.0)
        assert (second.max_tokens, second.temperature) == (9, 0.5)
        for number, why in ((3, "'body' must be an object"), (4, "messages")):
            with pytest.raises(BadLine, match=why) as caught:
                lines.line(number, ANY)
            assert caught.value.custom_id == lines.custom_id(number) == columns["custom_id"][number - 1]


def test_a_body_may_be_json_text_for_the_url_of_its_row(tmp_path):
    body = json.dumps({"prompt": "one"})
    bodies = [body, "{half", json.dumps({"messages": [{"role": "user", "content": "two"}]})]
    with opened(tmp_path, {"url": [*["/v1/completions"] * 2, None], "body": bodies}) as lines:
        assert lines.line(1, ANY).request.prompt == "one"
        with pytest.raises(BadLine, match="line 2: 'body': ") as caught:
            lines.line(2, ANY)
        assert caught.value.custom_id == "2"
        assert asked(lines, 3) == ("3", "two")  # a null is a missing key here as well


def test_prompts_are_in_the_column_that_is_named_and_have_the_template_and_another_makes_another_batch(tmp_path):
    columns = {"prompt": ["not me"] * 2, "q": ["one", None]}
    digests = []
    for kind in ((Prompts("A {}."), "q"), (Prompts(), "q"), (Prompts(),), (Prompts(), "prompt")):
        with opened(tmp_path, columns, *kind) as lines:
            digests.append(lines.rows.digest)
            if kind == (Prompts("A {}."), "q"):
                assert asked(lines, 1) == ("1", "A one.")
                with pytest.raises(BadLine, match="neither a text nor a list of messages"):
                    lines.line(2, ANY)
    assert digests[2] == digests[3]
    assert len(set(digests)) == 3


def test_conversations_are_taken_before_prompts_and_have_no_template(tmp_path):
    turns = [[{"role": "system", "content": "s", "name": None}, {"role": "user", "content": "one", "name": None}]]
    columns = {"prompt": ["not me"], "messages": turns}
    with opened(tmp_path, columns, Prompts()) as lines:
        assert asked(lines, 1) == ("1", "one")
    with pytest.raises(ValueError, match="'messages' has conversations"):
        opened(tmp_path, columns, Prompts("A {}."))


def test_ids_are_texts_or_numbers_and_one_that_comes_again_is_the_first_rows(tmp_path):
    prompts = ["x"] * 4
    with opened(tmp_path, {"custom_id": [7, 8, 7, None], "prompt": prompts}, Prompts()) as lines:
        assert [lines.custom_id(number) for number in range(1, 5)] == ["7", "8", None, None]
        with pytest.raises(BadLine, match="an earlier line has the custom_id '7'"):
            lines.line(3, ANY)
        with pytest.raises(BadLine, match="'custom_id' must be"):
            lines.line(4, ANY)


def test_rows_are_read_in_any_order_across_row_groups(tmp_path):
    columns = {"prompt": [f"p{number}" for number in range(1, 2001)]}
    with opened(tmp_path, columns, Prompts(), group_rows=600) as lines:
        assert (lines.n_lines, lines.n_requests) == (2000, 2000)
        for number in (1, 2, 600, 601, 255, 256, 257, 2000, 1200, 1201, 3, 1999):
            assert asked(lines, number) == (str(number), f"p{number}")


def test_a_large_row_group_is_read_in_pieces(tmp_path):
    """Most writers put a million rows into a group, and a group's part of a column may have gigabytes."""
    texts = [os.urandom(1500).hex() for _ in range(4000)]
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "in.parquet")
    sizes = []

    class WatchedFile(io.FileIO):
        def read(self, n_bytes=-1):
            found = super().read(n_bytes)
            sizes.append(len(found))
            return found

    class WatchedPath(PosixPath):
        def open(self, mode):  # type: ignore[override]
            return WatchedFile(self)

    with InputFile(ParquetRows(WatchedPath(tmp_path / "in.parquet"), Prompts())) as lines:
        assert asked(lines, 4000) == ("4000", texts[-1])
    assert sum(sizes) > 6 * 2**20
    assert max(sizes) < 2 * 2**20


def test_a_file_that_is_no_table_or_has_not_the_columns_or_is_written_to_meanwhile_is_refused(tmp_path):
    path = tmp_path / "in.parquet"
    path.write_text("PAR1")
    with pytest.raises(ValueError, match="no Parquet file"):
        ParquetRows(path)
    for arguments, missing in (((), "body"), ((Prompts(),), "prompt"), ((Prompts(), "q"), "q")):
        with pytest.raises(ValueError, match=f"no column '{missing}'; it has 'a', 'b'"):
            opened(tmp_path, {"a": [1], "b": [2]}, *arguments)
    with opened(tmp_path, {"prompt": ["x"] * 2}, Prompts()) as lines:
        path.write_bytes(path.read_bytes() + b"x")
        with pytest.raises(InputChanged):
            lines.line(1, ANY)


def answered(path, answers):
    """A table at `path` over an output file with the answers of these numbers, of an input of so many lines."""
    table = answer_table.AnswerTable(path, BATCH)
    with OutputFile(table.answers, BATCH) as output:
        output.append(answers)
    return table


def succeeded(number, text, url="/v1/chat/completions"):
    line_id = answer_id_for(job_id_for(BATCH, number, f"c{number}"))
    usage = {"prompt_tokens": 9, "cached_tokens": 4, "completion_tokens": 2, "reasoning_tokens": 1}
    result = GenerationResult.model_validate({**result_fields("j", text), "usage": usage})
    return number, success_line(line_id, f"c{number}", url, 1, result)


def test_the_table_has_a_row_for_each_line_in_their_order(tmp_path):
    line_id = answer_id_for(job_id_for(BATCH, 2, "c2"))
    answers = [
        succeeded(5, "of a response", RESPONSES.url),
        (2, failure_line(line_id, "c2", "j", "EngineFailed: why", None)),
        succeeded(1, "of \ud83d a chat"),
        (4, not_run_line(answer_id_for(job_id_for(BATCH, 4, None)), BadLine(4, None, "code", "why"))),
    ]
    answered(tmp_path / "out.parquet", answers).write(5, None)
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 4, "reasoning_tokens": 1}
    names = ("custom_id", "text", "status", "error", "usage")
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == [
        dict(zip(names, row, strict=True))
        for row in (
            ("c1", "of ? a chat", 200, None, usage),
            ("c2", None, 500, "EngineFailed: why", None),
            (None, None, None, "line 4: why", None),
            ("c5", "of a response", 200, None, usage),
        )
    ]


def test_the_table_keeps_the_columns_of_the_input_and_their_types(tmp_path):
    own = pa.table(
        {
            "custom_id": pa.array([7, 8], pa.uint8()),
            "text": pa.array(["a", "b"]).dictionary_encode(),
            "input_text": [b"\xff", None],
            "messages": [[{"role": "user", "content": "x"}]] * 2,
        }
    ).replace_schema_metadata({"pandas": "{}", "huggingface": "{}"})
    with opened(tmp_path, own, Prompts()) as lines:
        answered(tmp_path / "out.parquet", [succeeded(2, "two"), succeeded(1, "one")]).write(2, lines.rows)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == [
        *("custom_id", "input_input_text", "input_text", "messages"), *("text", "status", "error", "usage")
    ]  # fmt: skip
    assert table["text"].to_pylist() == ["one", "two"]
    for name, kept in zip(own.column_names, table.column_names, strict=False):
        assert table[kept].type == own[name].type
        assert table[kept].to_pylist() == own[name].to_pylist()
    assert list(table.schema.metadata) == [b"stoker_batch"]


def test_a_table_of_something_else_or_without_its_answers_is_not_replaced(tmp_path):
    path: Path = tmp_path / "out.parquet"
    table = answered(path, [succeeded(1, "one")])
    table.write(1, None)
    whole = path.read_bytes()
    answer_table.AnswerTable(path, BATCH).write(1, None)
    with pytest.raises(OutputRefused, match="not the table of batch b-2"):
        answer_table.AnswerTable(path, "b-2")
    table.answers.unlink()
    with pytest.raises(OutputRefused, match=r"out\.parquet\.jsonl is gone"):
        answer_table.AnswerTable(path, BATCH)
    assert path.read_bytes() == whole
    for content in (b"", b"PAR1", b"text"):
        path.write_bytes(content)
        with pytest.raises(OutputRefused, match="not the table"):
            answer_table.AnswerTable(path, BATCH)
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(OutputRefused, match="not the table"):
        answer_table.AnswerTable(path, BATCH)
