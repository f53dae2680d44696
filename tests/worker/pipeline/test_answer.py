"""An answer as it is read from a generated text, and the result that is made of it."""

import dataclasses
import json
import sys
import time

import pytest
from tests.support.in_memory.queue import InMemoryQueue
from tests.worker.pipeline.answers import SCRIPTED, answer_to
from tests.worker.pipeline.stages import MODEL, generated, loaded_job

from stoker_shared import Message, build_request
from stoker_shared.result import CacheReport, Choice
from stoker_worker.pipeline.answer import build_result, cache_report, parsed_answer, read_answer
from stoker_worker.pipeline.prompt import Prompt
from stoker_worker.ports import PLAIN_TEXT, CompletedGeneration, GenerationTiming, Restored, SequenceCache
from stoker_worker.ports.memory import OwnMessage, continues

FORM = SCRIPTED.answer_format
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def call(arguments='{"at": "sky"}', name="look", **fields):
    more = "".join(f', "{key}": "{value}"' for key, value in fields.items())
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}{more}}}</tool_call>'


def called(text, **fields):
    return answer_to(text, fields.pop("form", FORM), **{"tools": [TOOL], **fields}).choice


def test_thinking_is_split_off_without_tools_too():
    answer = answer_to("<think>\nOne.\n</think>\n\nTwo.", FORM)
    choice = answer.choice
    assert (choice.reasoning, choice.finish_reason, answer.reasoning_tokens) == ("One.", "stop", len("\nOne.\n"))
    assert (choice.text, choice.answer, choice.content) == ("<think>\nOne.\n</think>\n\nTwo.", "Two.", "Two.")


def test_an_answer_that_is_all_text_has_no_copy_of_it():
    answer = answer_to("  Two. ", FORM)
    assert answer.choice == Choice(text="  Two. ", finish_reason="stop")
    assert answer.message() == Message(role="assistant", content="  Two. ")


def test_thinking_that_the_template_opened_needs_no_first_marker():
    answer = answer_to("One.</think>Two.", FORM, opened="<think>\n")
    assert (answer.choice.reasoning, answer.choice.content, answer.reasoning_tokens) == ("One.", "Two.", len("One."))
    cut_off = answer_to("One.", FORM, opened="<think>\n", ended_by="length")
    assert (cut_off.choice.reasoning, cut_off.choice.content, cut_off.reasoning_tokens) == ("One.", "", len("One."))


def test_only_a_prompt_that_ends_in_open_thinking_opens_it():
    start, end = FORM.think_start_ids, FORM.think_end_ids
    assert FORM.state_after((1, *start, 10)) == "reasoning"
    assert FORM.state_after((1, *start, *end, 10)) == "normal"
    assert FORM.state_after((*start, *b"cut off, then a new turn")) == "normal"
    assert PLAIN_TEXT.state_after((1, 2)) == "normal"


def test_calls_are_in_openais_form_and_the_text_between_them_is_the_content():
    answer = called(f"<think>Hm.</think>I look. {call()}\n{call(name='go')}")
    assert [(x.type, x.function.name, x.function.arguments) for x in answer.tool_calls] == [
        ("function", "look", '{"at": "sky"}'),
        ("function", "go", '{"at": "sky"}'),
    ]
    assert (answer.finish_reason, answer.content, answer.reasoning) == ("tool_calls", "I look.", "Hm.")


def test_an_answer_with_at_most_one_call_keeps_the_first():
    answer = called(f"I look. {call()}{call(name='go')}", parallel_tool_calls=False)
    assert [x.function.name for x in answer.tool_calls] == ["look"]
    assert (answer.finish_reason, answer.content) == ("tool_calls", "I look.")
    assert called("No.", parallel_tool_calls=False).finish_reason == "stop"


PLAIN_CALL = '{"name": "look", "arguments": {"at": "</tool_call> <think>"}}'


@pytest.mark.parametrize("form", [FORM, dataclasses.replace(FORM, tool_start=None, parse_call=None), PLAIN_TEXT])
@pytest.mark.parametrize("text", [PLAIN_CALL, f"<tool_call>{PLAIN_CALL}</tool_call>"], ids=["plain", "marked"])
@pytest.mark.parametrize("thought", ["", "<think>I look. </think>\n"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}], ids=str)
def test_an_answer_that_has_to_be_a_call_is_one_with_its_markers_or_without(form, text, thought, choice):
    if (thought and form is PLAIN_TEXT) or ("<tool_call>" in text and form is not FORM):
        pytest.skip("this model has no such markers")
    answer = called(thought + text, form=form, tool_choice=choice)
    assert [json.loads(x.function.arguments) for x in answer.tool_calls] == [{"at": "</tool_call> <think>"}]
    assert (answer.finish_reason, answer.content, answer.tool_error) == ("tool_calls", "", None)
    assert answer.reasoning == ("I look." if thought else None)
    opened = called("Hm.</think>" + text, form=form, tool_choice=choice, opened="<think>") if thought else answer
    assert opened.tool_calls == answer.tool_calls


