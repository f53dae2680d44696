"""Anthropic's Messages with its own package: answers, streams, errors as its exception classes, and who may call."""

import json
import threading

import anthropic
import httpx
import pytest
from tests.producer.played_worker import result_fields

from stoker.serve import generation
from stoker.serve.settings import Tokens
from stoker_worker.engine.scripted import SCRIPTED_ANSWERS

pytestmark = pytest.mark.server

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
TOOL = {"name": "weather", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def claude(served):
    return connected(served)


def connected(serving, **options):
    made = anthropic.Anthropic(base_url=serving.url, max_retries=0, **{"api_key": "none", **options})
    return serving.clients.enter_context(made)


def said(text):
    return {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": text}]}


def ask(claude, text, **fields):
    return claude.messages.create(**said(text), **fields)


def give(**fields):
    return f"give {json.dumps(fields)}"


def test_a_message_has_its_answer_its_counts_and_its_jobs_id(claude, hand):
    raw = claude.messages.with_raw_response.create(**said("say hi"), system=[{"type": "text", "text": "s"}])
    answer = raw.parse()
    assert ([block.text for block in answer.content], answer.stop_reason) == (["hi"], "end_turn")
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (6, 4)
    assert answer.id == f"msg_{raw.headers['request-id']}"
    assert answer._request_id == raw.headers["x-request-id"]
    sent = hand.request(raw.headers["request-id"])
    assert sent["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "say hi"}]
    assert (sent["temperature"], sent["max_tokens"], sent["fit_max_tokens"]) == (1.0, 99, True)


def test_a_call_of_tools_and_its_result_go_round(claude, hand):
    parts = {"text": "raw", "answer": "", "reasoning": "hm", "tool_calls": [CALL], "finish_reason": "tool_calls"}
    first = ask(claude, give(**parts), tools=[TOOL])
    assert [block.type for block in first.content] == ["thinking", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "say sunny"}
    history = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = claude.messages.create(model="m", max_tokens=9, messages=history, tools=[TOOL])
    assert second.content[0].text == "sunny"
    sent = hand.request(second._request_id)["messages"]
    assert (sent[1]["tool_calls"], sent[1]["reasoning_content"]) == ([CALL], "hm")
    assert sent[2] == {"role": "tool", "tool_call_id": "call_1", "content": "say sunny"}


def test_thinking_text_and_calls_are_streamed_into_the_message_of_an_answer_without_a_stream(claude, hand):
    markers = SCRIPTED_ANSWERS.markers("reasoning", with_calls=True)
    found: list[anthropic.types.Message] = []
    texts: list[str] = []

    def read():
        with claude.messages.stream(**said("wait"), tools=[TOOL]) as stream:
            texts.extend(stream.text_stream)
            found.append(stream.get_final_message())

    reading = threading.Thread(target=read)
    reading.start()
    job_id = hand.wait_for_one()
    hand.say(job_id, "1", "whole", "\nWhere is it?</think>I l", markers)
    hand.say(job_id, "1", "more", "ook. <tool_call>{", markers)
    parts = {"text": "raw", "answer": "I look.", "reasoning": "Where is it?", "tool_calls": [CALL, CALL]}
    hand.finish(job_id, {**result_fields(job_id), **parts, "finish_reason": "tool_calls"})
    reading.join()
    message = found[0]
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (message.content[0].thinking, message.content[1].text) == ("Where is it?", "I look.")
    assert "".join(texts) == "I look."
    assert [block.input for block in message.content[2:]] == [{"city": "Rome"}] * 2
    assert (message.id, message.stop_reason) == (f"msg_{job_id}", "tool_use")
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens, message.usage.output_tokens) == (6, 4, 2)


def test_a_stream_is_kept_alive_by_pings_and_ends_with_an_event_of_its_error(served, hand, monkeypatch):
    monkeypatch.setattr(generation, "KEEP_ALIVE_S", 0.05)
    events, last = [], ""
    with httpx.stream("POST", f"{served.url}/v1/messages", json={**said("wait"), "stream": True}) as answer:
        job_id = hand.wait_for_one()
        for line in answer.iter_lines():
            if line.startswith("event: "):
                events.append(line.removeprefix("event: "))
                if events.count("ping") == 1 and events[-1] == "ping":
                    hand.fail(job_id, "EngineFailed: broke")
                    hand.say(job_id, "last", "end")
            last = line or last
    assert events[:2] == ["message_start", "ping"]
    error = {"type": "api_error", "message": "EngineFailed: broke"}
    assert json.loads(last.removeprefix("data: ")) == {"type": "error", "error": error, "request_id": job_id}


def test_the_id_of_an_error_is_that_of_its_header_also_if_the_client_chose_another(claude):
    with pytest.raises(anthropic.APIStatusError) as caught:
        ask(claude, "fail ModelMismatch: m", extra_headers={"X-Request-Id": "mine"})
    assert caught.value.body["request_id"] == caught.value.request_id != "mine"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "fields", "error", "kind"),
    [
        ("x", {"extra_body": {"top_p": 3}}, anthropic.BadRequestError, "invalid_request_error"),
        ("x", {"extra_body": {"colour": "red"}}, anthropic.BadRequestError, "invalid_request_error"),
        ("fail ModelMismatch: m", {}, anthropic.NotFoundError, "not_found_error"),
        ("fail EngineFailed: broke", {}, anthropic.InternalServerError, "api_error"),
    ],
)
def test_an_error_is_anthropics_exception(claude, stream, text, fields, error, kind):
    with pytest.raises(error) as caught:
        list(ask(claude, text, stream=stream, **fields))
    written = caught.value.body
    assert written["error"]["type"] == kind
    assert (written["type"], written["request_id"]) == ("error", caught.value.request_id)


