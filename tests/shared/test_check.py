"""Checks of answers: what each condition accepts, and that no check can hang or open anything."""

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_shared import check as check_module
from stoker_shared.check import Check, make_ready, rejection
from stoker_shared.errors import InvalidRequest
from stoker_shared.request import build_request
from stoker_shared.result import Attempt, Choice, Logprobs, TokenLogprob

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
PRICE = {
    "type": "object",
    "properties": {"price": {"type": "integer", "minimum": 0}, "code": {"type": "string", "pattern": "^[A-Z]{3}$"}},
    "required": ["price"],
}


def said(text, **fields):
    return Choice(text=text, finish_reason=fields.pop("finish_reason", "stop"), **fields)


def tokens(*logprobs):
    return Logprobs(content=[TokenLogprob(token="t", logprob=logprob) for logprob in logprobs])


@pytest.mark.parametrize(
    ("check", "accepted", "rejected"),
    [
        ({"contains": ["a", "b"]}, said("ab"), said("a")),
        ({"forbids": "sorry"}, said("yes"), said("I am sorry")),
        ({"regex": r"\d{4}"}, said("in 1984"), said("in 84")),
        ({"regex": r"^(?s:.{1,3000})$"}, said("a" * 3000), said("a" * 3001)),
        ({"regex": r"^[]{9999}]+\{(\p{L}{2}\)){2}$"}, said("]9{ab)cd)"), said("]9{ab)")),
        ({"regex": r"^(?:yes|no)$"}, said("no"), said("no!")),
        ({"finish_reason": "stop"}, said(""), said("", finish_reason="length")),
        ({"min_mean_logprob": -1.0}, said("", logprobs=tokens(-1.5, -0.5)), said("", logprobs=tokens(-1.5, -0.6))),
        ({"min_mean_logprob": -1.0}, said("", logprobs=tokens(0.0)), said("", logprobs=tokens())),
        ({"json_schema": PRICE}, said('{"price": 3, "code": "ABC"}'), said('{"price": 3, "code": "abc"}')),
        ({"json_schema": PRICE}, said('{"price": 3}'), said('{"price": -3}')),
        ({"json_schema": PRICE}, said(' {"price": 3}\n'), said('Here it is: {"price": 3}')),
        ({"json_schema": {"$defs": {"n": {"type": "null"}}, "$ref": "#/$defs/n"}}, said("null"), said("NaN")),
        ({"json_schema": {"pattern": r"^\p{L}+$"}}, said('"größer"'), said('"3"')),
        ({"json_schema": {"uniqueItems": True}}, said('[1, true, "1", {"a": 1}, [1]]'), said('[{"a": 1}, {"a": 1.0}]')),
        ({"json_schema": {"const": {"$schema": "x"}}}, said('{"$schema": "x"}'), said("{}")),
        # The thinking is no part of the answer.
        ({"forbids": "hm"}, said("<think>hm</think>yes", answer="yes"), said("hm")),
    ],
)
def test_each_condition(check, accepted, rejected):
    check = build_request({"prompt": "p", "logprobs": True, "check": check}).check
    make_ready(check)
    assert rejection(check, accepted) is None
    assert rejection(check, rejected).startswith(next(iter(check.model_fields_set)))


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_every_json_value_passes_the_schema_that_allows_all(value):
    assert rejection(Check(json_schema={"$schema": DRAFT_7}), said(json.dumps(value))) is None


EVIL = "^(a+)+$"  # Python's `re` tries 2 to the 40 ways
TRIED = "a" * 40 + "!"
LONG = list(range(50_000))
TWICE = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)} | {"d40": {}}
CHAIN = {f"d{n}": {"dependentSchemas": {name: {"$ref": f"#/$defs/d{n + 1}"} for name in "ab"}} for n in range(40)} | {
    "d40": {}
}
OTHER_DIALECT = {
    "$id": "urn:x", "$dynamicAnchor": "meta", "pattern": EVIL,
    "anyOf": [{"$ref": "https://json-schema.org/draft/2020-12/schema"}],
}  # fmt: skip
SLOW: dict[str, tuple[dict, Any, str | None]] = {
    "pattern": ({"pattern": EVIL}, TRIED, "'pattern' at $"),
    "dialect": ({"$schema": DRAFT_7, "pattern": EVIL}, TRIED, "'pattern'"),
    "endless": ({"$ref": "#"}, TRIED, "the schema cannot be applied (RecursionError)"),
    "exponential": ({"$defs": TWICE, "$ref": "#/$defs/d0"}, TRIED, "the schema cannot be applied (TooMuch)"),
    "each with each": ({"uniqueItems": True}, [{"a": n} for n in range(6000)], None),
    "no keyword": ({"anyOf": [{"allOf": [False] * 1000}]}, LONG, "TooMuch"),
    "long messages": ({"anyOf": [{"type": "string"}] * 1000}, LONG, "TooMuch"),
    "before its keywords": (
        {"$defs": CHAIN, "$ref": "#/$defs/d0", "unevaluatedProperties": False}, {"a": 1, "b": 1}, "TooMuch"
    ),
    "another dialect by reference": (OTHER_DIALECT, {"properties": {"a": TRIED}}, "'anyOf' at $"),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "answer", "reason"), SLOW.values(), ids=SLOW)
