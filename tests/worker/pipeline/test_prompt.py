"""From requests to tokens: `full` encodes the request alone, `append` continues the stored ids."""

import dataclasses
import re
from contextlib import nullcontext
from typing import ClassVar

import pytest

from stoker_shared import Message, build_request
from stoker_shared.errors import (
    AgentNotFound,
    AgentVersionConflict,
    ContextLimitExceeded,
    InvalidRequest,
    RequestTooLarge,
    TemplateError,
    TranscriptMismatch,
)
from stoker_worker.engine.scripted import END, ScriptedProvider, ScriptedTokenizer
from stoker_worker.pipeline.answer import read_answer
from stoker_worker.pipeline.prompt import (
    SystemPrompts,
    build_prompt,
    check_expectations,
    fitted,
    next_transcript,
    replaced_version,
)
from stoker_worker.ports import AgentVersion, CompletedGeneration

CODEC = ScriptedTokenizer()
MODEL = ScriptedProvider(max_batch=1, steps_per_s=1e9).load()[1]


def request(**fields):
    return build_request({"agent_id": "a", **fields})


def user(text):
    return {"role": "user", "content": text}


def answered(prompt, text, *, ended_by="eos", generated=None, kept=None, carry_text=""):
    ids = generated if generated is not None else [*text.encode(), END]
    done = CompletedGeneration(
        0, "finished", tuple(ids), text, ended_by, len(ids) if kept is None else kept, carry_text
    )
    return next_transcript(prompt, done, Message(role="assistant", content=text), MODEL)


def first_turn(**fields):
    return build_prompt(request(**fields), None, MODEL, CODEC)


def append(transcript, model=MODEL, **fields):
    return build_prompt(request(context="append", **fields), transcript, model, CODEC)


def test_an_unknown_agents_append_is_its_first_turn():
    assert append(None, prompt="hi").ids == first_turn(prompt="hi").ids
    assert append(None, messages=[user("hi")]).ids == first_turn(messages=[user("hi")]).ids


def test_a_new_system_message_comes_after_the_stored_messages():
    system = {"role": "system", "content": "be brief"}
    later = {"role": "system", "content": "be rude"}
    transcript = answered(first_turn(messages=[system, user("one")]), "two")
    prompt = append(transcript, messages=[later, user("three")])
    answer = {"role": "assistant", "content": "two"}
    assert prompt.ids == first_turn(messages=[system, user("one"), answer, later, user("three")]).ids
    assert prompt.ids[: len(transcript.token_ids)] == transcript.token_ids
    assert [m.content for m in prompt.messages] == ["be brief", "one", "two", "be rude", "three"]


def test_append_keeps_the_stored_ids_even_where_encoding_their_text_would_differ():
    odd = [300]  # an id that no encoding produces; it decodes to a text that no template writes
    transcript = dataclasses.replace(answered(first_turn(prompt="x"), "y"), token_ids=(*b"xy", *odd), text="xy")
    assert append(transcript, prompt="z").ids == (*b"xy", *odd, ord("z"))


def test_appended_messages_do_not_get_the_space_that_a_tokenizer_puts_before_a_text():
    class Spacing(ScriptedTokenizer):
        def encode_rendered(self, rendered):
            ids = super().encode_rendered(rendered)
            return ids if ids[0] > 255 else [*b" ", *ids]

    transcript = answered(first_turn(messages=[user("one")]), "two")
    prompt = build_prompt(request(context="append", messages=[user("three")]), transcript, MODEL, Spacing())
    whole = first_turn(messages=[user("one"), {"role": "assistant", "content": "two"}, user("three")])
    assert (prompt.ids, prompt.rendered_anew) == (whole.ids, None)


def test_a_turn_that_ended_by_length_is_closed_before_the_next_begins():
    transcript = answered(first_turn(messages=[user("one")]), "tw", ended_by="length", generated=b"tw")
    prompt = append(transcript, messages=[user("three")])
    assert prompt.ids[: len(transcript.token_ids)] == transcript.token_ids
    assert prompt.ids[len(transcript.token_ids)] == END


