"""One case for each row of the table in docs/batches.md, with the types of OpenAI's own package."""

import typing
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import TypeAdapter

from stoker.api.chat import CHAT, CHAT_URL, TEXT, TEXT_URL
from stoker.api.endpoints import ENDPOINTS
from stoker.api.failure import FieldRefused
from stoker.api.fields import BodyOptions, keep_apart
from stoker_shared.request import build_request

TRANSPORT = {"stream", "stream_options"}
RULES = {endpoint.url: {*endpoint.rules, *TRANSPORT} for endpoint in (CHAT, TEXT)}
Cases = dict[str, tuple[list[tuple[Any, dict[str, Any]]], list[Any]]]
DOCS = Path(__file__).resolve().parents[3] / "docs" / "batches.md"
PARAMS: dict[str, Any] = {
    CHAT_URL: chat_params.CompletionCreateParamsNonStreaming,
    TEXT_URL: text_params.CompletionCreateParamsNonStreaming,
}
INPUT: dict[str, Any] = {CHAT_URL: {"messages": [{"role": "user", "content": "x"}]}, TEXT_URL: {"prompt": "x"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
AUDIO = {"voice": "alloy", "format": "wav"}
NAMED = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
NEEDS: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [TOOL]},
    "expect_version": {"agent_id": "a", "context": "append"},
    "prompt_logprobs_start": {"prompt_logprobs": 0},
}
"""Fields that are valid only beside others."""
SYSTEM = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]

# field: values that are served, each with its outcome; values that are refused
COPIED: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.5, "stop": ["x"], "n": 2, "frequency_penalty": 0.5, "presence_penalty": -1,
    "logit_bias": {"50256": -100}, "min_p": 0.1, "repetition_penalty": 1.1, "context": "full", "cache": "off",
    "cache_salt": "s", "expect_version": 3, "must_exist": False, "min_tokens": 3, "stop_token_ids": [2],
    "ignore_eos": True, "guide": {"regex": "a+"}, "max_reasoning_tokens": 5, "prompt_logprobs": 0,
    "prompt_logprobs_start": 4, "task": "replies",
}  # fmt: skip
COPIED_OF_CHAT: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "tools": [TOOL], "parallel_tool_calls": False}
IGNORED: dict[str, Any] = {
    "verbosity": "low", "prediction": {"type": "content", "content": "x"}, "prompt_cache_options": {},
    "prompt_cache_retention": "24h", "safety_identifier": "s", "service_tier": "flex",
}  # fmt: skip


def copied(fields: dict[str, Any]) -> Cases:
    return {name: ([(value, {name: value})], []) for name, value in fields.items()}


COMMON: Cases = copied(COPIED) | {
    "model": ([("m", {"model": "m"})], [3]),
    "seed": ([(3, {"seed": 3}), (-1, {})], []),
    "max_tokens": ([(7, {"max_tokens": 7}), (-1, {})], []),
    "user": ([("u", {"session": "u"}), ("", {}), ("x" * 500, {"session": sha256(b"x" * 500).hexdigest()})], [3]),
    "stream": ([(False, {})], [True, 0]),
    "stream_options": ([], [{"include_usage": True}]),
    "top_k": ([(4, {"top_k": 4}), (-1, {}), (0, {})], []),
    "metadata": ([({"agent_id": "a", "k": "v"}, {"agent_id": "a"}), ({"k": "v"}, {})], ["a", {"k": 1}]),
}
CASES: dict[str, Cases] = {
    CHAT_URL: COMMON
    | copied(COPIED_OF_CHAT)
    | {name: ([(value, {})], []) for name, value in IGNORED.items()}
    | {
        "messages": ([(SYSTEM, {"messages": SYSTEM})], []),
        "max_completion_tokens": ([(7, {"max_tokens": 7})], []),
        "tool_choice": (
            [
                ("auto", {"tool_choice": "auto"}),
                ("none", {}),
                ("required", {"tool_choice": "required"}),
                (NAMED, {"tool_choice": NAMED}),
            ],
            [],
        ),
        "response_format": ([({"type": "text"}, {}), (SCHEMA, {"response_format": SCHEMA})], []),
        "modalities": ([(["text"], {})], [["text", "audio"]]),
        "audio": ([], [AUDIO]),
        "functions": ([([], {})], [[{"name": "f"}]]),
        "function_call": ([], ["auto", {"name": "f"}]),
        "reasoning_effort": ([("low", {"chat_template_kwargs": {"reasoning_effort": "low"}}), ("none", {})], [3]),
        "web_search_options": ([], [{}]),
        "moderation": ([], [{"model": "m"}]),
        "prompt_cache_key": ([("k", {"session": "k"})], [3]),
        "store": ([(False, {})], [True]),
        "chat_template_kwargs": ([({"k": 1}, {"chat_template_kwargs": {"k": 1}})], []),
    },
    TEXT_URL: COMMON
    | {
        "prompt": (
            [
                *[("p", {"prompt": "p"}), (["p"], {"prompt": "p"})],
                *[([1, 2], {"prompt_token_ids": [1, 2]}), ([[1]], {"prompt_token_ids": [1]})],
            ],
            [["p", "q"], ["p", 1], {}, [[1, "x"]]],
        ),
        "logprobs": ([(n, {"logprobs": True, "top_logprobs": n}) for n in (0, 5)], [6, True]),
        "best_of": ([(1, {})], [2]),
        "echo": ([(False, {}), (True, {"return_prompt": True})], [3]),
        "suffix": ([], ["x"]),
    },
}
SERVED = [(url, name, *case) for url, cases in CASES.items() for name, (served, _) in cases.items() for case in served]
REFUSED = [(url, name, value) for url, cases in CASES.items() for name, (_, no) in cases.items() for value in no]
OURS = {
    *("top_k", "min_p", "repetition_penalty", "context", "cache", "cache_salt", "chat_template_kwargs", "guide"),
    *("expect_version", "must_exist", "min_tokens", "stop_token_ids", "ignore_eos", "max_reasoning_tokens"),
    *("prompt_logprobs", "prompt_logprobs_start", "task"),
}