@pytest.mark.parametrize(
    ("text", "ended_by", "why"),
    [
        (PLAIN_CALL[:-5], "length", "cut off"),
        (call().removesuffix("</tool_call>"), "length", "cut off"),
        ("I cannot.", "eos", "JSONDecodeError"),
        ('{"name": "look", "arguments": 1}', "eos", "object"),
    ],
)
def test_an_answer_that_has_to_be_a_call_and_is_none_stays_text_with_the_reason(text, ended_by, why):
    answer = called(text, tool_choice="required", ended_by=ended_by)
    assert (answer.content, answer.tool_calls) == (text, None)
    assert why in (answer.tool_error or "")


def test_text_beside_a_call_is_the_content_and_a_json_object_is_no_call_unless_there_has_to_be_one():
    answer = called(f"I look. {call()}", tool_choice="required")  # a scripted model follows no grammar
    assert (answer.content, len(answer.tool_calls)) == ("I look.", 1)
    assert called(PLAIN_CALL, form=PLAIN_TEXT).tool_calls is None


def test_ids_of_calls_are_the_same_for_the_same_delivery_and_unique_in_the_conversation():
    text = call() + call() + call(id="own") + call(id="own")
    ids = [x.id for x in called(text).tool_calls]
    assert ids == [x.id for x in called(text).tool_calls]
    assert len(set(ids)) == 4
    assert ids[2] == "own"
    assert len(ids[0]) == 9
    assert ids[0].isalnum()
    assert ids[0] != called(text, id_seed="another").tool_calls[0].id
    earlier = Message(role="assistant", tool_calls=({"id": ids[0]}, {"id": "own"}))
    later = called(text, prompt=Prompt((), (earlier,), None))
    assert {x.id for x in later.tool_calls}.isdisjoint({ids[0], "own"})


@pytest.mark.parametrize(
    "fields", [{"tools": None}, {"tools": []}, {"tool_choice": "none"}, {"form": PLAIN_TEXT}], ids=str
)
def test_calls_stay_text_unless_tools_are_offered_to_a_model_with_a_parser(fields):
    answer = called(call(), **fields)
    assert (answer.content, answer.tool_calls, answer.tool_error, answer.finish_reason) == (call(), None, None, "stop")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<tool_call>{oops}</tool_call>", "JSONDecodeError"),
        ('<tool_call>{"arguments": {}}</tool_call>', "'name'"),
        ("<tool_call>[]</tool_call>", "no call"),
        (call("[1]"), "object"),
        (call('"[1]"'), "object"),
        (call('{"x": NaN}'), "JSON"),
        ('<tool_call>{"name": "\\ud800"}</tool_call>', "surrogates"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "RecursionError"),
        (call(f'{{"x": {"[" * 500}{"]" * 500}}}'), "nested"),
        ('<tool_call>{"name": "unknown", "arguments": {}}', "no end"),
    ],
    ids=range(10),
)
def test_what_does_not_parse_stays_text_with_the_reason(text, why):
    answer = called(f"Well. {text}")
    assert (answer.content, answer.tool_calls, answer.finish_reason) == (f"Well. {text}", None, "stop")
    assert why in (answer.tool_error or "")
    sound = called(f"{call()} {text}")
    assert (sound.content, len(sound.tool_calls), sound.finish_reason) == (text, 1, "tool_calls")


def test_arguments_are_json_text_whatever_is_in_them():
    for arguments in ('{"x": "\\ud800é"}', '{"x": [{}]}', '"{\\"x\\": 1}"', '{"x": "日本"}'):
        (found,) = called(call(arguments)).tool_calls
        found.model_dump_json()
        expected = json.loads(arguments)
        assert json.loads(found.function.arguments) == (json.loads(expected) if type(expected) is str else expected)
    assert "日本" in called(call('{"x": "日本"}')).tool_calls[0].function.arguments


def test_a_number_that_no_double_holds_is_the_nearest_one_that_does():
    (found,) = called(call('{"x": [1e999, -1e999, 2.5]}')).tool_calls
    assert json.loads(found.function.arguments) == {"x": [sys.float_info.max, -sys.float_info.max, 2.5]}


@pytest.mark.parametrize("own", ["\\ud800", "x" * 65, "a\\nb"])
def test_an_id_of_the_models_that_no_message_can_carry_is_replaced(own):
    (found,) = called(call(id=own)).tool_calls
    found.model_dump_json()
    assert len(found.id) == 9


def test_a_call_without_its_end_counts_unless_max_tokens_cut_it_off():
    text = call().removesuffix("</tool_call>")
    assert len(called(text).tool_calls) == 1
    cut_off = called(text, ended_by="length")
    assert (cut_off.tool_calls, cut_off.content, cut_off.finish_reason) == (None, text, "length")
    assert "max_tokens" in (cut_off.tool_error or "")
    assert called(call() + "and", ended_by="length").finish_reason == "length"