def test_a_turn_cut_inside_a_token_by_a_stop_string_continues_with_the_text_the_producer_saw():
    chat = answered(first_turn(messages=[user("q")]), "abc", ended_by="stop", generated=b"abcX", kept=2, carry_text="c")
    whole = first_turn(messages=[user("q"), {"role": "assistant", "content": "abc"}, user("r")])
    assert append(chat, messages=[user("r")]).ids == whole.ids
    raw = answered(first_turn(prompt="q"), "abc", ended_by="stop", generated=b"abcX", kept=2, carry_text="c")
    assert bytes(append(raw, prompt="!").ids) == b"qabc!"


def test_given_token_ids_are_read_as_they_are_and_are_appended_to_prompts():
    given = [*b"caf\xc3", END]
    first = first_turn(prompt_token_ids=given)
    assert (list(first.ids), first.text) == (given, CODEC.decode(given))
    raw = answered(first_turn(prompt="q"), "abc", ended_by="stop", generated=b"abcX", kept=2, carry_text="c")
    appended = append(raw, prompt_token_ids=given)
    assert list(appended.ids) == [*b"qabc", *given]
    assert appended.text == "qabc" + CODEC.decode(given)
    anew = append(raw, dataclasses.replace(MODEL, tokenizer_fingerprint="another"), prompt_token_ids=given)
    assert anew.ids == appended.ids
    with pytest.raises(TranscriptMismatch, match="made of messages"):
        append(answered(first_turn(messages=[user("one")]), "two"), prompt_token_ids=given)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": [3, 10**6], "max_tokens": 0, "cache": "off"},
        {"prompt": "x", "stop_token_ids": [3, 10**6]},
        {"prompt": "x", "logit_bias": {10**6: 1.0}},
    ],
)
def test_a_token_that_the_model_does_not_have_is_refused_by_name(fields):
    name = next(name for name, value in fields.items() if "1000000" in str(value))
    with pytest.raises(InvalidRequest, match=rf"^{name}: there is no token 1000000; .* 0 to 257$"):
        first_turn(**fields)


def test_a_template_that_rewrites_history_is_rendered_in_full_with_a_reason():
    class Forgetful(ScriptedTokenizer):
        def render(self, messages, **options):
            return super().render(messages[-1:], **options)

    transcript = answered(first_turn(messages=[user("one")]), "two")
    prompt = build_prompt(request(context="append", messages=[user("three")]), transcript, MODEL, Forgetful())
    assert prompt.rendered_anew == "template_rewrote_history"
    assert [m.content for m in prompt.messages] == ["one", "two", "three"]


def test_with_another_tokenizer_the_stored_text_is_encoded_again():
    other = dataclasses.replace(MODEL, tokenizer_fingerprint="another")
    chat = append(answered(first_turn(messages=[user("one")]), "two"), other, messages=[user("three")])
    raw = append(answered(first_turn(prompt="a"), "b"), other, prompt="c")
    assert chat.rendered_anew == raw.rendered_anew == "other_tokenizer"
    assert bytes(raw.ids) == b"abc"


def test_prompts_and_messages_do_not_mix_in_one_transcript():
    with pytest.raises(TranscriptMismatch, match="made of messages"):
        append(answered(first_turn(messages=[user("one")]), "two"), prompt="three")
    with pytest.raises(TranscriptMismatch, match="made of prompts"):
        append(answered(first_turn(prompt="one"), "two"), messages=[user("three")])


def test_full_replaces_the_conversation_whatever_it_was_before():
    transcript = answered(first_turn(messages=[user("one")]), "two")
    full = build_prompt(request(prompt="new"), transcript, MODEL, CODEC)
    assert (full.text, full.messages, bytes(full.ids)) == ("new", None, b"new")