def request_fields(url, written, options):
    return ENDPOINTS[url].read(dict(written), options).request


def body(url, **fields):
    return {"model": "m", **INPUT[url], **fields}


@pytest.mark.parametrize("url", RULES)
def test_every_field_of_openais_types_has_a_row_and_every_row_a_case(url):
    theirs = set(typing.get_type_hints(PARAMS[url]))
    also_ours = OURS | ({"metadata"} if url == TEXT_URL else set())
    assert theirs <= RULES[url]
    assert RULES[url] - theirs <= also_ours
    assert set(CASES[url]) == RULES[url]


@pytest.mark.parametrize(("url", "name", "value", "expected"), SERVED)
def test_a_field_that_is_served_or_mapped_becomes_a_field_of_the_request(url, name, value, expected):
    written = body(url, **{name: value})
    if name not in OURS and not (name == "metadata" and url == TEXT_URL):
        TypeAdapter(PARAMS[url]).validate_python(written)
    fields = request_fields(url, written, BodyOptions())
    assert fields.items() >= expected.items()
    assert set(fields) - set(request_fields(url, body(url), BodyOptions())) <= set(expected)
    build_request({**fields, **NEEDS.get(name, {})})


@pytest.mark.parametrize(("url", "name", "value"), REFUSED)
def test_a_value_that_is_not_served_is_refused_by_the_fields_name(url, name, value):
    with pytest.raises(FieldRefused, match=f"'{name}'") as caught:
        request_fields(url, body(url, **{name: value}), BodyOptions())
    assert caught.value.error["param"] == name


@pytest.mark.parametrize("url", RULES)
def test_null_is_as_good_as_left_out(url):
    nulls = dict.fromkeys(RULES[url] - {"model", *INPUT[url]})
    assert request_fields(url, body(url, **nulls), BodyOptions()) == request_fields(url, body(url), BodyOptions())


def test_an_unknown_field_and_a_missing_model_are_refused_by_name():
    for fields, name in ((body(CHAT_URL, colour="red"), "colour"), ({**body(CHAT_URL), "model": None}, "model")):
        with pytest.raises(FieldRefused, match=f"'{name}'"):
            request_fields(CHAT_URL, fields, BodyOptions())


def test_defaults_are_openais():
    assert request_fields(CHAT_URL, body(CHAT_URL), BodyOptions())["temperature"] == 1.0
    assert request_fields(CHAT_URL, body(CHAT_URL), BodyOptions())["fit_max_tokens"]
    assert request_fields(TEXT_URL, body(TEXT_URL), BodyOptions())["max_tokens"] == 16


@pytest.mark.parametrize("url", [CHAT_URL, TEXT_URL])
def test_a_limit_that_the_body_does_not_name_gives_way_to_the_context(url):
    fields = request_fields(url, body(url), BodyOptions(max_tokens=5))
    assert (fields["max_tokens"], fields["fit_max_tokens"]) == (5, True)
    assert "fit_max_tokens" not in request_fields(url, body(url, max_tokens=5), BodyOptions())


@pytest.mark.parametrize("of_agent", [{}, {"agent_id": "a"}])
def test_with_a_token_a_salt_may_be_as_long_as_without(of_agent):
    salts = set()
    for salt in (" " + "s" * 199, " " + "s" * 198 + "t"):
        fields = {"cache_salt": salt, "prompt": "p", **of_agent}
        keep_apart(fields, "n" * 64)
        salts.add(fields["cache_salt"])
        build_request(fields)
    assert len(salts) == 2


