"""Anthropic's Messages without a server: fields, conversations, answers and events, with its package's types."""

import json
import typing
from contextlib import suppress
from typing import Any

import pytest
from anthropic.types import RawMessageStreamEvent
from anthropic.types import message_create_params as params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_params
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from tests.producer.played_worker import result_fields

from stoker.api.deltas import Delta, Deltas
from stoker.api.failure import Failure, FieldRefused, of_worker
from stoker.api.fields import BodyOptions, session_name
from stoker.api.messages import COUNT_URL, MESSAGES, MESSAGES_URL, TOKEN_COUNT
from stoker.serve.intake import CallHead, call_jobs
from stoker.serve.settings import ServeSettings
from stoker_shared.errors import RequestError
from stoker_shared.request import build_request
from stoker_shared.result import GenerationResult, ToolCall

ASKED = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "d", "input_schema": SCHEMA}
OURS = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}

COPIED: dict[str, Any] = {
    "max_tokens": 7, "temperature": 0.5, "top_p": 0.5, "context": "full", "cache": "off", "cache_salt": "s",
    "expect_version": 3, "must_exist": False, "task": "replies", "seed": 3, "min_p": 0.1, "repetition_penalty": 1.1,
}  # fmt: skip
IGNORED: dict[str, Any] = {
    "cache_control": {"type": "ephemeral"}, "service_tier": "auto", "inference_geo": "us", "speed": "fast",
    "betas": ["b"], "diagnostics": {}, "user_profile_id": "u", "workspace_id": "w", "billing_policy": {},
    "fallback_credit_token": "t", "fallbacks": [],
}  # fmt: skip