@pytest.mark.parametrize(
    ("kv_tokens", "n_prompt", "fields", "max_tokens"),
    [
        (15, 12, {"max_tokens": 8, "fit_max_tokens": False}, 8),
        (15, 12, {"max_tokens": 9, "fit_max_tokens": False}, "tokens + max_tokens 9 = 21; the model's context is 20"),
        (None, 12, {"max_tokens": 32_000}, 8),
        (100, 12, {"max_tokens": 32_000}, 8),
        (15, 12, {"max_tokens": 32_000}, 3),
        (15, 12, {"max_tokens": 2}, 2),
        (15, 14, {"max_tokens": 32_000}, 1),
        (15, 15, {"max_tokens": 32_000}, "prompt of 15 tokens + max_tokens 1 = 16; the model's context is 15 with"),
        (None, 30, {"max_tokens": 32_000}, "prompt of 30 tokens + max_tokens 1 = 31; the model's context is 20"),
        (None, 12, {"max_tokens": 32_000, "min_tokens": 9}, "prompt of 12 tokens + max_tokens 9 = 21; the model's"),
        (15, 15, {"max_tokens": 0, "prompt_logprobs": 0, "cache": "off"}, 0),
    ],
)
def test_a_limit_over_the_context_is_refused_or_lowered_to_what_is_left(kv_tokens, n_prompt, fields, max_tokens):
    small = dataclasses.replace(MODEL, context_tokens=20, kv_tokens=kv_tokens)
    asked = request(prompt="x", **{"fit_max_tokens": True, **fields})
    if isinstance(max_tokens, int):
        assert fitted(asked, n_prompt, small).max_tokens == max_tokens
    else:
        with pytest.raises(ContextLimitExceeded, match=re.escape(max_tokens)):
            fitted(asked, n_prompt, small)


def test_a_text_no_tokenization_could_fit_is_refused_before_it_is_encoded():
    class Unused(ScriptedTokenizer):
        def encode(self, text, *, special_start):
            raise AssertionError("encoded a text that cannot fit")

    small = dataclasses.replace(MODEL, context_tokens=20)
    with pytest.raises(RequestTooLarge, match="101 bytes"):
        build_prompt(request(prompt="x" * 101), None, small, Unused())


@pytest.mark.parametrize("is_forgotten", [False, True], ids=["", "forgotten"])
@pytest.mark.parametrize(
    ("fields", "number", "error"),
    [
        ({"expect_version": 3}, 3, None),
        ({"expect_version": 3}, 4, AgentVersionConflict),
        ({"expect_version": 3}, 0, AgentVersionConflict),
        ({"expect_version": 0}, 0, None),
        ({"expect_version": 0}, 1, AgentVersionConflict),
        ({"must_exist": True}, 0, AgentNotFound),
        ({"must_exist": True}, 1, None),
        ({}, 0, None),
    ],
)
def test_an_append_may_name_the_version_it_expects(fields, number, error, is_forgotten):
    """A forgotten agent is none that exists, though its numbers go on."""
    if is_forgotten and number == 0:
        agent = AgentVersion("a", 3, None, begins_again=True)
    else:
        agent = AgentVersion("a", number, None)
    asked = request(prompt="x", context="append", **fields)
    with pytest.raises(error) if error else nullcontext():
        check_expectations(asked, agent)


def test_a_version_is_replaced_unless_the_conversation_continues():
    def replaced(stored, **fields):
        return replaced_version(first_turn(**fields), AgentVersion("a", 7, stored))

    asked, answer = user("one"), {"role": "assistant", "content": "two"}
    chat = answered(first_turn(messages=[asked]), "two")
    # The same text, but in other tokens of the model than the tokenizer would choose.
    odd = answered(first_turn(messages=[asked]), "two", generated=[*b"t", 1000, END])
    for stored in (chat, odd):
        assert replaced(stored, messages=[asked, answer, user("three")]) is None
        assert replaced(stored, messages=[asked, answer]) is None
        assert replaced(stored, messages=[asked, {**answer, "content": "2"}, user("three")]) == 7
        assert replaced(stored, messages=[asked]) == 7
        assert replaced(stored, prompt="one") == 7
    prompted = answered(first_turn(prompt="one "), "two", generated=[1000, END])
    assert replaced(prompted, prompt="one two three") is None
    assert replaced(prompted, prompt="one 2 three") == 7
    assert replaced(None, prompt="x") is None


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CALL = '<tool_call>{"name":"look","arguments":{}}</tool_call>'


def called(prompt, text, **fields):
    """The transcript after an answer with calls."""
    done = CompletedGeneration(0, "finished", (*text.encode(), END), text, "eos", len(text) + 1)
    asked = dataclasses.replace(prompt, markers=MODEL.answer_format.markers("normal", with_calls=True))
    answer = read_answer(request(messages=[user("?")], tools=TOOLS), asked, done, MODEL, "seed")
    return next_transcript(prompt, done, answer.message(), MODEL)