def test_a_call_in_thinking_is_a_thought_once_the_model_closes_the_thinking():
    answer = called(f"<think>Perhaps {call()}?</think>No.")
    assert (answer.tool_calls, answer.reasoning, answer.content) == (None, f"Perhaps {call()}?", "No.")
    unclosed = answer_to(f"<think>I must.{call()}", FORM, tools=[TOOL])
    choice, (_,) = unclosed.choice, unclosed.choice.tool_calls or []
    assert (choice.reasoning, choice.content, unclosed.reasoning_tokens) == ("I must.", "", len("I must."))
    mentioned = called("<think>The marker <tool_call> begins a call, and so on", ended_by="length")
    assert (mentioned.content, mentioned.tool_calls) == ("", None)


def test_many_calls_that_never_end_are_read_once():
    tried = []

    def parse(text, _tools):
        tried.append(len(text))
        raise ValueError

    form = dataclasses.replace(FORM, parse_call=parse)
    assert called("<tool_call>" * 1000, form=form).content == "<tool_call>" * 1000
    assert len(tried) == 1


def test_more_calls_than_a_message_can_have_stay_text():
    answer = answer_to(call() * 1001, FORM, tools=[TOOL])
    assert (len(answer.choice.tool_calls or ()), answer.choice.content) == (1000, call())
    assert "1000" in (answer.choice.tool_error or "")
    assert len(answer.message().tool_calls or ()) == 1000


def test_a_producers_copy_of_an_answer_continues_it():
    stored = answer_to(f"<think>Hm.</think>{call()}", FORM, tools=[TOOL]).message()
    assert isinstance(stored, OwnMessage)
    copy = Message(role="assistant", content=None, tool_calls=stored.tool_calls)
    assert continues(copy, stored)
    assert continues(copy.model_copy(update={"reasoning_content": "Hm."}), stored)
    assert continues(Message(role="assistant", content=stored.generated), stored)
    assert not continues(copy.model_copy(update={"tool_calls": ()}), stored)
    assert not continues(Message(role="assistant", content="else"), stored)
    assert "generated" not in stored.as_template_input()


OBJECT = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("fields", "ended_by", "content", "value"),
    [
        (OBJECT, "eos", ' {"a": [1, null]}\n', {"a": [1, None]}),
        (OBJECT, "length", '{"a": 1}', None),
        (OBJECT, "stop", '{"a": 1}', None),
        (OBJECT, "eos", "a scripted answer", None),
        (OBJECT, "eos", '{"a": NaN}', None),
        (OBJECT, "eos", '{"a": -1e999}', {"a": -sys.float_info.max}),
        (OBJECT, "eos", "[" * 100_000, None),
        (OBJECT, "eos", '{"a": ' * 300 + "1" + "}" * 300, None),
        (OBJECT, "eos", '{"\\ud83d": 1}', None),
        ({"response_format": {"type": "text"}}, "eos", "{}", None),
        ({"guide": {"regex": "[0-9]+"}}, "eos", "12", None),
    ],
)
def test_only_a_whole_answer_that_had_to_be_json_has_a_value(fields, ended_by, content, value):
    request = build_request({"prompt": "x", **fields})
    end = CompletedGeneration(0, "finished", (1,), content, ended_by)
    assert parsed_answer(request, end, content) == value


def report(restored: Restored, cached_tokens: int) -> CacheReport:
    job = loaded_job(InMemoryQueue(), "a")
    job.restored = restored
    return cache_report(job, generated(cached_tokens=cached_tokens).completion, agent_version=2, saved=True)


@pytest.mark.parametrize("source", ["disk", "memory"])
def test_a_used_cache_is_reported_and_one_lost_in_a_failed_step_is_not(source):
    found = report(Restored(SequenceCache(2, ()), source, miss_reason="block_missing"), 2)
    assert (found.source, found.miss_reason) == (source, "block_missing")
    lost = report(Restored(SequenceCache(2, ()), source), 0)
    assert (lost.source, lost.miss_reason) == ("none", "step_broke")


def test_the_wait_for_the_engine_counts_toward_the_first_token():
    """A loaded job waited for a second, because the engine was in a long step."""
    job = loaded_job(InMemoryQueue(), "a")
    enqueued_at = job.claimed.enqueued_at
    job.submitted_at = enqueued_at + 1.0
    done = generated(timing=GenerationTiming(waited_s=0.25, prefill_s=0.5, decode_s=0.125)).completion
    answer = read_answer(job.request, job.prompt, done, MODEL, "seed")
    timing = build_result(job, done, [answer], MODEL, CacheReport()).timing
    assert timing.first_token_s == pytest.approx(1.75, abs=1e-3)
    assert (timing.prefill_s, timing.decode_s) == (0.5, 0.125)
    assert timing.total_s <= time.time() - enqueued_at + 1e-3