# field: values that are served, each with its outcome; values that are refused
CASES: dict[str, tuple[list[tuple[Any, dict[str, Any]]], list[Any]]] = {
    **{name: ([(value, {name: value})], []) for name, value in COPIED.items()},
    **{name: ([(value, {})], []) for name, value in IGNORED.items()},
    "model": ([("m", {"model": "m"})], [3]),
    "metadata": (
        [
            ({"user_id": "u"}, {"session": "u"}),
            ({"user_id": "user_7_account__session_1-2"}, {"session": "1-2"}),
            ({"user_id": '{"device_id": "d", "session_id": "1-2"}'}, {"session": "1-2"}),
            ({"user_id": '{"session_id": 3}'}, {}),
            ({"user_id": "\n"}, {"session": session_name("\n")}),
            ({"user_id": ""}, {}),
            ({"user_id": None}, {}),
        ],
        ["u"],
    ),
    "tools": (
        [
            ([TOOL], {"tools": [OURS]}),
            ([{**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}, "strict": True}], {"tools": [OURS]}),
            ([{"type": "tool_search_tool_bm25_20251119", "name": "s"}, TOOL], {"tools": [OURS]}),
            ([], {}),
        ],
        [
            [{"type": "web_search_20250305", "name": "web_search"}],
            [{"type": "bash_20250124", "name": "bash"}],
            [{"name": "f"}],
            [{"input_schema": {}}],
            [7],
            {},
        ],
    ),
    "tool_choice": (
        [
            ({"type": "auto"}, {"tool_choice": "auto"}),
            (
                {"type": "auto", "disable_parallel_tool_use": True},
                {"tool_choice": "auto", "parallel_tool_calls": False},
            ),
            ({"type": "any", "disable_parallel_tool_use": False}, {"tool_choice": "required"}),
            ({"type": "none"}, {}),
            (
                {"type": "tool", "name": "weather"},
                {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
            ),
        ],
        ["auto", {}, {"type": "tool"}, {"type": "all"}, {"type": ["auto"]}],
    ),
    "thinking": (
        [
            ({"type": "adaptive", "display": "omitted"}, {}),
            (
                {"type": "enabled", "budget_tokens": 2048},
                {"max_reasoning_tokens": 2048, "chat_template_kwargs": {"enable_thinking": True}},
            ),
            ({"type": "disabled"}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ],
        [{"type": "enabled"}, {"type": "enabled", "budget_tokens": True}, {"type": "deep"}, "adaptive"],
    ),
    "output_config": (
        [
            ({"effort": "max"}, {"chat_template_kwargs": {"reasoning_effort": "high", "enable_thinking": False}}),
            (
                {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": None},
                {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
            ),
        ],
        [{"effort": "huge"}, {"effort": {}}, {"task_budget": {"total": 3}}, {"format": {"type": "xml"}}],
    ),
    "output_format": (
        [
            (
                {"type": "json_schema", "schema": SCHEMA},
                {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
            )
        ],
        [],
    ),
    "context_management": (
        [({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, {}), ({}, {})],
        [{"edits": [{"type": "clear_tool_uses_20250919"}]}, {"edits": [{"type": "compact_20260112"}]}, {"edits": 3}],
    ),
    "chat_template_kwargs": (
        [({"k": 1}, {"chat_template_kwargs": {"k": 1, "enable_thinking": False}})],
        [],
    ),
    "stop_sequences": ([(["x", "y"], {"stop": ["x", "y"]}), ([], {"stop": []})], []),
    "top_k": ([(4, {"top_k": 4}), (-1, {}), (0, {})], []),
    "container": ([], ["c"]),
    "mcp_servers": ([([], {})], [[{"name": "n"}]]),
    "compaction": ([], [{}]),
    "thread": ([], [{"type": "create"}]),
}
NEEDS: dict[str, dict[str, Any]] = {
    "tool_choice": {"tools": [OURS]},
    "expect_version": {"agent_id": "a", "context": "append"},
}
SERVED = [(name, *case) for name, (served, _) in CASES.items() for case in served]
REFUSED = [(name, value) for name, (_, refused) in CASES.items() for value in refused]


def body(**fields):
    return {"model": "m", "max_tokens": 9, "messages": ASKED, **fields}


def read(endpoint=MESSAGES, **fields):
    return endpoint.read(body(**fields), BodyOptions()).request


def test_every_field_of_anthropics_types_has_a_rule_and_every_rule_a_case():
    theirs = set(typing.get_type_hints(params.MessageCreateParamsNonStreaming))
    theirs |= set(typing.get_type_hints(beta_params.MessageCreateParamsNonStreaming))
    theirs |= set(typing.get_type_hints(beta_count_params.MessageCountTokensParams))
    assert theirs - {"messages", "system", "stream"} <= set(MESSAGES.rules)
    assert set(CASES) == set(MESSAGES.rules)


@pytest.mark.parametrize(("name", "value", "expected"), SERVED)
def test_a_field_that_is_served_becomes_a_field_of_the_request(name, value, expected):
    fields, without = read(**{name: value}), read()
    assert fields.items() >= expected.items()
    assert set(fields) - set(without) <= set(expected)
    build_request({**fields, **NEEDS.get(name, {})})


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_value_that_is_not_served_is_refused_by_the_fields_name(name, value):
    with pytest.raises(FieldRefused, match=f"'{name}"):
        read(**{name: value})


def test_null_is_as_good_as_left_out_and_an_unknown_or_missing_field_is_refused_by_name():
    assert read(**dict.fromkeys(set(MESSAGES.rules) - {"model", "max_tokens"}), system=None) == read()
    for fields, name in (
        ({"colour": "red"}, "colour"),
        ({"max_tokens": None}, "max_tokens"),
        ({"model": None}, "model"),
    ):
        with pytest.raises(FieldRefused, match=f"'{name}'"):
            read(**fields)


def test_without_thinking_a_model_that_can_think_is_told_not_to():
    assert read()["chat_template_kwargs"] == {"enable_thinking": False}
    assert "chat_template_kwargs" not in read(thinking={"type": "adaptive"})
    given = {"chat_template_kwargs": {"enable_thinking": True}, "thinking": {"type": "disabled"}}
    for fields in (given, dict(reversed(given.items()))):
        assert read(**fields)["chat_template_kwargs"] == {"enable_thinking": True}


def test_a_count_is_a_job_that_generates_nothing_from_the_same_prompt():
    given = {"system": "s", "tools": [TOOL], "tool_choice": {"type": "none"}, "thinking": {"type": "disabled"}}
    counted, asked = read(TOKEN_COUNT, **given, stop_sequences=["x"]), read(**given)
    assert (counted.pop("max_tokens"), counted.pop("cache")) == (0, "read")
    assert counted == {name: asked[name] for name in counted}
    assert {"messages", "tools", "tool_choice", "chat_template_kwargs"} < set(counted)


def test_a_conversation_can_be_counted_after_each_of_its_turns():
    answered = [*ASKED, {"role": "assistant", "content": "y"}]
    assert read(TOKEN_COUNT, messages=answered)["messages"] == answered


def conversation(*messages, system=None):
    return read(messages=list(messages), system=system)["messages"]


def text(value):
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def test_the_system_text_is_one_message_without_the_billing_header():
    blocks = [text("x-anthropic-billing-header: cc_version=1"), text("You are."), text("Be brief.")]
    first = {"role": "system", "content": [text("More.")]}
    assert conversation(first, *ASKED, system=blocks) == [
        {"role": "system", "content": "You are.\n\nBe brief.\n\nMore."},
        {"role": "user", "content": "x"},
    ]
    assert conversation(*ASKED, system="s")[0] == {"role": "system", "content": "s"}
    assert conversation(*ASKED, system=[]) == conversation(*ASKED, system="") == ASKED


def test_neighbours_of_one_role_are_one_turn_and_a_system_text_between_them_is_the_users():
    found = conversation(
        {"role": "user", "content": "a"},
        {"role": "user", "content": [text("b"), text("c")]},
        {"role": "assistant", "content": [text("d"), text("e")]},
        {"role": "system", "content": "f"},
        {"role": "user", "content": "g"},
    )
    assert found == [
        {"role": "user", "content": "a\n\nb\n\nc"},
        {"role": "assistant", "content": "de"},
        {"role": "user", "content": "<system-reminder>\nf\n</system-reminder>\n\ng"},
    ]


def test_a_system_text_after_the_users_comes_before_what_the_user_said_last():
    notes = [{"role": "system", "content": "s"}, {"role": "system", "content": "t"}]
    [turn] = conversation({"role": "user", "content": [text("date"), text("say x")]}, *notes)
    reminders = [f"<system-reminder>\n{note}\n</system-reminder>" for note in "st"]
    assert turn["content"].split("\n\n") == ["date", *reminders, "say x"]
    result = {"type": "tool_result", "tool_use_id": "c"}
    found = conversation(*ASKED, {"role": "assistant", "content": "a"}, {"role": "user", "content": [result]}, *notes)
    assert [message["role"] for message in found[2:]] == ["tool", "user"]
    assert found[3]["content"].split("\n\n") == reminders


def test_thinking_calls_and_their_results_become_the_fields_of_messages():
    found = conversation(
        *ASKED,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "zzz"},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "c2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                text("and?"),
                {"type": "tool_result", "tool_use_id": "c1", "content": [text("sunny"), text("warm")]},
                {"type": "tool_result", "tool_use_id": "c2", "content": "no city", "is_error": True},
            ],
        },
        {"role": "assistant", "content": []},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c3"}]},
    )
    call = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
    assert found[1:] == [
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL, {**call, "id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny\n\nwarm"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: no city"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
    ]


IMAGE_IN_A_RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([{"role": "user", "content": [{"type": "image", "source": {}}]}], "image"),
        ([{"role": "user", "content": [{"type": "document", "source": {}}]}], "document"),
        ([{"role": "user", "content": [IMAGE_IN_A_RESULT]}], "image"),
        ([*ASKED, {"role": "assistant", "content": [{"type": "server_tool_use"}]}, *ASKED], "server_tool_use"),
        ([*ASKED, {"role": "assistant", "content": "Once"}], "ends with an assistant message"),
        ([*ASKED, {"role": "tool", "content": "x"}], "role"),
        ([], "at least one"),
        ([{"role": "system", "content": "s"}], "at least one"),
        ([{"role": "user"}], "list"),
        ([{"role": "user", "content": [{"text": "x"}]}], "type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text"),
        ("x", "list"),
    ],
)
def test_what_no_model_here_can_read_is_refused_by_name(messages, why):
    with pytest.raises(FieldRefused, match=why):
        read(messages=messages)


def answer(endpoint=MESSAGES, **fields):
    return endpoint.answer([GenerationResult.model_validate({**result_fields("j"), **fields})], 1, {})


def test_the_reasons_to_stop_are_anthropics():
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    assert {ours: answer(finish_reason=ours)["stop_reason"] for ours in reasons} == reasons
    assert [block["type"] for block in answer(finish_reason="tool_calls", answer="", tool_calls=[CALL])["content"]] == [
        "tool_use"
    ]
    assert answer(text="")["content"] == []
    found = answer(stop_string="END")
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "END")
    assert answer(TOKEN_COUNT) == {"input_tokens": 10}


