"""The events of a stream, as OpenAI's types read them."""

import json

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from tests.producer.played_worker import result_fields

from stoker.serve.chunks import DONE, Chunks, Deltas
from stoker_shared.result import GenerationResult

LOGPROBS = {"content": [{"token": "hello", "logprob": -0.5}]}


@pytest.mark.parametrize(("is_text", "form"), [(True, Completion), (False, ChatCompletionChunk)])
@pytest.mark.parametrize("text", ["hello", ""])
def test_every_event_is_of_openais_form(is_text, form, text):
    result = GenerationResult.model_validate({**result_fields("j", text), "logprobs": LOGPROBS})
    chunks = Chunks("j", "m", 7, is_text, True)
    events = [chunks.more({"text": "x"} if is_text else {"content": "x"})]
    events += chunks.rest(result, Deltas(is_text=is_text))
    assert events.pop() == DONE
    with_scores = 0
    for event in events:
        found = json.loads(event.removeprefix(b"data: "))
        if is_text and found["choices"]:  # OpenAI's type has no null here, though its servers send it
            found["choices"][0]["finish_reason"] = found["choices"][0]["finish_reason"] or "stop"
        form.model_validate(found, strict=True)
        with_scores += any(choice["logprobs"] is not None for choice in found["choices"])
    assert with_scores == 1
