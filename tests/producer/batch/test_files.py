"""The two files of a batch: reading the input, and the output after a crash."""

import json
import os
import sys
import tracemalloc
from pathlib import Path

import pytest

from stoker.api.fields import BodyOptions
from stoker.batch.input_file import (
    MAX_LINE_BYTES,
    BadLine,
    InputChanged,
    InputFile,
    answer_id_for,
    batch_for,
    fingerprint_of,
    job_id_for,
)
from stoker.batch.json_lines import JsonLines
from stoker.batch.output_file import OutputFile, OutputRefused, line_bytes, not_run_line

BATCH = batch_for("nightly", fingerprint_of("digest", []))


def line(custom_id, prompt="x"):
    body = {"model": "m", "prompt": prompt}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})


def opened(tmp_path, text):
    path = tmp_path / "in.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return InputFile(JsonLines(path))


def answer(number, custom_id="one", batch=BATCH):
    bad = BadLine(number, custom_id, "code", "why")
    return not_run_line(answer_id_for(job_id_for(batch, number, custom_id)), bad)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


def test_lines_are_numbered_as_in_an_editor_and_read_in_any_order(tmp_path):
    with opened(tmp_path, f"\ufeff{line('one')}\n\n  \r\n{line('two')}\r\n{line('three')}") as lines:
        assert (lines.n_lines, lines.n_requests) == (5, 3)
        read = [lines.line(number, BodyOptions()).custom_id for number in (5, 1, 4)]
        assert read == ["three", "one", "two"]
        assert [number for number in range(1, 6) if lines.is_blank(number)] == [2, 3]


def test_a_custom_id_that_comes_again_is_the_first_lines_and_the_others_are_bad(tmp_path):
    with opened(tmp_path, f"{line('one')}\n{line('two')}\n{line('one')}\n") as lines:
        assert lines.line(1, BodyOptions()).custom_id == "one"
        with pytest.raises(BadLine, match="line 3: an earlier line has the custom_id 'one'") as caught:
            lines.line(3, BodyOptions())
        assert caught.value.custom_id is lines.custom_id(3) is None


def test_a_line_without_end_is_one_bad_line_and_does_not_fill_the_memory(tmp_path):
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        for _ in range(3):
            file.write(b"x" * MAX_LINE_BYTES)
        file.write(f"\n{line('two')}\n".encode())
    tracemalloc.start()
    with InputFile(JsonLines(path)) as lines:
        with pytest.raises(BadLine, match="line 1: over"):
            lines.line(1, BodyOptions())
        assert lines.line(2, BodyOptions()).custom_id == "two"
    assert tracemalloc.get_traced_memory()[1] < 2.5 * MAX_LINE_BYTES
    tracemalloc.stop()


def test_an_input_that_cannot_be_read_twice_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)  # so that opening it for reading does not block
    with pytest.raises(ValueError, match="cannot be read twice"):
        InputFile(JsonLines(tmp_path / "pipe"))
    os.close(writer)


def test_an_input_that_is_written_to_meanwhile_is_noticed(tmp_path):
    with opened(tmp_path, f"{line('one')}\n{line('two')}\n") as lines:
        (tmp_path / "in.jsonl").write_text(f"{line('three')}\n{line('four', 'y')}\n")
        with pytest.raises(InputChanged):
            lines.line(2, BodyOptions())


def test_answers_in_the_file_are_found_again_and_not_written_twice(out):
    with OutputFile(out, BATCH) as output:
        output.append([(1, answer(1)), (3, answer(3))])
        output.append([(3, answer(3)), (2, answer(2))])
        assert 2 in output.written
    before = out.read_bytes()
    with OutputFile(out, BATCH) as output:
        assert [number in output.written for number in range(5)] == [False, True, True, True, False]
        assert (len(output.written), output.n_failed) == (3, 3)
        output.append([(1, answer(1))])
    assert out.read_bytes() == before


@pytest.mark.parametrize("whole", [b"", line_bytes(answer(1))], ids=["first line", "second line"])
def test_half_a_line_and_what_a_power_failure_left_behind_it_are_cut_off(out, whole):
    line = line_bytes(answer(2))
    for left in (b"", line[:1], line[:30], line[:-2], b"\0" * 5000, line[:30] + b"\0" * 5000):
        out.write_bytes(whole + left)
        with OutputFile(out, BATCH) as output:
            assert (1 in output.written, 2 in output.written) == (whole != b"", False)
        assert out.read_bytes() == whole


def test_a_whole_last_line_without_its_line_end_is_kept(out):
    """Some editors omit it, and the answer has left Redis already."""
    with OutputFile(out, BATCH) as output:
        output.append([(1, answer(1)), (2, answer(2))])
    whole = out.read_bytes()
    out.write_bytes(whole.rstrip(b"\n"))
    with OutputFile(out, BATCH) as output:
        assert (len(output.written), output.n_failed) == (2, 2)
        output.append([(3, answer(3))])
    assert out.read_bytes() == whole + line_bytes(answer(3))


def test_answers_of_a_killed_process_are_on_the_disk_before_they_count(out, monkeypatch):
    """An earlier process may have died between its write and its sync."""
    with OutputFile(out, BATCH) as output:
        output.append([(1, answer(1))])
    synced = []
    monkeypatch.setattr("stoker.batch.output_file.os.fsync", synced.append)
    with OutputFile(out, BATCH) as output:
        assert len(output.written) == len(synced) == 1


@pytest.mark.parametrize(
    "text",
    ["my notes\n", "my notes", '{"id": "mine"}\n', "[1]\n", '{"a": 1}', '{\n  "a": 1\n}', '{"a": 1}\n{"b": 2}'],
)
def test_a_file_of_something_else_is_refused_and_left_as_it_is(out, text):
    out.write_text(text)
    with pytest.raises(OutputRefused, match=r"out\.jsonl"):
        OutputFile(out, BATCH)
    assert out.read_text() == text


def test_the_file_of_another_batch_is_refused_and_so_is_a_device(out):
    other = batch_for("nightly", fingerprint_of("changed", []))
    with OutputFile(out, other) as output:
        output.append([(1, answer(1, batch=other))])
    with pytest.raises(OutputRefused, match=f"{other}.*{BATCH}"):
        OutputFile(out, BATCH)
    with pytest.raises(OutputRefused, match="/dev/null"):
        OutputFile(Path("/dev/null"), BATCH)


@pytest.mark.skipif(sys.platform == "darwin", reason="APFS has only names of UTF-8")
def test_a_path_that_is_no_text_is_shown_as_well_as_can_be(tmp_path):
    with OutputFile(tmp_path / os.fsdecode(b"out \xff.jsonl"), BATCH) as output:
        assert output.identity.encode().endswith(b"/out ?.jsonl")


def test_two_processes_do_not_write_to_one_file(out):
    with OutputFile(out, BATCH), pytest.raises(OutputRefused, match="another process"):
        OutputFile(out, BATCH)
    with OutputFile(out, BATCH):
        pass
