"""One answered line as an example: what is taught, which answers teach nothing, and which prompts count as the same."""

import hashlib
from collections import Counter

import pytest
from tests.producer.batch.taught_lines import answered, asked, read, user

from stoker.batch.training_example import NoExample, TrainingExample, example_of
from stoker.openai.fields import TEXT_URL

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


def example(line, answer=None):
    return example_of(read(line), (answer or answered(1))["response"]["body"])


def called(call_id, arguments='{"order": 7}'):
    function = {"name": "look_up", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [
        {"id": call_id, "type": "function", "function": function}]}  # fmt: skip


def place(share):
    return TrainingExample("m", "t", {}, 0, int(share * 2**64))


def test_a_chat_teaches_its_answer_after_its_messages():
    parts = user([{"type": "text", "text": "Is it "}, {"type": "text", "text": "late?"}])
    found = example(asked(1, {"role": "developer", "content": "Be brief."}, parts), answered(1, task="replies"))
    assert found.row == {"messages": [
        {"role": "system", "content": "Be brief."}, user("Is it late?"), {"role": "assistant", "content": "Yes."}
    ]}  # fmt: skip
    assert (found.model, found.task) == ("large", "replies")


def test_a_call_is_taught_as_templates_render_it():
    call = {"id": "call_2", "function": {"name": "look_up", "arguments": '{"order": 8}'}}
    answer = answered(1, answer="", tool_calls=[call], finish_reason="tool_calls", reasoning="Order 8 is next.")
    tool = {"role": "tool", "content": "late", "tool_call_id": "call_1"}
    found = example(asked(1, "And 7?", called("call_1"), tool, "And 8?", tools=TOOLS), answer)
    _, before, _, _, last = found.row["messages"]
    assert [(message["content"], message["tool_calls"][0]["function"]) for message in (before, last)] == [
        ("", {"name": "look_up", "arguments": {"order": 7}}), ("", {"name": "look_up", "arguments": {"order": 8}})
    ]  # fmt: skip
    assert last["reasoning_content"] == "Order 8 is next."
    assert found.row["tools"] == TOOLS


def test_arguments_that_are_no_object_and_tools_that_were_not_offered_are_left_as_they_were():
    found = example(asked(1, "And 7?", called("call_1", "[7"), "Now?", tools=TOOLS, tool_choice="none"))
    assert found.row["messages"][1]["tool_calls"][0]["function"]["arguments"] == "[7"
    assert "tools" not in found.row


def test_the_class_is_that_of_the_verdict_else_the_callers_else_made_of_features():
    line = asked(1, "Is it?", task="replies")
    tasks = [example(line, answered(1, task="checked")), example(line), example(asked(1, "Is it?"))]
    assert [each.task for each in tasks] == ["checked", "replies", "short/latin"]


@pytest.mark.parametrize(
    ("line", "answer", "reason"),
    [
        (asked(1, "Is it?"), answered(1, finish_reason="length"), "cut off"),
        (asked(1, "Is it?"), answered(1, accepted=False), "rejected by a check"),
        (asked(1, "Now?", context="append", user="a"), answered(1), "continuing a stored conversation"),
    ],
)
def test_an_answer_that_should_not_be_copied_teaches_nothing(line, answer, reason):
    with pytest.raises(NoExample, match=reason):
        example(line, answer)


def test_a_text_without_a_chat_teaches_nothing():
    line = asked(1, url=TEXT_URL, prompt="Once")
    del line["body"]["messages"]
    with pytest.raises(NoExample, match="not a chat"):
        example(line, answered(1, url=TEXT_URL))


def test_a_check_decides_alone_on_an_answer_of_one_word():
    found = example(asked(1, "Is it?"), answered(1, "yes", finish_reason="length", accepted=True))
    assert found.row["messages"][-1]["content"] == "yes"


def test_prompts_that_differ_in_white_space_and_case_are_the_same():
    keys = [example(asked(1, text)).prompt_key for text in ("Is it late?", " is IT\n\tlate? ", "Is it  late")]
    assert keys[0] == keys[1] != keys[2]
    keys = [example(asked(1, "And 7?", called(x), "Now?", tools=TOOLS)).prompt_key for x in ("call_1", "call_2")]
    assert keys[0] == keys[1] != example(asked(1, "And 7?", called("call_1", "{}"), "Now?", tools=TOOLS)).prompt_key


def test_the_turns_of_an_agent_are_held_out_together_and_examples_in_a_prompt_do_not_count_as_turns():
    later = (called("call_1"), {"role": "tool", "content": "late", "tool_call_id": "call_1"}, "And 8?")
    turns = [example(asked(1, "And 7?", *more, user="agent", tools=TOOLS)) for more in ((), later)]
    assert turns[0].split_key == turns[1].split_key
    assert turns[0].prompt_key != turns[1].prompt_key
    shots = ("good book", {"role": "assistant", "content": "positive"})
    apart = [example(asked(1, *shots, text)) for text in ("bad book", "new book")]
    assert apart[0].split_key != apart[1].split_key


def test_a_larger_share_takes_from_train_alone():
    assert [place(x).part(0.1) for x in (0.0, 0.04, 0.06, 0.94, 0.96)] == ["valid", "valid", "train", "train", "test"]
    assert [place(x).part(0.2) for x in (0.04, 0.06, 0.94, 0.96)] == ["valid", "valid", "test", "test"]
    assert {place(x).part(0.0) for x in (0.0, 0.5, 1 - 2**-53)} == {"train"}


def test_the_held_out_share_is_that_of_the_prompts():
    prompts = (hashlib.sha256(str(n).encode()).hexdigest() for n in range(1500))
    parts = Counter(example(asked(1, text)).part(0.2) for text in prompts)
    assert all(0.07 < parts[part] / 1500 < 0.13 for part in ("valid", "test"))