def test_a_prompt_is_counted_without_an_answer(claude, hand):
    assert claude.messages.count_tokens(model="m", messages=said("say x")["messages"], system="s").input_tokens == 10
    last = hand.request(hand.all_jobs()[-1])
    assert (last["max_tokens"], [message["content"] for message in last["messages"]]) == (0, ["s", "say x"])


def test_the_tool_runner_of_anthropics_package_goes_on_without_a_thread(claude):
    """It asks for one first, and sends the whole conversation where there is none."""

    @anthropic.beta_tool
    def look(city: str) -> str:
        """Look at the sky."""
        return city

    said_last = {"role": "user", "content": "say sunny"}
    runner = claude.beta.messages.tool_runner(model="m", max_tokens=9, messages=[said_last], tools=[look])
    assert runner.until_done().content[0].text == "sunny"


def test_a_session_is_a_hint_that_an_agent_makes_needless(claude, hand):
    def request(**headers):
        answer = ask(claude, "say x", metadata={"user_id": '{"session_id": "s1"}'}, extra_headers=headers)
        return hand.request(answer._request_id)

    assert request()["session"] == "s1"
    assert request(**{"x-claude-code-session-id": "s2"})["session"] == "s2"
    found = request(**{"x-claude-code-session-id": "s2", "X-Stoker-Agent": "a"})
    assert (found["agent_id"], "session" in found) == ("a", False)


def test_a_token_is_a_bearer_or_an_api_key(serve):
    serving = serve(tokens=Tokens([("ann", "a" * 20)]))
    for options in ({"api_key": "a" * 20}, {"api_key": None, "auth_token": "a" * 20}):
        assert ask(connected(serving, **options), "say x").content[0].text == "x"
    for options in ({"api_key": "b" * 20}, {"api_key": None, "auth_token": "b" * 20}):
        with pytest.raises(anthropic.AuthenticationError) as refused:
            ask(connected(serving, **options), "say x")
        assert refused.value.body["error"]["type"] == "authentication_error"
    assert {"/v1/messages", "/v1/batches"} <= set(httpx.get(serving.url).json()["endpoints"])  # without a token
    assert httpx.head(serving.url).status_code == 200
