"""A file of prompts: what each line asks, and the batch that a template makes of it."""

import pytest

from stoker.api.fields import BodyOptions
from stoker.batch.input_file import BadLine, InputFile
from stoker.batch.json_lines import JsonLines
from stoker.batch.prompts import PromptLines, Prompts


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes('\ufeffone\r\n\n{"custom_id": "x"}\n{"custom_id": "x"}\n'.encode() + b"\xff\nthe  last")
    return path


def asked(lines, number):
    line = lines.line(number, BodyOptions(any_model=True))
    [message] = line.request.messages
    return line.custom_id, message.role, message.content


def test_each_line_is_a_chat_message_word_for_word_with_the_lines_number_as_its_id(path):
    with InputFile(PromptLines(JsonLines(path), Prompts())) as lines:
        assert (lines.n_lines, lines.n_requests) == (6, 5)
        assert [asked(lines, number) for number in (1, 3, 4, 6)] == [
            ("1", "user", "one"),
            ("3", "user", '{"custom_id": "x"}'),
            ("4", "user", '{"custom_id": "x"}'),
            ("6", "user", "the  last"),
        ]
        with pytest.raises(BadLine, match="line 5: not UTF-8 text"):
            lines.line(5, BodyOptions(any_model=True))


def test_the_template_has_the_prompt_in_each_of_its_places(path):
    with InputFile(PromptLines(JsonLines(path), Prompts("A {}\nand {{}}.", 0.5, "m"))) as lines:
        assert asked(lines, 1)[2] == "A one\nand {one}."
        request = lines.line(1, BodyOptions(max_tokens=7)).request
        assert (request.model, request.temperature, request.max_tokens) == ("m", 0.5, 7)
