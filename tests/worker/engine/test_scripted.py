"""The scripted engine's texts can be read as they grow, with characters and stop strings that cross tokens."""

import re
from typing import Any

import pytest
from tests.worker.engine.reading import read_along

from stoker_shared import Message, build_request
from stoker_shared.errors import GuideRefused, TemplateError
from stoker_worker.engine.scripted import END, ScriptedEngine, ScriptedProvider, ScriptedTokenizer
from stoker_worker.ports import GenerationWork

RIVER = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "length_km": {"type": "integer", "minimum": 100},
        "kinds": {"type": "array", "items": {"enum": ["long", "wild"]}, "minItems": 1},
    },
    "required": ["name", "length_km", "kinds"],
    "additionalProperties": False,
}
WHOLE = '{"name": "Oder", "length_km": 840, "kinds": ["wild"]}'
AS_RIVER = {"response_format": {"type": "json_schema", "json_schema": {"name": "river", "schema": RIVER}}}
TOOLS = [
    {"type": "function", "function": {"name": "river", "parameters": RIVER}},
    {"type": "function", "function": {"name": "end", "parameters": {}}},
]
A_CALL = f'<tool_call>{{"name": "river", "arguments": {WHOLE}}}</tool_call>'
NO_END = '<tool_call>{"name": "end", "arguments": {}}</tool_call>'
MUST_CALL = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "river"}}}


def work(prompt, **fields):
    request = build_request({"agent_id": "a", "prompt": prompt, "max_tokens": 400, **fields})
    return GenerationWork(request, tuple(prompt.encode()))


def test_texts_grow_by_whole_characters_and_never_show_a_stop_string():
    engine = ScriptedEngine(max_batch=2, steps_per_s=1e9)
    works = [work("say héllo \U0001f469\u200d\U0001f4bb"), work("say a <s<st><stop>b", stop=["<stop>"]), work("x")]
    done, read, stages = read_along(engine, works)
    assert [one.text for one in done[:2]] == ["héllo \U0001f469\u200d\U0001f4bb", "a <s<st>"]
    assert stages[2][0] == "waiting"
    assert stages[2][-1] == "decode"
    assert "\ufffd" not in "".join(read[0])
    assert not any(text.endswith("<") for text in read[1])
    assert (
        max(len(text) for text in read[2]) == len(done[2].text) - 1
    )  # the last character comes in the step that ends it


@pytest.mark.parametrize("max_tokens", [400, len("ab\ufffd".encode())])
def test_a_stop_string_that_is_the_end_of_an_answer_is_found_in_it(max_tokens):
    engine = ScriptedEngine(max_batch=1, steps_per_s=1e9)
    ((done, *_), *_) = read_along(engine, [work("say ab\ufffd", stop=["\ufffd"], max_tokens=max_tokens)])
    assert (done.text, done.ended_by, done.kept) == ("ab", "stop", 2)


def test_a_stop_string_before_a_stop_token_in_the_middle_of_a_character_is_found():
    engine = ScriptedEngine(max_batch=1, steps_per_s=1e9)
    ended = {"stop": ["b\ufffd"], "stop_token_ids": ["é".encode()[-1]]}
    ((done, *_), *_) = read_along(engine, [work("say abé", **ended)])
    assert (done.text, done.stop_string, done.ended_by, done.kept) == ("a", "b\ufffd", "stop", 1)


def test_an_answer_with_an_end_in_it_goes_on_and_a_question_with_one_is_refused():
    tokenizer = ScriptedTokenizer()
    answer = Message(role="assistant", content=tokenizer.decode([*b"a", END, *b"a"]))
    options: dict[str, Any] = {"add_generation_prompt": False, "tools": None, "template_kwargs": None}
    assert END in tokenizer.encode_rendered(tokenizer.render([answer], **options))
    with pytest.raises(TemplateError):
        tokenizer.render([answer.model_copy(update={"role": "user"})], **options)


def guided(said, **fields):
    """The scripted model's answer, which has to end by itself."""
    engine, model = ScriptedProvider(max_batch=1, steps_per_s=1e9).load()
    request = build_request({"messages": [{"role": "user", "content": said}], "max_tokens": 2000, **fields})
    options: dict[str, Any] = {"add_generation_prompt": True, "tools": None, "template_kwargs": None}
    ids = tuple(model.tokenizer.encode_rendered(model.tokenizer.render(request.messages or (), **options)))
    assert request.is_guided
    ((done,), *_) = read_along(engine, [GenerationWork(request, ids, guide=model.guides.guide_for(request, ids))])
    assert (done.outcome, done.ended_by) == ("finished", "eos")
    return done.text


@pytest.mark.parametrize(
    ("said", "fields", "text"),
    [
        (f"say {WHOLE}", AS_RIVER, re.escape(WHOLE)),
        (f"say <think>hm</think>{WHOLE}", AS_RIVER, re.escape(f"<think>hm</think>{WHOLE}")),
        ("say Oder", AS_RIVER, r'{"name":"Oder","length_km":\d{3},"kinds":\["(long|wild)"\]}'),
        ('say {"name": "Oder"}', AS_RIVER, r'{"name": "Oder","length_km":\d{3},"kinds":\["(long|wild)"\]}'),
        ("a river", AS_RIVER, r'{"name":"[0-9a-f]{4}","length_km":\d{3},"kinds":\["(long|wild)"\]}'),
        ("say no", {"guide": {"choice": ["yes", "no"]}}, "no"),
        ("say perhaps", {"guide": {"choice": ["yes", "no"]}}, "yes|no"),
        ("x", {"guide": {"regex": "(a|b)*c"}}, "[ab]*c"),
        ("x", {"guide": {"regex": ".*z"}}, ".*z"),
        ("x", {"guide": {"lark": 'start: "(" start ")" | "é"'}}, r"\(*é\)*"),
        ("x", {"guide": {"regex": r"[a-z0-9._]{1,900}@[a-z]+\.(com|org)"}}, r"[a-z0-9._]{1,50}@[a-z]{1,50}\.(com|org)"),
        ("x", {"guide": {"lark": 'start: N ("+" N)+\nN: /[0-9]+/'}}, r"\d{1,50}(\+\d{1,50})+"),
        ("say Oder", MUST_CALL, r'<tool_call>{"name": "river", "arguments": {"name":"Oder",.*}}\s?</tool_call>'),
        (f"say <think>hm</think>{A_CALL}", MUST_CALL, re.escape(A_CALL)),
        ("x", {"tools": TOOLS, "tool_choice": "required"}, '<tool_call>{"name": "(river|end)", .*}\\s?</tool_call>'),
        (f"say {NO_END}{NO_END}", {"tools": TOOLS, "parallel_tool_calls": False}, re.escape(NO_END)),
        ("say <think>a long thought</think>yes", {"max_reasoning_tokens": 6}, "<think>a long</think>yes"),
    ],
)
def test_an_answer_has_the_form_that_is_asked_for_and_as_much_of_the_text_as_fits(said, fields, text):
    assert re.fullmatch(text, guided(said, **fields), re.DOTALL)


def test_an_answer_whose_grammar_cannot_go_on_fails():
    engine, model = ScriptedProvider(max_batch=1, steps_per_s=1e9).load()
    one = work("x", guide={"choice": ["a"]})
    guide = model.guides.guide_for(one.request, one.prompt_ids)
    guide.error = GuideRefused("nothing may follow here")
    ((done,), *_) = read_along(engine, [GenerationWork(one.request, one.prompt_ids, guide=guide)])
    assert done.outcome == "failed"
    assert done.error is guide.error
