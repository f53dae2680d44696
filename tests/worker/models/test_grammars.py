"""What guides allow is what the request asked for, token by token, and a grammar that is no good fails its own job."""

import json
import random
import re

import jsonschema
import numpy as np
import pytest
from tests.worker.models.small_tokenizers import byte_fallback, byte_level

from stoker_shared import build_request
from stoker_shared.errors import GuideRefused
from stoker_worker.models import guides
from stoker_worker.models.guides import MOST_GRAMMAR_BYTES, GrammarGuides
from stoker_worker.ports.model import PLAIN_TEXT, AnswerFormat

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["é", 1, None, {"a": [True]}]},
        "list": {"type": "array", "items": {"$ref": "#/$defs/small"}, "maxItems": 3},
    },
    "required": ["name", "kind", "list"],
    "additionalProperties": False,
    "$defs": {"small": {"type": "integer", "minimum": -9, "maximum": 12}},
}
CALLS = AnswerFormat(tool_start="<tool_call>", tool_end="</tool_call>", tool_parser="json_tools")


def of_schema(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def asked(**fields):
    if "tools" in fields:
        return build_request({"messages": [{"role": "user", "content": "x"}], **fields})
    return build_request({"prompt": "x", **fields})


def allowed(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def some_answer(guide, wrapper, seed):
    """Draw from what is allowed until the end; the end is drawn where it is allowed, once there are enough tokens."""
    rng, tokens, token = random.Random(seed), [], None
    while len(tokens) < 2000:
        mask = guide.after(token)
        assert guide.error is None, (guide.error, wrapper._tokenizer.decode(tokens))
        choices = allowed(mask)
        ends = wrapper.eos_token_ids & set(choices)
        token = min(ends) if ends and len(tokens) > 20 else rng.choice(choices)
        if token in wrapper.eos_token_ids:
            assert set(allowed(guide.after(token))) == wrapper.eos_token_ids
            return wrapper._tokenizer.decode(tokens)
        tokens.append(token)
    raise AssertionError("no end")


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_whatever_is_drawn_from_what_a_schema_allows_is_valid(make):
    wrapper = make()
    maker = GrammarGuides(wrapper, PLAIN_TEXT)
    for seed in range(30):
        jsonschema.validate(
            json.loads(some_answer(maker.guide_for(asked(**of_schema(SCHEMA)), ()), wrapper, seed)), SCHEMA
        )


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guide": {"regex": r"[ab]{2,5}-[0-9]{3}"}}, r"[ab]{2,5}-[0-9]{3}"),
        ({"guide": {"choice": ['say "x"\n\\', "日本😀", "/a/"]}}, 'say "x"\n\\\\|日本😀|/a/'),
        ({"guide": {"lark": 'start: WORD ("," WORD)?\nWORD: /[a-d]+/'}}, r"[a-d]+(,[a-d]+)?"),
    ],
)
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_answers_are_in_the_language_of_their_guide(make, fields, pattern):
    wrapper = make()
    maker = GrammarGuides(wrapper, PLAIN_TEXT)
    for seed in range(10):
        assert re.fullmatch(pattern, some_answer(maker.guide_for(asked(**fields), ()), wrapper, seed), re.DOTALL)


def test_json_object_allows_objects_only():
    wrapper = byte_level()
    guide = GrammarGuides(wrapper, PLAIN_TEXT).guide_for(asked(response_format={"type": "json_object"}), ())
    first = {wrapper._tokenizer.decode([token]) for token in allowed(guide.after(None))}
    assert first == {"{", '{"'}


def test_a_request_without_a_form_has_no_guide():
    maker = GrammarGuides(byte_level(), PLAIN_TEXT)
    assert maker.guide_for(asked(response_format={"type": "text"}), ()) is None
    assert maker.guide_for(asked(max_reasoning_tokens=3), ()) is None  # this model does not think


def test_every_end_of_the_model_is_allowed_where_the_answer_is_complete_also_one_without_a_token():
    wrapper = byte_level()
    wrapper.eos_token_ids = {wrapper._tokenizer.backend_tokenizer.token_to_id("<pad>"), 3000}
    guide = GrammarGuides(wrapper, PLAIN_TEXT).guide_for(asked(guide={"regex": "ab?"}), ())
    a, b = wrapper._tokenizer.encode("a", False) + wrapper._tokenizer.encode("b", False)
    assert allowed(guide.after(None)) == [a]
    assert allowed(guide.after(a)) == sorted({b} | wrapper.eos_token_ids)
    assert allowed(guide.after(b)) == sorted(wrapper.eos_token_ids)
    guide.start([a, b, 3000])
    assert allowed(guide.after(None)) == sorted(wrapper.eos_token_ids)


