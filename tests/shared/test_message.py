"""Chat messages as SDKs send them: kept as text or refused by name, never changed silently."""

import pytest

from stoker_shared.errors import InvalidRequest
from stoker_shared.request import build_request

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}


def kept(*messages):
    request = build_request({"agent_id": "a", "messages": list(messages)})
    return [message.as_template_input() for message in request.messages]


def test_an_assistants_message_with_only_tool_calls_has_no_content():
    for silent in ({"content": None}, {}):
        (message,) = kept({"role": "assistant", "tool_calls": [CALL], **silent})
        assert message == {"role": "assistant", "tool_calls": [CALL]}


def test_a_list_without_calls_is_no_list():
    assert kept({"role": "assistant", "content": "x", "tool_calls": []}) == [{"role": "assistant", "content": "x"}]
    with pytest.raises(InvalidRequest, match="'content' must be given"):
        kept({"role": "assistant", "content": None, "tool_calls": []})


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "Look at "}, {"type": "text", "text": "this."}]
    assert kept({"role": "user", "content": parts}) == [{"role": "user", "content": "Look at this."}]
    assert kept({"role": "user", "content": []}) == [{"role": "user", "content": ""}]


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}, "'image_url' is not served"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "'input_audio' is not served"),
        ({"type": "file", "file": {"file_id": "f"}}, "'file' is not served"),
        ({"type": "text"}, "must have 'text'"),
        ({"type": "text", "text": 7}, "must have 'text'"),
        ({"text": "x"}, "must be objects with a 'type'"),
        ("x", "must be objects with a 'type'"),
    ],
)
def test_a_part_that_is_no_text_is_refused_by_name_and_not_quoted(part, named):
    with pytest.raises(InvalidRequest, match=r"^messages\.0: .*") as refused:
        kept({"role": "user", "content": [{"type": "text", "text": "a"}, part]})
    assert named in str(refused.value)
    assert "example.org" not in str(refused.value)


@pytest.mark.parametrize("field", ["audio", "function_call"])
def test_output_fields_count_for_nothing_when_they_hold_nothing_and_are_refused_when_they_do(field):
    assert kept({"role": "assistant", "content": "x", field: None}) == [{"role": "assistant", "content": "x"}]
    with pytest.raises(InvalidRequest, match=f"'{field}' is not served"):
        kept({"role": "assistant", "content": "x", field: {"id": "1"}})


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thinking_has_one_name(name):
    assert kept({"role": "assistant", "content": "x", name: "Hm."}) == [
        {"role": "assistant", "content": "x", "reasoning_content": "Hm."}
    ]
    assert kept({"role": "assistant", "content": "x", name: ""}) == [{"role": "assistant", "content": "x"}]


def test_a_refusal_is_the_assistants_answer():
    for message in ({"content": None, "refusal": "No."}, {"content": [{"type": "refusal", "refusal": "No."}]}):
        assert kept({"role": "assistant", **message}) == [{"role": "assistant", "content": "No."}]
    assert kept({"role": "assistant", "content": "x", "refusal": None})[0]["content"] == "x"
    with pytest.raises(InvalidRequest, match="'refusal' must be text, and not beside 'content'"):
        kept({"role": "assistant", "content": "x", "refusal": "No."})


def test_other_fields_are_refused_still():
    with pytest.raises(InvalidRequest, match=r"messages\.0\.colour"):
        kept({"role": "user", "content": "x", "colour": "red"})


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": "Blue."},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": "Blue.", "annotations": [
            {"type": "url_citation",
             "url_citation": {"start_index": 0, "end_index": 4, "title": "t", "url": "https://example.org"}}]},
    ],
)  # fmt: skip
def test_an_answer_dumped_by_the_openai_package_is_accepted(answer):
    chat = pytest.importorskip("openai.types.chat")
    message = chat.ChatCompletionMessage.model_validate(answer)
    said = answer["content"] or answer.get("refusal")
    for dumped in (message.model_dump(), message.model_dump(mode="json"), message.model_dump(exclude_none=True)):
        (back,) = kept(dumped)
        assert back.get("content") == said
        assert back.get("tool_calls") == answer.get("tool_calls")
