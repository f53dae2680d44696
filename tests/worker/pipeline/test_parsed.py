"""The value of a JSON answer: there for a whole one, absent for one that was cut off or is none."""

import pytest

from stoker_shared import build_request
from stoker_worker.pipeline.parsed import parsed_answer
from stoker_worker.ports import CompletedGeneration

OBJECT = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("fields", "ended_by", "content", "value"),
    [
        (OBJECT, "eos", ' {"a": [1, null]}\n', {"a": [1, None]}),
        (OBJECT, "length", '{"a": 1}', None),
        (OBJECT, "stop", '{"a": 1}', None),
        (OBJECT, "eos", "a scripted answer", None),
        (OBJECT, "eos", '{"a": NaN}', None),
        (OBJECT, "eos", "[" * 100_000, None),
        ({"response_format": {"type": "text"}}, "eos", "{}", None),
        ({"guide": {"regex": "[0-9]+"}}, "eos", "12", None),
    ],
)
def test_only_a_whole_answer_that_had_to_be_json_has_a_value(fields, ended_by, content, value):
    request = build_request({"prompt": "x", **fields})
    end = CompletedGeneration(0, "finished", (1,), content, ended_by)
    assert parsed_answer(request, end, content) == value