def test_jobs_with_the_same_grammar_do_not_disturb_each_other():
    wrapper = byte_level()
    maker = GrammarGuides(wrapper, PLAIN_TEXT)
    one, other = (maker.guide_for(asked(**of_schema(SCHEMA)), ()) for _ in range(2))
    first = other.after(None)
    some_answer(one, wrapper, 1)
    for guide in (other, maker.guide_for(asked(**of_schema(SCHEMA)), ())):
        assert guide.after(None).tolist() == first.tolist()


# --- tools ---

TOOLS = [
    {"type": "function", "function": {"name": 'f"é', "parameters": {**SCHEMA}}},
    {"type": "function", "function": {"name": "g"}},
    {"type": "function", "function": {"name": "h", "parameters": {"properties": {}}}},
]


@pytest.mark.parametrize(
    ("form", "fields", "reason"),
    [
        (CALLS, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "i"}}}, "'i'"),
        (CALLS, {"tools": [{"type": "function"}], "tool_choice": "required"}, "name"),
        (CALLS, {"tools": [{"function": {"name": "f", "parameters": [1]}}], "tool_choice": "required"}, "'f'"),
        (CALLS, {"tools": [{"name": "f", "parameters": {"type": "array"}}], "tool_choice": "required"}, "an object"),
        (AnswerFormat(first_state="header"), {"guide": {"regex": "a"}}, "headers"),
        (AnswerFormat(first_state="header"), {"tools": TOOLS, "tool_choice": "required"}, "headers"),
    ],
)
def test_a_call_that_cannot_be_required_is_refused(form, fields, reason):
    with pytest.raises(GuideRefused, match=reason):
        GrammarGuides(byte_level(), form).guide_for(asked(**fields), ())


# --- refusals ---


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (of_schema({"not": {}}), "Unimplemented keys"),
        (of_schema({"not": {}, "x-guidance": {"lenient": True}}), "Unimplemented keys"),
        (of_schema({"$ref": "http://localhost/x.json"}), "not present"),
        (of_schema({"type": "strin"}), "strin"),
        (of_schema({"enum": []}), "Unsatisfiable"),
        ({"guide": {"regex": "("}}, "unclosed|invalid regex"),
        ({"guide": {"lark": "start: foo"}}, "foo"),
        ({"guide": {"lark": "start: start"}}, "no answer|cannot"),
        ({"guide": {"regex": "a" * (MOST_GRAMMAR_BYTES + 1)}}, "limit"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(fields, reason):
    with pytest.raises(GuideRefused, match=reason) as refused:
        GrammarGuides(byte_level(), PLAIN_TEXT).guide_for(asked(**fields), ())
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_an_unknown_tokenizer_is_tried_once_and_refuses_each_guide(monkeypatch):
    tried = []

    def unknown(*arguments, **options):
        tried.append(arguments)
        raise ValueError("no such tokenizer")

    monkeypatch.setattr(guides, "LLTokenizer", unknown)
    maker = GrammarGuides(byte_level(), PLAIN_TEXT)
    for regex in ("a", "b"):
        with pytest.raises(GuideRefused, match="no such tokenizer"):
            maker.guide_for(asked(guide={"regex": regex}), ())
    assert len(tried) == 1


def test_a_model_without_an_end_has_no_guides():
    wrapper = byte_level()
    wrapper.eos_token_ids = set()
    with pytest.raises(GuideRefused, match="end-of-sequence"):
        GrammarGuides(wrapper, PLAIN_TEXT).guide_for(asked(guide={"regex": "a"}), ())


PIECES = 'start:# #\n#"a"#|#(#)#*#x#x:#/#[ab]#+#{3}#%json#{}#\\#~'
"""Of grammars."""


def test_no_damaged_grammar_raises_anything_else_at_any_place():
    wrapper, rng, errors = byte_level(), random.Random(8), 0
    maker = GrammarGuides(wrapper, PLAIN_TEXT)
    for _ in range(300):
        text = "".join(rng.choices(PIECES.split("#"), k=rng.randint(1, 12)))
        kind = rng.choice(["regex", "lark"])
        try:
            guide = maker.guide_for(asked(guide={kind: text if kind == "regex" else f"start: {text}"}), ())
        except GuideRefused:
            errors += 1
            continue
        token = None
        for _ in range(30):
            mask = guide.after(token)
            token = rng.randrange(len(wrapper._tokenizer)) if mask is None else rng.choice(allowed(mask))
    assert 50 < errors < 300


def test_a_token_that_a_guide_does_not_allow_is_an_error_of_this_guide():
    wrapper = byte_level()
    guide = GrammarGuides(wrapper, PLAIN_TEXT).guide_for(asked(guide={"regex": "a+"}), ())
    assert guide.after(wrapper._tokenizer.encode("b", False)[0]) is None
    assert isinstance(guide.error, GuideRefused)
    assert guide.after(1) is None
