"""Bad lines: every reason to refuse a line, and the parts of it that the error has."""

import json
from typing import Any

import pytest

from stoker.api.chat import CHAT_URL, TEXT_URL
from stoker.api.fields import BodyOptions
from stoker.batch.input_file import BadLine, read_line

GOOD: dict[str, Any] = {
    "custom_id": "one",
    "method": "POST",
    "url": CHAT_URL,
    "body": {"model": "m", "messages": [{"role": "user", "content": "x"}], "user": "a"},
}


def raw(**changes):
    return json.dumps({name: value for name, value in {**GOOD, **changes}.items() if value is not ...}).encode()


def test_a_good_line_becomes_a_request():
    line = read_line(7, raw(), BodyOptions())
    assert (line.number, line.custom_id, line.url) == (7, "one", CHAT_URL)
    assert (line.request.session, line.request.model, line.request.temperature) == ("a", "m", 1.0)


BAD = {
    "half a line": (raw()[:-5], None, "invalid_json_line", None),
    "not UTF-8": (b'{"custom_id": "\xff"}', None, "invalid_json_line", None),
    "a list": (b"[]", None, "invalid_json_line", None),
    "nested too deeply": (b"[" * 100_000, None, "request_too_large", None),
    "many values": (b'{"custom_id": "x", "body": [' + b"0," * 2_000_000 + b"0]}", None, "request_too_large", None),
    "no custom_id": (raw(custom_id=...), None, "missing_required_parameter", "custom_id"),
    "a number as custom_id": (raw(custom_id=3), None, "missing_required_parameter", "custom_id"),
    "half a character": (raw(custom_id="\ud800"), None, "missing_required_parameter", "custom_id"),
    "endless custom_id": (raw(custom_id="x" * 513), None, "missing_required_parameter", "custom_id"),
    "no method": (raw(method=...), "one", "invalid_method", "method"),
    "embeddings": (raw(url="/v1/embeddings"), "one", "invalid_url", "url"),
    "a list as url": (raw(url=[]), "one", "invalid_url", "url"),
    "no body": (raw(body=...), "one", "missing_required_parameter", "body"),
    "a string as body": (raw(body="x"), "one", "missing_required_parameter", "body"),
    "a field beside": (raw(colour="red"), "one", "unknown_parameter", "colour"),
    "an unknown field": (raw(body={**GOOD["body"], "colour": 1}), "one", "unknown_parameter", "colour"),
    "one not served": (raw(body={**GOOD["body"], "audio": {}}), "one", "unsupported_parameter", "audio"),
    "an endless name": (raw(body={**GOOD["body"], "x" * 1000: 1}), "one", "unknown_parameter", "x" * 64),
    "out of range": (raw(body={**GOOD["body"], "top_p": 3}), "one", "invalid_value", "top_p"),
    "no role": (raw(body={**GOOD["body"], "messages": [{"content": "x"}]}), "one", "invalid_value", "messages"),
    "nothing to answer": (raw(body={"model": "m"}), "one", "invalid_value", None),
    "chat as text": (raw(url=TEXT_URL), "one", "unknown_parameter", "messages"),
}


@pytest.mark.parametrize(("line", "custom_id", "code", "param"), BAD.values(), ids=BAD)
def test_a_bad_line_is_named_by_its_number_and_its_fault(line, custom_id, code, param):
    with pytest.raises(BadLine, match=r"^line 12: ") as caught:
        read_line(12, line, BodyOptions())
    assert (caught.value.custom_id, caught.value.code, caught.value.param) == (custom_id, code, param)