def test_no_check_hangs(schema, answer, reason, monkeypatch):
    check = Check(json_schema=schema)
    make_ready(check)
    monkeypatch.setattr(check_module, "_MOST_S", 0.2)
    found = rejection(check, said(json.dumps(answer)))
    assert found is reason is None or str(reason) in str(found)
    assert rejection(Check(regex=EVIL), said(TRIED)).startswith("regex: not found")


def test_a_schema_that_is_too_large_is_refused_and_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(check_module, "_MOST_S", 0.2)
    with pytest.raises(InvalidRequest, match="too large"):
        make_ready(Check(json_schema={"properties": {f"p{n}": {"type": "string"} for n in range(5000)}}))


def test_an_answer_is_judged_also_when_its_schema_takes_too_long_to_read_again(monkeypatch):
    """The job was taken with this schema, and its answer may be saved already."""
    check = Check(json_schema={"properties": {"a": {"type": "string"}}})
    make_ready(check)
    for number in range(20):  # other jobs' schemas
        make_ready(Check(json_schema={"const": number}))
    monkeypatch.setattr(check_module, "_MOST_S", 0.0)
    assert rejection(check, said("{}")) == "json_schema: the schema cannot be applied (it is too large)"


def test_a_reason_can_be_read_whatever_the_answer_names():
    check = Check(json_schema={"additionalProperties": {"type": "string"}})
    reason = rejection(check, said('{"\\ud800": 1}'))
    assert Attempt(model="m", accepted=False, reason=reason).reason.startswith("json_schema: 'type' at $")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "objekt"},
        {"properties": {"a": {"patternProperties": {"^a": {}}}}},
        {"required": "a"},
        {"items": {"pattern": "(?=a)"}},
        {"items": {"$ref": "#/$defs/missing"}},
        {"$ref": "http://127.0.0.1:9/schema.json"},
    ],
)
def test_a_schema_that_is_none_is_refused_by_name(schema):
    with pytest.raises(InvalidRequest, match=r"check\.json_schema"):
        make_ready(Check(json_schema=schema))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"check": {}}, "at least one condition"),
        ({"check": {"regex": "(?=a)"}}, "'regex' cannot be read"),
        ({"check": {"regex": "(?:(?:a|b|ab|ba|.){1,60}x){50}"}}, "'regex' cannot be read: .* longer than 10,000"),
        ({"check": {"regex": "(?P<a[>(?:[ab]{300}){300})]"}}, "'regex' cannot be read: .* longer than 10,000"),
        ({"check": {"regex": "(?:[ab]{ 300 }){ 300 }"}}, "'regex' cannot be read: .* longer than 10,000"),
        ({"check": {"regex": "(|^){40000}"}}, "'regex' cannot be read: .* longer than 10,000"),
        ({"check": {"regex": r"[\w]" * 250_000}}, "'regex' cannot be read: it is longer than 40,000"),
        ({"check": {"regex": r"(?x) [a-z] # ("}}, "flag x"),
        ({"check": {"min_mean_logprob": -1.0}}, "needs 'logprobs'"),
        ({"check": {"contains": ["a"]}, "n": 2, "cache": "off"}, "one answer"),
        ({"check": {"likes": "a"}}, "no such field"),
        ({"route": [{"model": "m", "queue": "q"}], "model": "m"}, "'route' and 'model'"),
        ({"route": [{"model": "m", "queue": "q"}] * 2}, "by a 'check'"),
        ({"route": [{"model": "m", "queue": "q"}], "agent_id": "a", "context": "append"}, "'append'"),
        ({"route": [{"model": "m", "queue": "q"}], "agent_id": "a"}, "no agent's memory.*give cache 'read'"),
        (
            {"route": [{"model": m, "queue": "q"} for m in ("m", "o")], "check": {"contains": "a"}},
            "'m' and 'o' in queue 'q'",
        ),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields, message):
    with pytest.raises(InvalidRequest, match=message):
        build_request({"prompt": "p", **fields})


@pytest.mark.parametrize("cache", ["read", "off"])
def test_a_job_that_writes_no_memory_may_ask_several_models_for_an_agent(cache):
    route = [{"model": "m", "queue": "q"}, {"model": "m", "queue": "q"}, {"model": "o", "queue": "r"}]
    build_request({"prompt": "p", "agent_id": "a", "cache": cache, "route": route, "check": {"contains": "a"}})


def test_the_compiled_schemas_of_many_jobs_do_not_add_up():
    tracemalloc.start()
    try:
        for number in range(40):
            make_ready(Check(json_schema={"enum": [f"{number}" + "z" * 2_000_000]}))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 80e6