def test_a_stream_has_anthropics_events_in_their_order():
    parts = {"answer": "I look.", "reasoning": "hm", "tool_calls": [CALL, CALL], "finish_reason": "tool_calls"}
    result = GenerationResult.model_validate({**result_fields("j"), **parts})
    writer = MESSAGES.events("j", MESSAGES.read(body(stream=True), BodyOptions()), 1)
    sent = [*writer.begin(), *writer.end([result], Deltas(is_raw=False))]
    found = []
    for raw in sent:
        name, data = raw.decode().strip().split("\n")
        parsed = json.loads(data.removeprefix("data: "))
        assert name == f"event: {parsed['type']}"
        found.append(TypeAdapter(RawMessageStreamEvent).validate_python(parsed))
    assert [event.type.removeprefix("content_block_") for event in found] == [
        "message_start",
        *("start", "delta", "delta", "stop"),
        *("start", "delta", "stop") * 3,
        *("message_delta", "message_stop"),
    ]
    assert [event.index for event in found[1:-2]] == [0] * 4 + [1] * 3 + [2] * 3 + [3] * 3
    deltas = [event.delta.type for event in found if event.type == "content_block_delta"]
    assert deltas == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta", "input_json_delta"]
    assert (found[-2].delta.stop_reason, found[-2].usage.output_tokens) == ("tool_use", 2)
    assert (found[-2].usage.input_tokens, found[-2].usage.cache_read_input_tokens) == (6, 4)


