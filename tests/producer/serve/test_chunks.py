"""The events of a streamed answer: their form, and text that comes again."""

import json

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from tests.producer.played_worker import result_fields

from stoker.api.chat import Chunks
from stoker.api.deltas import Delta, Deltas
from stoker.api.failure import Failure
from stoker.streaming import Restarted, TextChunk
from stoker_shared.answer_parts import Edge, Markers
from stoker_shared.result import GenerationResult

DONE = b"data: [DONE]\n\n"
LOGPROBS = {"content": [{"token": "hello", "logprob": -0.5}]}


@pytest.mark.parametrize(("is_text", "form"), [(True, Completion), (False, ChatCompletionChunk)])
@pytest.mark.parametrize("text", ["hello", ""])
def test_every_event_is_of_openais_form(is_text, form, text):
    result = GenerationResult.model_validate({**result_fields("j", text), "logprobs": LOGPROBS})
    chunks = Chunks("j", "m", 7, is_raw=is_text, with_usage=True)
    events = [*chunks.more(Delta("text", "x")), *chunks.end([result], Deltas(is_raw=is_text))]
    assert events.pop() == DONE
    with_scores = 0
    for event in events:
        found = json.loads(event.removeprefix(b"data: "))
        if is_text and found["choices"]:  # OpenAI's type has no null here, though its servers send it
            found["choices"][0]["finish_reason"] = found["choices"][0]["finish_reason"] or "stop"
        form.model_validate(found, strict=True)
        with_scores += any(choice["logprobs"] is not None for choice in found["choices"])
    assert with_scores == 1


THINKING = Markers(first="reasoning", edges=(Edge("reasoning", "|", "normal"), Edge("normal", "#", "tool")))


def sent(run, result, *, is_text=False, markers=THINKING):
    """What was sent of a run, in which ``None`` is a restart, and of its result."""
    deltas = Deltas(is_raw=is_text)
    found = [delta for part in run for delta in deltas.add(TextChunk(part, markers) if part else Restarted())]
    return found, deltas.rest(GenerationResult.model_validate({**result_fields("j"), **result}))


def joined(deltas, kind="text"):
    return "".join(delta.text for delta in deltas if delta.kind == kind)


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize(
    ("run", "begun", "text"),
    [
        (["a", "b"], "ab", "ab"),
        (["ab", None, "a", "bc"], "abc", "abc"),
        (["ab", None, "abc", "d"], "abcd", "abcd"),
        (["ab", None, None, "a", "b", "c"], "abc", "abc"),
        (["ab", None, "ab"], "ab", "ab"),
        ([None, "ab"], "ab", "ab"),
        (["ab", None], "ab", "abc"),
    ],
)
def test_text_that_comes_again_is_sent_once(run, begun, text, is_text):
    live, rest = sent(run, {"text": text}, is_text=is_text, markers=Markers())
    assert (joined(live), joined([*live, *rest])) == (begun, text)


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("run", [["ab", None, "b"], ["ab", None, "ac"], ["ab", None, "a", "x"], ["ab", None, "a"]])
def test_text_that_comes_again_otherwise_is_an_error(run, is_text):
    with pytest.raises(Failure) as failure:
        sent(run, {"text": "a"}, is_text=is_text, markers=Markers())
    assert failure.value.body["error"]["code"] == "text_changed"


RESULT = {"text": "Hm. So|Yes.#call", "reasoning": "Hm. So", "answer": "Yes."}


def test_an_answer_whose_worker_is_lost_while_it_thinks_goes_on_where_it_was():
    live, rest = sent(["Hm.", None, "H", "m. S", "o|Y"], RESULT)
    assert [(delta.kind, delta.text) for delta in live] == [
        *(("reasoning", text) for text in ("Hm.", " S", "o")),
        ("text", "Y"),
    ]
    assert [(delta.kind, delta.text) for delta in rest] == [("text", "es.")]


@pytest.mark.parametrize("run", [["Hm.", None, "No."], ["Hm. So|Yes", None, "Hm. So|No"], ["Hm. So|Yes.", None]])
def test_an_answer_whose_worker_is_lost_while_it_thinks_must_think_the_same_again(run):
    with pytest.raises(Failure):
        sent(run, {**RESULT, "text": "Hm. So|No", "answer": "No"})


def test_what_was_held_back_may_come_out_otherwise_in_another_run():
    live, rest = sent(["Hm. So|", "Yes.", "#one call", None, "Hm. So|Yes.", "#another"], RESULT)
    assert joined([*live, *rest]) == "Yes."


def test_an_answer_is_sent_at_its_end_if_the_worker_does_not_tell_its_markers():
    live, rest = sent(["Hm. So|Yes"], RESULT, markers=None)
    assert live == []
    assert rest == [Delta("reasoning", "Hm. So"), Delta("text", "Yes.")]
