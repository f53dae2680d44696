"""The text of a stream across restarts, and its events as OpenAI's types read them."""

import json

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from tests.producer.played_worker import result_fields

from stoker.openai.failures import Failure
from stoker.serve.chunks import DONE, Chunks, SentText
from stoker.streaming import Restarted, TextChunk
from stoker_shared.result import GenerationResult

LOGPROBS = {"content": [{"token": "hello", "logprob": -0.5}]}


@pytest.mark.parametrize(
    ("run", "sent"),
    [
        (["a", "b"], "ab"),
        (["ab", None, "a", "bc"], "abc"),
        (["ab", None, "abc", "d"], "abcd"),
        (["ab", None, None, "a", "b", "c"], "abc"),
        (["ab", None, "ab"], "ab"),
        ([None, "ab"], "ab"),
    ],
)
def test_text_that_comes_again_is_sent_once(run, sent):
    text = SentText()
    assert "".join(text.add(Restarted() if part is None else TextChunk(part)) for part in run) == sent
    text.require_all()


@pytest.mark.parametrize("run", [["ab", None, "b"], ["ab", None, "ac"], ["ab", None, "a", "x"], ["ab", None, "a"]])
def test_text_that_comes_again_otherwise_is_an_error(run):
    text = SentText()

    def go():
        for part in run:
            text.add(Restarted() if part is None else TextChunk(part))
        text.require_all()

    with pytest.raises(Failure):
        go()


@pytest.mark.parametrize(("is_text", "form"), [(True, Completion), (False, ChatCompletionChunk)])
def test_every_event_is_of_openais_form(is_text, form):
    result = GenerationResult.model_validate({**result_fields("j"), "logprobs": LOGPROBS})
    chunks = Chunks("j", "m", 7, is_text, True)
    events = [chunks.begin(), chunks.more("x"), *chunks.whole(result), *chunks.end(result)]
    assert events.pop() == DONE
    for event in events:
        found = json.loads(event.removeprefix(b"data: "))
        if is_text and found["choices"]:  # OpenAI's type has no null here, though its servers send it
            found["choices"][0]["finish_reason"] = found["choices"][0]["finish_reason"] or "stop"
        form.model_validate(found, strict=True)
