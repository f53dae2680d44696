"""Calls with OpenAI's own package: answers, streams, errors as its exception classes, and clients that hang up."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from rq.job import JobStatus
from tests.producer.played_worker import result_fields
from tests.producer.serve.conftest import serving_at
from tests.support.lossy_proxy import LossyProxy
from tests.support.wait import wait_for

from stoker import connection
from stoker.serve import backend
from stoker.serve.settings import Tokens
from stoker_worker.engine.scripted import SCRIPTED_ANSWERS

pytestmark = pytest.mark.server

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def ask(client, text, **fields):
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], **fields)


def give(**fields):
    return f"give {json.dumps(fields)}"


def ended(hand, job_id, status):
    wait_for(lambda: hand.job(job_id).get_status() == status, 20, lambda: hand.job(job_id).get_status())


def test_a_chat_has_its_answer_its_counts_and_its_jobs_id(client, hand):
    raw = client.chat.completions.with_raw_response.create(model="m", messages=[{"role": "user", "content": "say hi"}])
    answer = raw.parse()
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("hi", "stop")
    assert (answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (10, 4)
    assert answer.id == f"chatcmpl-{raw.headers['x-request-id']}"
    assert answer.system_fingerprint == f"stoker-{version('stoker')}"
    assert hand.request(raw.headers["x-request-id"])["temperature"] == 1.0


def test_a_call_of_tools_is_one_in_openais_form_and_its_result_goes_back(client, hand):
    answer = ask(client, give(text="<call>", answer="", tool_calls=[CALL], finish_reason="tool_calls"), tools=[TOOL])
    message = answer.choices[0].message
    assert (message.content, answer.choices[0].finish_reason) == (None, "tool_calls")
    assert message.tool_calls[0].function.name == "weather"
    history = [
        {"role": "user", "content": "?"},
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "say sunny"},
    ]
    second = client.chat.completions.create(model="m", messages=history, tools=[TOOL])
    assert second.choices[0].message.content == "sunny"
    sent = hand.request(second.id.removeprefix("chatcmpl-"))["messages"]
    assert sent[1]["tool_calls"] == [CALL]


def test_a_stream_says_the_role_then_the_text_then_the_end_and_the_counts(client):
    chunks = list(ask(client, "say hello", stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert (deltas[0].role, "".join(delta.content or "" for delta in deltas)) == ("assistant", "hello")
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(deltas) - 1) + ["stop"]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * len(deltas)
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 2)
    with pytest.raises(openai.BadRequestError) as refused:  # its form has no place for them
        ask(client, "say x", stream=True, extra_body={"prompt_logprobs": 1})
    assert refused.value.param == "prompt_logprobs"


class Reading:
    """A stream that a thread reads.

    Attributes:
        deltas: what has come.
        errors: the one that ended it.
    """

    def __init__(self, client, hand, **fields):
        self.deltas: list[Any] = []
        self.errors: list[openai.APIError] = []
        self._thread = threading.Thread(target=self._read, args=(client, fields))
        self._thread.start()
        self.job_id = hand.wait_for_one()

    def _read(self, client, fields):
        try:
            for chunk in ask(client, "wait", stream=True, **fields):
                self.deltas.append(chunk.choices[0].delta)
        except openai.APIError as error:
            self.errors.append(error)

    def joined(self, name):
        return "".join(getattr(delta, name, None) or "" for delta in self.deltas)

    def wait_for(self, **parts):
        wait_for(lambda: {name: self.joined(name) for name in parts} == parts, 20, lambda: str(self.deltas))

    def to_its_end(self):
        self._thread.join()


def test_a_stream_goes_on_when_another_worker_begins_the_same_text_again(client, hand):
    reading = Reading(client, hand)
    hand.say(reading.job_id, "1", "whole", "one t")
    reading.wait_for(content="one t")
    hand.say(reading.job_id, "2", "whole", "on")
    hand.say(reading.job_id, "2", "more", "e two")
    hand.finish(reading.job_id, text="one two!")
    reading.to_its_end()
    assert (reading.joined("content"), reading.errors) == ("one two!", [])


def test_a_stream_ends_with_an_error_when_the_text_that_comes_again_is_another(client, hand):
    reading = Reading(client, hand)
    hand.say(reading.job_id, "1", "whole", "one t")
    reading.wait_for(content="one t")
    hand.say(reading.job_id, "2", "whole", "tw")
    reading.to_its_end()
    assert reading.joined("content") == "one t"
    assert reading.errors[0].body["code"] == "text_changed"
    ended(hand, reading.job_id, JobStatus.CANCELED)


def test_a_stream_that_finds_no_place_is_sent_at_its_end(serve, hand, monkeypatch):
    monkeypatch.setattr(backend, "_MOST_LIVE", 1)
    client = serve().client(timeout=20)
    first = Reading(client, hand)
    hand.say(first.job_id, "1", "whole", "A")
    first.wait_for(content="A")
    second = Reading(client, hand)
    wait_for(lambda: len(hand.waiting()) == 2, 20)
    job_id = hand.waiting()[-1]  # the second one
    hand.say(job_id, "1", "whole", "B")
    time.sleep(0.3)
    assert second.joined("content") == ""
    hand.finish(job_id, text="B")
    hand.finish(first.job_id, text="A")
    for reading in (first, second):
        reading.to_its_end()
    assert (first.joined("content"), second.joined("content")) == ("A", "B")


def test_thinking_and_text_are_streamed_as_they_come_and_calls_at_the_end(client, hand):
    reading = Reading(client, hand, tools=[TOOL])
    markers = SCRIPTED_ANSWERS.markers("reasoning", with_calls=True)
    for kind, text, parts in (
        ("whole", "\nWhere i", {"reasoning_content": "Where i"}),
        ("more", "s it?</thi", {"reasoning_content": "Where is it?"}),
        ("more", "nk>I look", {"reasoning_content": "Where is it?", "content": "I look"}),
        ("more", ". <tool_call>{", {"reasoning_content": "Where is it?", "content": "I look."}),
    ):
        hand.say(reading.job_id, "1", kind, text, markers)
        reading.wait_for(**parts)
    said = {"text": "raw", "answer": "I look.", "reasoning": "Where is it?"}
    result = {**result_fields(reading.job_id), **said, "tool_calls": [CALL, CALL], "finish_reason": "tool_calls"}
    hand.finish(reading.job_id, result)
    reading.to_its_end()
    assert (reading.joined("reasoning_content"), reading.joined("content")) == ("Where is it?", "I look.")
    assert reading.deltas[0].role == "assistant"
    calls = [call for delta in reading.deltas for call in delta.tool_calls or ()]
    assert [(call.index, call.function.arguments) for call in calls] == [(n, '{"city": "Rome"}') for n in (0, 1)]


def test_a_line_separator_in_a_text_ends_no_line_of_the_stream(served):
    body = {"model": "m", "messages": [{"role": "user", "content": give(text="a\u2028b\x85c")}], "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    texts = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(texts) == "a\u2028b\x85c"


def test_several_choices_are_streamed_by_their_index(client):
    choices = [{"text": text, "finish_reason": "stop"} for text in ("a", "b")]
    found = {0: "", 1: ""}
    for chunk in ask(client, give(choices=choices), stream=True, n=2):
        found[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert found == {0: "a", 1: "b"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "fields", "error", "code", "param"),
    [
        ("x", {"top_p": 3}, openai.BadRequestError, "invalid_value", "top_p"),
        ("x", {"n": 2, "metadata": {"agent_id": "a"}}, openai.BadRequestError, "invalid_value", "n"),
        ("x", {"extra_body": {"colour": "red"}}, openai.BadRequestError, "unknown_parameter", "colour"),
        ("fail ModelMismatch: m", {}, openai.NotFoundError, "model_not_found", None),
        ("fail EngineFailed: broke", {}, openai.InternalServerError, None, None),
    ],
)
def test_an_error_is_openais_exception(client, stream, text, fields, error, code, param):
    with pytest.raises(error) as caught:
        list(ask(client, text, stream=stream, **fields))
    assert (caught.value.code, caught.value.param) == (code, param)


def test_what_is_no_call_at_all_is_refused_in_the_same_form(served, client):
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="m", input="x")
    url = f"{served.url}/v1/chat/completions"
    for content, kind, status in (
        ("[]", "application/json", 400),
        ("{", "application/json", 400),
        ('{"\\ud800": 1}', "application/json", 400),
        ('{"model": "m", "messages": %s}' % ("[" * 900 + "]" * 900), "application/json", 413),
        ("{}", "text/plain", 415),
    ):
        answer = httpx.post(url, content=content, headers={"content-type": kind})
        assert (answer.status_code, set(answer.json()["error"])) == (status, {"message", "type", "param", "code"})
    assert httpx.get(url).status_code == 405
    messages = httpx.post(f"{served.url}/v1/messages", content="{", headers={"content-type": "application/json"})
    assert (messages.status_code, set(messages.json())) == (400, {"type", "error", "request_id"})


@pytest.mark.parametrize(
    ("begin", "unit", "end", "status"),
    [
        ("[", "0,", "0]", 413),
        ("", '{"a":', "", 413),
        ('{"messages":[{"role":"user","content":"x"}],"tools":[', "{},", "{}]}", 413),
        ('{"messages":[{"role":"user","content":"', "\\u0416", '"}],"top_p":3}', 400),
    ],
)
def test_a_large_body_that_is_no_request_is_refused_before_it_is_built(served, begin, unit, end, status):
    content = begin + unit * ((7 * 2**20) // len(unit)) + end
    answer = httpx.post(
        f"{served.url}/v1/chat/completions",
        content=content,
        headers={"content-type": "application/json"},
        timeout=30,
    )
    assert answer.status_code == status


def test_a_text_of_seven_megabytes_is_no_large_number_of_values(client, hand):
    text = ",[{}" * (7 * 2**18) + "\nsay x"
    for _ in range(2):  # the second time it is the same job
        answer = ask(client, text, extra_headers={"Idempotency-Key": "long-text"})
        assert answer.choices[0].message.content == "x"
    assert hand.request("long-text")["messages"][0]["content"] == text


def test_a_body_may_be_as_large_as_the_operator_allows_if_its_request_is_not(serve):
    client = serve(max_body_bytes=12 * 2**20).client()
    url, headers = f"{client.base_url}completions", {"content-type": "application/json"}
    for body, status in ((r"\u0416" * 1_500_000 + r"\nsay x", 200), ("x" * 9_000_000, 413)):
        content = f'{{"model": "m", "prompt": "{body}"}}'
        assert httpx.post(url, content=content, headers=headers, timeout=30).status_code == status


def test_a_body_over_the_limit_is_refused_also_without_a_length(serve):
    url = f"{serve(max_body_bytes=1000).url}/v1/chat/completions"
    headers = {"content-type": "application/json"}
    for content in (b"x" * 2000, iter([b"x" * 500] * 4)):
        assert httpx.post(url, content=content, headers=headers).status_code == 413


def test_a_client_that_hangs_up_within_its_body_is_no_error_of_the_server(served, client, caplog):
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as connection:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 9\r\n\r\n{{".encode())
    ask(client, "say x")
    assert not caplog.records


def test_a_client_that_hangs_up_cancels_its_job(served, hand):
    for stream in (False, True):
        with served.client(timeout=0.5) as impatient, pytest.raises(openai.APITimeoutError):
            list(ask(impatient, "wait", stream=stream))
        last = [job_id for job_id in hand.all_jobs() if hand.line(hand.request(job_id)) == "wait"][-1]
        ended(hand, last, JobStatus.CANCELED)


def test_a_call_with_a_key_can_be_made_again_and_its_job_outlives_its_client(served, client, hand):
    key = {"Idempotency-Key": "my-key"}
    with served.client(timeout=0.5) as impatient, pytest.raises(openai.APITimeoutError):
        ask(impatient, "wait", extra_headers=key)
    assert hand.job("my-key").get_status() == JobStatus.QUEUED
    hand.finish("my-key", text="late")
    assert ask(client, "wait", extra_headers=key).choices[0].message.content == "late"
    with pytest.raises(openai.ConflictError) as conflict:
        ask(client, "say something else", extra_headers=key)
    assert conflict.value.code == "duplicate_job"
    for refused in ("my key", "k" * 201, ""):
        with pytest.raises(openai.BadRequestError, match="Idempotency-Key: "):
            ask(client, "wait", extra_headers={"Idempotency-Key": refused})


def test_an_agents_call_whose_job_may_be_in_the_queue_is_not_repeated_by_its_client_unless_it_has_a_key(
    server_url, hand, monkeypatch
):
    monkeypatch.setattr(connection, "_RETRIES", 0)
    port = urlsplit(server_url).port
    with LossyProxy(port) as proxy, serving_at(server_url.replace(f":{port}", f":{proxy.port}")) as serving:
        for said, headers, is_repeated in (
            ("say once", {"X-Stoker-Agent": "ann"}, "false"),
            ("say other", {}, "true"),
            ("say again", {"X-Stoker-Agent": "bob", "Idempotency-Key": "again"}, "true"),
        ):
            ask(serving.client(), "say x")  # so that the server has its connections
            proxy.lose(lambda exchange: exchange.is_transaction and exchange.holds("rq:queue:generate"))
            proxy.lose(lambda exchange: exchange.names == ("HMGET",))  # the look whether the job is there
            client = serving.client().with_options(max_retries=0 if is_repeated == "true" else 2)
            with pytest.raises(openai.InternalServerError, match="no Redis server answers") as lost:
                ask(client, said, extra_headers=headers)
            assert (lost.value.status_code, lost.value.response.headers["x-should-retry"]) == (503, is_repeated)
            proxy.spare_all()
            made = [job_id for job_id in hand.all_jobs() if hand.line(hand.request(job_id)) == said]
            assert len(made) == 1
        assert ask(serving.client(), said, extra_headers=headers).choices[0].message.content == "again"


@pytest.mark.parametrize(("number", "status"), [("NaN", 400), ("-Infinity", 400), ("1e999", 413), ("-1e999", 413)])
def test_what_is_no_number_of_json_comes_back_in_no_answer(served, number, status):
    body = f'{{"model": "m", "input": [{{"role": "user", "content": "say x", "extra": {number}}}]}}'
    answer = httpx.post(f"{served.url}/v1/responses", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}


def test_the_agent_and_the_context_are_in_headers_or_the_body(client, hand):
    def request(**fields):
        return hand.request(ask(client, "say x", **fields).id.removeprefix("chatcmpl-"))

    assert request(user="u")["session"] == "u"
    assert request(user="u", extra_headers={"X-Stoker-Session": "s"})["session"] == "s"
    assert request(user="u", extra_headers={"X-Stoker-Context": "append"})["agent_id"] == "u"
    assert request(user="u", metadata={"agent_id": "m"})["agent_id"] == "m"
    headers = {"X-Stoker-Agent": "h", "X-Stoker-Context": "append"}
    found = request(user="u", metadata={"agent_id": "m"}, extra_headers=headers)
    assert (found["agent_id"], found["context"]) == ("h", "append")
    append = {"extra_body": {"context": "append"}}
    assert request(user="u", **append)["agent_id"] == "u"
    assert request(user="u", **append, extra_headers={"X-Stoker-Session": "s"})["agent_id"] == "s"
    assert "agent_id" not in request()
    any_name = {b"x-stoker-agent": "é/🙂".encode()}
    answer = httpx.post(f"{client.base_url}completions", json={"model": "m", "prompt": "say x"}, headers=any_name)
    assert hand.request(answer.headers["x-request-id"])["agent_id"] == "é/🙂"


def test_calls_over_the_limit_are_told_to_come_later_and_a_place_is_given_back(serve, hand):
    limited = serve(max_waiting=1).client()
    first = threading.Thread(target=lambda: ask(limited, "wait"))
    first.start()
    job_id = hand.wait_for_one()
    with pytest.raises(openai.RateLimitError) as refused:
        ask(limited, "say x")
    assert refused.value.response.headers["retry-after"] == "5"
    hand.finish(job_id)
    first.join()
    assert ask(limited, "say x").choices[0].message.content == "x"


def test_without_a_worker_a_call_is_refused_or_waits_as_the_operator_wants(serve, nobody):
    with pytest.raises(openai.InternalServerError) as refused:
        ask(serve(worker_wait_s=0).client(), "say x")
    assert (refused.value.status_code, refused.value.code) == (503, "no_worker")
    assert ask(serve(queue_without_worker=True).client(), "say x").choices[0].message.content == "x"


def test_a_job_that_takes_too_long_is_canceled(serve, hand):
    with pytest.raises(openai.InternalServerError) as late:
        ask(serve(timeout_s=1).client(), "wait")
    assert late.value.status_code == 504
    assert "not canceled" not in str(late.value)
    ended(hand, late.value.response.headers["x-request-id"], JobStatus.CANCELED)


def test_calls_that_outlast_a_stop_are_told_so_and_their_jobs_are_canceled(server_url, hand, caplog):
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "wait"}], "max_tokens": 5}
    kinds = {"/v1/messages": "overloaded_error", "/v1/chat/completions": "server_error"}
    with ThreadPoolExecutor() as threads:
        with serving_at(server_url, grace_s=1) as serving:
            calls = {
                (path, is_streamed): threads.submit(
                    httpx.post, f"{serving.url}{path}", json={**asked, "stream": is_streamed}, timeout=60
                )
                for path in kinds
                for is_streamed in (False, True)
            }
            wait_for(lambda: len(hand.waiting()) == len(calls), 20)
            jobs = hand.waiting()
            for job_id in jobs:
                hand.say(job_id, "1", "whole", "A")
            time.sleep(0.3)
        for (path, is_streamed), call in calls.items():
            answer = call.result()
            assert answer.status_code == (200 if is_streamed else 503)
            error = json.loads(answer.text.rpartition("data: ")[2])["error"]
            assert (error["type"], "stops" in error["message"]) == (kinds[path], True)
    for job_id in jobs:
        ended(hand, job_id, JobStatus.CANCELED)
    assert not [record for record in caplog.records if record.exc_info]


def test_with_tokens_only_their_holders_may_call_and_share_neither_caches_nor_jobs(serve, hand):
    serving = serve(tokens=Tokens([("ann", "a" * 20), ("bob", "b" * 20)]))
    ids = [ask(serving.client(letter * 20), "say x").id.removeprefix("chatcmpl-") for letter in "aba"]
    salts = [hand.request(job_id)["cache_salt"] for job_id in ids]
    assert salts[0] == salts[2] != salts[1]
    ann, bob = serving.client("a" * 20), serving.client("b" * 20)
    for agent in ({}, {"X-Stoker-Agent": "shared"}):
        headers = {"Idempotency-Key": f"of-ann-{len(agent)}", **agent}
        assert ask(ann, "say x", extra_headers=headers).id == ask(ann, "say x", extra_headers=headers).id
        with pytest.raises(openai.ConflictError):
            ask(bob, "say x", extra_headers=headers)
    for token in ("c" * 20, "b" * 19):
        with pytest.raises(openai.AuthenticationError):
            ask(serving.client(token), "say x")
    assert httpx.get(f"{serving.url}/v1/models").status_code == 401
    assert httpx.get(f"{serving.url}/healthz").status_code == 200


@pytest.mark.parametrize(
    "headers", [{"host": "evil.example"}, {"origin": "https://evil.example"}, {"host": "[::1"}, {"origin": "http://["}]
)
def test_without_tokens_web_pages_of_other_sites_may_not_call(served, headers):
    assert httpx.get(f"{served.url}/v1/models", headers=headers).status_code == 403


def test_the_models_are_those_of_the_live_workers(client, hand):
    record = {"queues": ["generate"], "model": "org/model", "context_tokens": 4096, "mode": "rows"}
    hand.register({**record, "host": "h", "pid": 1, "started_at": 5.0})
    [model] = client.models.list()
    assert (model.id, model.owned_by, model.created) == ("org/model", "stoker", 5)
    assert client.models.retrieve("org/model").id == "org/model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_many_calls_at_once_each_have_their_own_answer(client):
    answers: dict[int, str | None] = {}

    def one(number):
        if number % 2:
            chunks = ask(client, f"say {number}", stream=True)
            answers[number] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            answers[number] = ask(client, f"say {number}").choices[0].message.content

    threads = [threading.Thread(target=one, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: str(number) for number in range(64)}