def test_a_user_is_a_session_and_an_agent_where_the_conversation_is_continued():
    def memory_of(**fields):
        found = request_fields(CHAT_URL, body(CHAT_URL, user="u", **fields), BodyOptions())
        return {name: found[name] for name in ("agent_id", "session") if name in found}

    assert memory_of() == memory_of(context="full", must_exist=False) == {"session": "u"}
    for continues in ({"context": "append"}, {"expect_version": 0}, {"must_exist": True}):
        assert memory_of(**continues) == {"agent_id": "u"}


def test_what_clients_add_to_a_message_is_left_out():
    added = {"provider_specific_fields": {}, "reasoning_details": [], "cache_control": {}, "refusal": None}
    sent = [{"role": "assistant", "content": "a", **added}, {"role": "user", "content": "x"}]
    fields = request_fields(CHAT_URL, body(CHAT_URL, messages=sent), BodyOptions())
    assert [message.content for message in build_request(fields).messages] == ["a", "x"]


@pytest.mark.parametrize(
    ("name", "right"), [("guided_json", "response_format"), ("repeat_penalty", "repetition_penalty")]
)
def test_a_field_of_another_server_is_refused_with_the_right_name(name, right):
    with pytest.raises(FieldRefused, match=f"'{name}'.*'{right}'"):
        request_fields(CHAT_URL, body(CHAT_URL, **{name: 1}), BodyOptions())


def test_unknown_fields_can_be_ignored_with_one_line_in_the_log(caplog):
    for _ in range(2):
        fields = request_fields(CHAT_URL, body(CHAT_URL, tint="red"), BodyOptions(ignore_unknown=True))
    assert "tint" not in fields
    assert len([record for record in caplog.records if "tint" in record.getMessage()]) == 1


def test_the_agent_of_the_metadata_wins_over_the_user_in_any_order():
    both = {"user": "u", "metadata": {"agent_id": "a"}}
    for fields in (both, dict(reversed(both.items()))):
        assert request_fields(CHAT_URL, body(CHAT_URL, **fields), BodyOptions())["agent_id"] == "a"
    assert "agent_id" not in request_fields(CHAT_URL, body(CHAT_URL), BodyOptions())


def test_no_salt_leads_into_the_caches_of_another_token():
    def salt(name, **fields):
        keep_apart(fields, name)
        return fields.get("cache_salt")

    of_ann = salt("ann")
    assert of_ann == salt("ann", cache_salt="") != salt("bob")
    assert of_ann not in (salt("bob", cache_salt=of_ann), salt("bob", cache_salt=of_ann, agent_id="a"))
    assert [salt(name, cache_salt="s", agent_id="a") for name in ("ann", "bob")] == ["s", "s"]
    assert salt("bob", agent_id="a") is None


def test_a_model_is_the_loaded_one_or_is_mapped_or_does_not_matter():
    def model_of(options):
        return request_fields(CHAT_URL, body(CHAT_URL, model="gpt"), options).get("model")

    assert model_of(BodyOptions()) == "gpt"
    assert model_of(BodyOptions(model_aliases={"gpt": "ours"})) == "ours"
    assert model_of(BodyOptions(any_model=True)) is None
    assert "model" not in request_fields(CHAT_URL, INPUT[CHAT_URL], BodyOptions(any_model=True))


def test_two_limits_that_differ_are_refused_and_two_that_agree_are_one():
    agreeing = body(CHAT_URL, max_tokens=5, max_completion_tokens=5)
    assert request_fields(CHAT_URL, agreeing, BodyOptions())["max_tokens"] == 5
    with pytest.raises(FieldRefused, match="max_completion_tokens"):
        request_fields(CHAT_URL, {**agreeing, "max_completion_tokens": 6}, BodyOptions())


def test_the_scores_of_several_prompts_are_refused_unless_each_is_echoed():
    several = body(TEXT_URL, prompt=["p", "q"], prompt_logprobs=0)
    with pytest.raises(FieldRefused, match="'prompt_logprobs'"):
        ENDPOINTS[TEXT_URL].read(dict(several), BodyOptions())
    assert len(ENDPOINTS[TEXT_URL].read({**several, "echo": True}, BodyOptions()).requests) == 2


def test_a_tool_choice_without_tools_to_choose_from_says_nothing():
    assert "tool_choice" not in request_fields(CHAT_URL, body(CHAT_URL, tool_choice="none"), BodyOptions())
    both = request_fields(CHAT_URL, body(CHAT_URL, tool_choice="none", tools=[TOOL]), BodyOptions())
    assert (both["tool_choice"], both["tools"]) == ("none", [TOOL])


def test_the_page_lists_every_field():
    text = DOCS.read_text()
    assert not [name for rules in RULES.values() for name in rules if f"`{name}`" not in text]