def test_a_delta_of_another_kind_ends_the_block_and_begins_one():
    writer = MESSAGES.events("j", MESSAGES.read(body(), BodyOptions()), 1)
    call = Delta("call", call=ToolCall.model_validate(CALL))
    kinds = []
    for delta in (Delta("text", "a"), Delta("text", "b"), Delta("reasoning", "c"), Delta("text", "d"), call):
        kinds += [json.loads(event.partition(b"data: ")[2])["type"] for event in writer.more(delta)]
    assert kinds.count("content_block_start") == 4
    assert kinds.count("content_block_stop") == 3


def test_an_error_has_anthropics_type():
    kinds = {
        **{400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"},
        **{409: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error"},
        **{503: "overloaded_error", 504: "timeout_error"},
    }
    assert {status: MESSAGES.failure(Failure(status, "m"))["error"]["type"] for status in kinds} == kinds
    error = {"type": "api_error", "message": "m"}
    assert MESSAGES.failure(Failure(500, "m")) == {"type": "error", "error": error, "request_id": None}


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        (
            "ContextLimitExceeded: prompt of 9000 tokens + max_tokens 5 = 9005; the model's context is 8192",
            "prompt is too long: 9000 tokens > 8192 maximum",
        ),
        ("RequestTooLarge: 9 MB of text", "prompt is too long: RequestTooLarge: 9 MB of text"),
    ],
)
def test_clients_are_told_in_anthropics_words_that_a_prompt_is_too_long(reason, message):
    assert MESSAGES.failure(of_worker(reason, None))["error"]["message"] == message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image"]) | JSON},
    optional={
        "text": st.text(max_size=3) | JSON,
        "thinking": st.text(max_size=3) | JSON,
        "id": st.just("c") | JSON,
        "name": st.just("f") | JSON,
        "input": st.just({}) | JSON,
        "tool_use_id": st.just("c") | JSON,
        "content": st.just([{"type": "text", "text": "x"}]) | JSON,
        "is_error": JSON,
    },
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
        "content": st.text(max_size=3) | st.lists(BLOCK, max_size=3) | JSON,
    }
)
VALUES = [value for served, refused in CASES.values() for value in [*(case[0] for case in served), *refused]]
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=4) | st.just(ASKED) | JSON},
    optional={name: st.sampled_from(VALUES) | JSON for name in [*CASES, "system", "stream"]},
)


@pytest.mark.parametrize("url", [MESSAGES_URL, COUNT_URL])
@given(written=BODY | JSON)
@settings(max_examples=150, deadline=None)
def test_no_json_whatever_is_an_error_of_the_server(url, tmp_path_factory, written):
    head = CallHead(url, {}, None)
    with suppress(Failure, RequestError):  # any other error is one of the server
        call_jobs(json.dumps(written).encode(), head, ServeSettings(tmp_path_factory.getbasetemp()))
