"""The parts of an answer in OpenAI's message: content, thinking, tool calls, choices and their counts."""

from openai.types.chat import ChatCompletion
from tests.producer.played_worker import result_fields

from stoker.api.chat import CHAT_URL, TEXT_URL
from stoker.api.endpoints import ENDPOINTS
from stoker.api.responses import URL as RESPONSES_URL
from stoker_shared.result import GenerationResult

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def body(url=CHAT_URL, **fields):
    return ENDPOINTS[url].answer([GenerationResult.model_validate({**result_fields("j"), **fields})], 1, {})


def message(**fields):
    made = body(**fields)
    ChatCompletion.model_validate(made, strict=True)
    return made["choices"][0]["message"]


def test_content_is_the_answer_without_thinking_and_calls():
    found = message(text="<think>hm</think>hi", answer="hi", reasoning="hm")
    assert (found["content"], found["reasoning_content"]) == ("hi", "hm")
    assert set(message()) == {"role", "content", "refusal"}


def test_content_is_null_where_the_model_only_calls_tools():
    calls = {"text": "<call>", "tool_calls": [CALL], "finish_reason": "tool_calls"}
    assert message(**calls, answer=" \n")["content"] is None
    assert message(**calls, answer="I look.")["content"] == "I look."
    assert message(**calls, answer="")["tool_calls"] == [CALL]


def test_every_choice_has_its_index_and_the_counts_are_those_of_all():
    choices = [{"text": text, "finish_reason": reason} for text, reason in (("a", "stop"), ("b", "length"))]
    usage = {"prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 7, "reasoning_tokens": 3}
    for url, text in (
        (CHAT_URL, lambda choice: choice["message"]["content"]),
        (TEXT_URL, lambda choice: choice["text"]),
    ):
        made = body(url, choices=choices, usage=usage)
        found = [(choice["index"], text(choice), choice["finish_reason"]) for choice in made["choices"]]
        assert found == [(0, "a", "stop"), (1, "b", "length")]
        assert made["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
        assert made["usage"]["total_tokens"] == 17


def test_the_task_and_the_models_that_were_tried_are_in_the_body_of_each_endpoint_that_a_batch_may_have():
    tried = [{"model": "small", "accepted": False, "reason": "regex: not found"}]
    for url in (CHAT_URL, TEXT_URL, RESPONSES_URL):
        made = body(url, task="t", attempts=tried)
        assert (made["task"], [attempt["model"] for attempt in made["attempts"]]) == ("t", ["small"])
        assert not {"task", "attempts"} & set(body(url))


def test_a_scored_prompt_is_in_the_body():
    scores = {"start": 0, "content": [None, {"token": "a", "logprob": -1.0}]}
    assert body(TEXT_URL, prompt_logprobs=scores)["prompt_logprobs"]["content"][1]["logprob"] == -1.0
    assert "prompt_logprobs" not in body(TEXT_URL)