@pytest.mark.parametrize("said", [CALL, f"<think>Hm.</think>{CALL}", "<think>Hm.</think> Yes."])
def test_append_continues_the_ids_of_an_answer_that_the_template_writes_otherwise(said):
    """The scripted template writes neither calls nor thinking."""
    transcript = called(first_turn(messages=[user("one")]), said)
    call_id = (transcript.messages[-1].tool_calls or [{"id": "x"}])[0]["id"]
    result = {"role": "tool", "content": "blue", "tool_call_id": call_id}
    prompt = append(transcript, messages=[result])
    assert prompt.rendered_anew is None
    assert prompt.ids == (*transcript.token_ids, *CODEC.encode_rendered("\n\x01tool\nblue\x00\n\x01assistant\n"))
    again = called(prompt, said)
    assert append(again, messages=[user("two")]).ids[: len(again.token_ids)] == again.token_ids
    sent_back = first_turn(messages=[user("one"), transcript.messages[-1].as_generated(), result])
    assert replaced_version(sent_back, AgentVersion("a", 1, transcript)) is None


class Rewriting(ScriptedTokenizer):
    """Writes a tool's result in another form after a call than after text, as templates may."""

    def render(self, messages, **options):
        has_call = any(message.tool_calls for message in messages)
        return super().render(messages, **options) + ("(after a call)" if has_call else "")


class Refusing(ScriptedTokenizer):
    """Refuses an answer that quotes a call as text."""

    def render(self, messages, **options):
        if any("<tool_call>" in (message.content or "") for message in messages):
            raise TemplateError("no call before the result")
        return super().render(messages, **options)


@pytest.mark.parametrize("codec", [Rewriting(), Refusing()])
def test_a_template_that_needs_the_calls_is_given_them_and_the_conversation_is_encoded_anew(codec):
    transcript = called(first_turn(messages=[user("one")]), CALL)
    asked = request(messages=[{"role": "tool", "content": "blue"}], context="append")
    prompt = build_prompt(asked, transcript, MODEL, codec)
    assert prompt.rendered_anew == "template_rewrote_history"
    assert prompt.ids == tuple(
        codec.encode_rendered(
            codec.render(prompt.messages, add_generation_prompt=True, tools=None, template_kwargs=None)
        )
    )


def test_tools_that_may_not_be_called_are_not_shown_to_the_model():
    class Noting(ScriptedTokenizer):
        seen: ClassVar[list] = []

        def render(self, messages, **options):
            self.seen.append(options["tools"])
            return super().render(messages, **options)

    for choice in ("none", "auto", None):
        build_prompt(request(messages=[user("?")], tools=TOOLS, tool_choice=choice), None, MODEL, Noting())
    assert Noting.seen == [None, tuple(TOOLS), tuple(TOOLS)]


def test_a_template_that_opens_the_thinking_is_noticed():
    class Opening(ScriptedTokenizer):
        def render(self, messages, **options):
            return super().render(messages, **options) + "<think>\n"

    prompt = build_prompt(request(messages=[user("?")]), None, MODEL, Opening())
    assert (prompt.opened, prompt.markers.first) == ("<think>\n", "reasoning")
    other = first_turn(messages=[user("?")])
    assert (other.opened, other.markers.first) == ("", "normal")


def test_a_system_prompt_ends_where_prompts_with_other_questions_part():
    system, systems = {"role": "system", "content": "Answer in rhyme."}, SystemPrompts()

    def n_system(*messages, **fields):
        asked = request(messages=list(messages), **fields)
        return systems.n_tokens(asked, build_prompt(asked, None, MODEL, CODEC), CODEC)

    one, two = (first_turn(messages=[system, user(text)]).ids for text in ("one", "two"))
    n_common = next(n for n, pair in enumerate(zip(one, two, strict=True)) if pair[0] != pair[1])
    assert n_system(system, user("one")) == n_system(system, user("two"), user("x")) == n_common
    assert n_system(user("one")) == 0
    text = request(prompt="one")
    assert systems.n_tokens(text, build_prompt(text, None, MODEL, CODEC), CODEC) == 0
