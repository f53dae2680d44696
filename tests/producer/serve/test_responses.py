"""OpenAI's Responses through its own package: items, events, stored responses, and work in the background."""

import asyncio
import errno
import json
import os
import threading
import time
import typing
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response
from openai.types.responses import response_create_params as params
from pydantic import BaseModel
from redis import Redis
from starlette.datastructures import Headers
from tests.producer.played_worker import result_fields
from tests.producer.serve.conftest import serving_at
from tests.support.wait import wait_for

from stoker.api.failure import Failure, FieldRefused, of_worker
from stoker.api.fields import BodyOptions
from stoker.api.responses import RULES, URL, failed_response, messages_of
from stoker.operations import run
from stoker.serve import generation, stored_responses
from stoker.serve.intake import CallHead, call_jobs
from stoker.serve.settings import ANYBODY, ServeSettings, Tokens
from stoker.serve.store import FileStore, ResponseStore, StoredResponse
from stoker.submitting import enqueue
from stoker_shared.answer_parts import Edge, Markers
from stoker_shared.errors import RequestError
from stoker_shared.result import Timing

TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
THINKING = Markers(first="reasoning", edges=(Edge("reasoning", "|", "normal"),))


@pytest.fixture
def soon(monkeypatch):
    """A stream is open for its client once it has sent anything."""
    monkeypatch.setattr(generation, "KEEP_ALIVE_S", 0.1)


def give(**fields):
    return f"give {json.dumps(fields)}"


def last_request(hand):
    return hand.request(hand.all_jobs()[-1])


# --- items ---


def test_a_text_is_answered_with_one_message_which_the_limit_may_cut_off(client, hand):
    answer = client.responses.create(model="m", input="say four words", instructions="Be short.")
    assert (answer.output_text, answer.status, answer.object) == ("four words", "completed", "response")
    assert answer.usage.input_tokens_details.cached_tokens == 4
    assert answer.instructions == "Be short."
    asked = last_request(hand)["messages"]
    assert [(message["role"], message["content"]) for message in asked] == [
        ("system", "Be short."),
        ("user", "say four words"),
    ]
    cut_off = client.responses.create(model="m", input=give(text="x", finish_reason="length"), max_output_tokens=20)
    assert (cut_off.status, cut_off.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert last_request(hand)["max_tokens"] == 20


def test_the_items_of_a_conversation_become_its_messages():
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "3", "output": "three"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"role": "user", "content": "u"},
    ]
    calls = [{"id": n, "type": "function", "function": {"name": name, "arguments": "{}"}} for n, name in ("1f", "2g")]
    again = {"id": "3", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert messages_of(items) == [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "reasoning_content": "t", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "assistant", "content": None, "tool_calls": [again]},
        {"role": "tool", "tool_call_id": "3", "content": "three"},
        {"role": "assistant", "content": "", "reasoning_content": "t"},
        {"role": "user", "content": "u"},
    ]


@pytest.mark.parametrize(
    ("item", "where"),
    [
        ({"type": "web_search_call", "id": "w"}, "input\\[0\\]"),
        ({"type": "new_kind"}, "input\\[0\\]"),
        ({"type": "item_reference", "id": "msg_x"}, "input\\[0\\].*stored"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input\\[0\\].content\\[0\\]"),
        ({"role": "user", "content": 3}, "input\\[0\\].content"),
        (3, "input\\[0\\]"),
    ],
)
def test_an_item_that_is_not_text_or_a_call_is_refused_by_its_place(item, where):
    with pytest.raises(FieldRefused, match=where):
        messages_of([item])


def test_tools_that_a_server_runs_are_left_out(client, hand):
    tools: Any = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}, TOOL, {"type": "custom"}]
    answer = client.responses.create(model="m", input="say x", tools=tools)
    assert [tool["function"]["name"] for tool in last_request(hand)["tools"]] == ["f"]
    assert [tool.type for tool in answer.tools] == ["function"]
    client.responses.create(model="m", input="say x", tools=tools[:1])
    assert "tools" not in last_request(hand)
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.responses.create(model="m", input="say x", tools=tools, tool_choice={"type": "web_search"})


def test_only_the_allowed_tools_are_offered_whatever_their_names_are(client, hand):
    tools: Any = [TOOL, {**TOOL, "name": "g"}]
    allowed: Any = [{"type": "function", "name": "g"}, {"type": "function", "name": ["f"]}, {"name": {}}]
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    client.responses.create(model="m", input="say x", tools=tools, tool_choice=choice)
    assert [tool["function"]["name"] for tool in last_request(hand)["tools"]] == ["g"]
    client.responses.create(model="m", input="say x", tools=[{**TOOL, "name": ["g"]}], tool_choice=choice)
    assert "tools" not in last_request(hand)


class River(BaseModel):
    name: str


def test_a_form_of_the_text_is_a_response_format(client, hand):
    said = give(text='{"name": "Elbe"}')
    assert client.responses.parse(model="m", input=said, text_format=River).output_parsed == River(name="Elbe")
    asked = last_request(hand)["response_format"]
    assert (asked["type"], asked["json_schema"]["name"]) == ("json_schema", "River")


def test_every_field_of_openais_type_is_known():
    theirs = set(typing.get_type_hints(params.ResponseCreateParamsNonStreaming))
    assert theirs - set(RULES) == {"background", "previous_response_id", "store", "stream", "stream_options"}


# --- events ---


def events(client, text, **fields):
    return list(client.responses.create(model="m", input=text, stream=True, **fields))


def test_the_events_of_an_answer_come_in_openais_order_and_the_last_one_has_all(client):
    said = give(text="x", reasoning="hm", answer="I look.", tool_calls=[CALL], finish_reason="tool_calls")
    found = events(client, said, tools=[TOOL])
    assert [event.type.removeprefix("response.") for event in found] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event.sequence_number for event in found] == list(range(len(found)))
    whole = found[-1].response
    done = [event.item for event in found if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in whole.output]
    assert whole.usage.output_tokens == 2
    Response.model_validate(whole.model_dump(), strict=True)
    for answer in (whole, client.responses.create(model="m", input=said, tools=[TOOL])):
        reasoning, message, call = answer.output
        assert (reasoning.content[0].text, message.content[0].text) == ("hm", "I look.")
        assert (call.call_id, call.name, call.arguments) == ("c1", "f", '{"a": 1}')


@pytest.mark.parametrize(("said", "kinds"), [("say ", []), (give(text="x", reasoning="hm", answer=""), ["reasoning"])])
def test_an_answer_without_text_has_an_empty_message(client, said, kinds):
    found = events(client, said)
    done = [event.item for event in found if event.type == "response.output_item.done"]
    assert [item.type for item in done] == [*kinds, "message"]
    assert found[-1].response.output == done
    assert [item.type for item in client.responses.create(model="m", input=said).output] == [*kinds, "message"]


def test_thinking_between_two_texts_is_an_item_of_its_own_and_the_last_event_has_the_same_items(client, hand):
    with client.responses.stream(model="m", input="wait") as stream:
        job = hand.wait_for_one()
        again = Markers(edges=(Edge("normal", "<", "reasoning"), Edge("reasoning", ">", "normal")))
        hand.say(job, "1", "whole", "A", again)
        found = []
        for event in stream:
            found.append(event)
            if event.type == "response.output_text.delta" and event.delta == "A":
                hand.say(job, "1", "more", "<hm>B")
            if event.type == "response.output_text.delta" and event.delta == "B":
                hand.finish(job, {**result_fields(job), "text": "A<hm>B", "answer": "AB", "reasoning": "hm"})
    done = [event.item for event in found if event.type == "response.output_item.done"]
    assert [item.type for item in done] == ["message", "reasoning", "message"]
    assert len({item.id for item in done}) == 3
    assert found[-1].response.output_text == "AB"
    assert [item.id for item in found[-1].response.output] == [item.id for item in done]


def test_the_scores_of_a_text_before_a_call_are_in_a_stream_too(client):
    scores = {"content": [{"token": "I look.", "logprob": -0.5}]}
    said = give(text="x", answer="I look.", logprobs=scores, tool_calls=[CALL], finish_reason="tool_calls")
    asked: dict[str, Any] = {"tools": [TOOL], "include": ["message.output_text.logprobs"]}
    for answer in (client.responses.create(model="m", input=said, **asked), events(client, said, **asked)[-1].response):
        message, _ = answer.output
        assert [entry.logprob for entry in message.content[0].logprobs] == [-0.5]


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("ContextLimitExceeded: x", "context_length_exceeded"),
        ("TemplateError: x", "invalid_prompt"),
        ("EngineFailed: x", "server_error"),
    ],
)
def test_a_response_that_failed_tells_clients_whether_its_prompt_was_too_long(reason, code):
    assert failed_response({}, of_worker(reason, None))["error"]["code"] == code


# --- stored ---


def test_a_stream_that_waits_has_events_because_codex_does_not_count_comments(client, hand, soon):
    with client.responses.create(model="m", input="wait", stream=True) as stream:
        found = []
        for event in stream:
            found.append(event)
            if len(found) == 3:
                hand.finish(hand.wait_for_one(), text="done")
    assert {event.type for event in found[1:3]} == {"response.in_progress"}
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert found[-1].response.output_text == "done"


def test_a_stream_whose_prompt_is_too_long_ends_with_an_event_by_which_codex_knows_it(client):
    found = events(client, "fail ContextLimitExceeded: x")
    assert [event.type for event in found] == ["response.created", "response.in_progress", "response.failed"]
    assert found[-1].response.error.code == "context_length_exceeded"


def test_references_to_items_of_stored_responses_are_the_items(serve, client, hand):
    """As Vercel's AI SDK sends them."""
    said = give(text="x", reasoning="hm", answer="I look.", tool_calls=[CALL], finish_reason="tool_calls")
    first = client.responses.create(model="m", input=said, tools=[TOOL])
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    again = {"type": "item_reference", "id": f"{first.output[1].id}_2"}  # of a stream with two texts
    output = {"type": "function_call_output", "call_id": "c1", "output": "say done"}
    second = client.responses.create(model="m", input=[*references, again, output])
    assert second.output_text == "done"
    thinking = {"role": "assistant", "reasoning_content": "hm", "content": "I look."}
    own, told = last_request(hand)["messages"]
    assert {**own, **thinking} == own
    assert own["tool_calls"][0]["id"] == "c1"
    assert told["role"] == "tool"
    client.responses.create(model="m", input="say more", previous_response_id=second.id)
    assert len(last_request(hand)["messages"]) == 4
    with pytest.raises(openai.NotFoundError, match="msg_x"):
        client.responses.create(model="m", input=[{"type": "item_reference", "id": "msg_x"}])


def test_a_response_is_continued_by_its_id_with_all_that_was_said(client, hand):
    first = client.responses.create(model="m", input="say one", instructions="I.")
    second = client.responses.create(model="m", input="say two", previous_response_id=first.id)
    third = client.responses.create(
        model="m", input="say three", previous_response_id=second.id, instructions="J.", store=False
    )
    assert (second.previous_response_id, third.output_text) == (first.id, "three")
    asked = [(message["role"], message["content"]) for message in last_request(hand)["messages"]]
    assert asked == [
        *[("system", "J."), ("user", "say one"), ("assistant", "one")],
        *[("user", "say two"), ("assistant", "two"), ("user", "say three")],
    ]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(third.id)


def test_a_streamed_response_is_stored_too_with_its_calls(client, hand):
    said = give(text="x", answer="", tool_calls=[CALL], finish_reason="tool_calls")
    first = events(client, said, tools=[TOOL])[-1].response
    output: Any = [{"type": "function_call_output", "call_id": "c1", "output": "say done"}]
    assert client.responses.create(model="m", input=output, previous_response_id=first.id).output_text == "done"
    assert [message["role"] for message in last_request(hand)["messages"]] == ["user", "assistant", "tool"]
    assert client.responses.retrieve(first.id).output == first.output


def test_a_stored_response_is_read_listed_and_deleted_by_its_owner_alone(serve, tmp_path, monkeypatch):
    tokens = Tokens([("ann", "a" * 16), ("bob", "b" * 16)])
    serving = serve(batch_store=tmp_path, tokens=tokens)
    ann, bob = serving.client("a" * 16), serving.client("b" * 16)
    monkeypatch.setattr(generation, "time", SimpleNamespace(time=count(1000, 10).__next__))  # while the job runs, too
    made = ann.responses.create(model="m", input="say x")
    assert made.output_text == "x"
    assert ann.responses.retrieve(made.id) == made
    assert [item.content[0].text for item in ann.responses.input_items.list(made.id)] == ["say x"]
    for refused in (
        lambda: bob.responses.retrieve(made.id),
        lambda: bob.responses.create(model="m", input="say y", previous_response_id=made.id),
        lambda: bob.responses.delete(made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            refused()
    ann.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        ann.responses.retrieve(made.id)


def test_of_two_calls_that_store_one_response_at_the_same_moment_one_makes_it(tmp_path):
    store = ResponseStore(tmp_path, keep_s=3600)
    with ThreadPoolExecutor(2) as threads:
        for number in range(50):
            made = StoredResponse(f"resp_{number}", "o", 0, "same", None, "s", False, [], {})
            assert sorted(threads.map(store.add, [made, made])) == [False, True]


def test_old_responses_and_the_oldest_of_too_many_go(tmp_path):
    store = ResponseStore(tmp_path, keep_s=3600, most=2)
    made = add_some(store, 4)
    store.sweep()
    assert sorted(store.ids()) == made[2:]
    ResponseStore(tmp_path, keep_s=-1).sweep()
    assert store.ids() == []


def test_what_a_crash_left_of_a_response_goes_and_what_goes_during_a_sweep_is_no_error(tmp_path, monkeypatch):
    store = ResponseStore(tmp_path, keep_s=3600)
    add_some(store, 2)
    (left := store.folder / ".resp_3.0.draft").mkdir()
    os.utime(left, (0, 0))
    listed = Path.iterdir

    def removed_meanwhile(folder):
        paths = list(listed(folder))
        store.remove("resp_0")
        return iter(paths)

    monkeypatch.setattr(Path, "iterdir", removed_meanwhile)
    store.sweep()
    monkeypatch.undo()
    assert [path.name for path in store.folder.iterdir()] == ["resp_1"]


def test_the_next_start_removes_what_a_killed_process_left(tmp_path):
    old, new = (tmp_path / "files" / name for name in (".0.gone", ".file-1.0.draft"))
    for path in (old, new):
        path.mkdir(parents=True)
    os.utime(old, (0, 0))
    (store := FileStore(tmp_path)).remove_remains()
    assert list(store.folder.iterdir()) == [new]


def add_some(store, n):
    ids = [f"resp_{number}" for number in range(n)]
    for number, made in enumerate(ids):
        store.add(StoredResponse(made, "o", 0, str(number), None, "s", False, [], {}))
        os.utime(store.folder / made, (time.time() - n + number,) * 2)
    return ids


# --- in the background ---


def until(client, response_id, status, within_s=20.0):
    end = time.monotonic() + within_s
    while (found := client.responses.retrieve(response_id)).status != status:
        assert time.monotonic() < end, found.status
        time.sleep(0.02)
    return found


def test_a_response_in_the_background_can_be_streamed_and_its_job_outlives_the_stream(client, hand, soon):
    seen = events(client, "say x", background=True)
    assert [event.response.background for event in (seen[0], seen[-1])] == [True, True]
    assert until(client, seen[-1].response.id, "completed") == seen[-1].response
    with client.responses.create(model="m", input="wait", background=True, stream=True) as stream:
        job_id = hand.wait_for_one()
        hand.say(job_id, "1", "whole", "do")
        begun = next(iter(stream)).response
    assert client.responses.retrieve(begun.id).status in ("queued", "in_progress")
    hand.finish(job_id, text="done")
    assert until(client, begun.id, "completed").output_text == "done"


def test_a_stream_in_the_background_lasts_as_long_as_its_job_whatever_the_limit_of_a_call_is(serve, hand, soon):
    client = serve(timeout_s=1).client()
    with client.responses.create(model="m", input="wait", background=True, stream=True) as stream:
        job_id = hand.wait_for_one()
        found = []
        for event in stream:
            found.append(event)
            if len(found) == 20:  # one each tenth of a second
                hand.finish(job_id, text="done")
    assert (found[-1].type, found[-1].response.output_text) == ("response.completed", "done")


def test_a_response_that_was_begun_before_its_end_was_completed_when_its_job_ended(client):
    timing = Timing(queued_s=9, prefill_s=1, first_token_s=10, decode_s=20, total_s=30).model_dump()
    said = give(text="x", timing=timing)
    streamed = events(client, said)[-1].response
    begun = client.responses.create(model="m", input=said, background=True)
    for response in (streamed, client.responses.retrieve(streamed.id), until(client, begun.id, "completed")):
        assert response.completed_at - response.created_at == 30


def test_a_streamed_response_in_the_background_can_be_continued_as_soon_as_it_ends(client, monkeypatch):
    async def never(self: Any, response: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(stored_responses.Background, "_wait", never)
    first = events(client, "say x", background=True)[-1].response
    assert client.responses.create(model="m", input="say y", previous_response_id=first.id).output_text == "y"


def test_a_response_in_the_background_outlives_the_server(serve, hand, tmp_path, server_url):
    with serving_at(server_url, batch_store=tmp_path) as first:
        begun = first.client().responses.create(model="m", input="wait", background=True)
    hand.finish(hand.wait_for_one(), text="done")
    assert until(serve(batch_store=tmp_path).client(), begun.id, "completed").output_text == "done"


def test_a_response_in_the_background_can_be_canceled_and_can_fail(client, hand):
    begun = client.responses.create(model="m", input="wait", background=True)
    assert client.responses.cancel(begun.id).status == "cancelled"
    failing = client.responses.create(model="m", input="fail EngineFailed: x", background=True)
    assert until(client, failing.id, "failed").error.code == "server_error"
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert client.responses.cancel(failing.id).status == "failed"
    waited_for = client.responses.create(model="m", input="say x")
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(waited_for.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.create(model="m", input="say x", background=True, store=False)


def test_a_response_of_another_process_whose_job_is_not_yet_in_the_queue_has_not_failed(
    serve, tmp_path, server_url, monkeypatch
):
    monkeypatch.setattr(stored_responses, "_AGAIN_S", 0.05)
    head, waiting = CallHead(URL, {}, None), {"model": "m", "input": "say x", "background": True}
    own = ServeSettings(batch_store=tmp_path, body_options=BodyOptions(any_model=True))
    made = call_jobs(json.dumps(waiting).encode(), head, own)
    found = f"resp_{made.jobs[0].job_id}"
    served = serve(batch_store=tmp_path)
    with pytest.raises(AssertionError, match="failed"):
        until(served.client(), found, "completed", within_s=0.5)
    assert ResponseStore(tmp_path).answer(found) is None
    with Redis.from_url(server_url) as connection:
        run(connection, enqueue(list(made.jobs), ids_are_new=True))
    assert until(served.client(), found, "completed").output_text == "x"


# --- malformed ---

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*RULES, "store", "background", "previous_response_id", "stream"])
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output", "x"]) | JSON,
        "role": st.sampled_from(["user", "assistant", "x"]) | JSON,
        **dict.fromkeys(("content", "output", "summary", "arguments", "call_id", "name"), JSON),
    },
)


@given(st.dictionaries(NAMES, JSON, max_size=5), st.lists(ITEM, max_size=3) | JSON)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_body_whatever_breaks_the_reader(tmp_path_factory, body, items):
    served = ServeSettings(tmp_path_factory.getbasetemp(), body_options=BodyOptions(any_model=True))
    raw = json.dumps({"input": items, **body}).encode()
    with suppress(Failure, RequestError):
        call_jobs(raw, CallHead.of(URL, Headers({}), ANYBODY), served)


# --- what is left of a call ---


def test_a_call_that_is_refused_or_fails_leaves_nothing(serve, nobody, tmp_path):
    client = serve(batch_store=tmp_path, worker_wait_s=0.0).client()
    for fields in ({}, {"background": True}, {"extra_headers": {"Idempotency-Key": "refused"}}):
        with pytest.raises(openai.InternalServerError, match="no worker"):
            client.responses.create(model="m", input="say x", **fields)
    with pytest.raises(openai.InternalServerError, match="EngineFailed: x"):
        serve(batch_store=tmp_path, queue_without_worker=True).client().responses.create(
            model="m", input="fail EngineFailed: x"
        )
    assert list((tmp_path / "responses").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "status", "code", "helps"), [(errno.ENOSPC, 503, "no_space", "true"), (errno.EACCES, 500, None, "false")]
)
def test_a_response_that_cannot_be_stored_is_told_to_come_later_only_if_the_disk_is_full(
    client, monkeypatch, number, status, code, helps
):
    def refuses(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(ResponseStore, "add", refuses)
    with pytest.raises(openai.InternalServerError) as refused:
        client.responses.create(model="m", input="say x")
    assert (refused.value.status_code, refused.value.code) == (status, code)
    assert refused.value.response.headers["x-should-retry"] == helps


def test_a_keyed_calls_response_stays_whether_it_failed_or_its_key_is_used_again(client):
    ask = client.responses.create
    made = ask(model="m", input="say x", extra_headers={"Idempotency-Key": "of-one-call"})
    with pytest.raises(openai.ConflictError):
        ask(model="m", input="say y", extra_headers={"Idempotency-Key": "of-one-call"})
    assert client.responses.retrieve(made.id).output_text == "x"
    with pytest.raises(openai.InternalServerError):
        ask(model="m", input="fail EngineFailed: x", extra_headers={"Idempotency-Key": "fails"})
    found = client.responses.retrieve("resp_fails")
    assert (found.status, found.error.code) == ("failed", "server_error")


def test_the_answer_of_a_keyed_call_whose_client_is_gone_can_be_read_and_continued(serve, hand, server_url):
    serving = serve(tokens=Tokens([("gone", "g" * 16)]))
    with serving.client("g" * 16, timeout=0.5) as impatient, pytest.raises(openai.APITimeoutError):
        impatient.responses.create(model="m", input="wait", extra_headers={"Idempotency-Key": "of-the-gone"})
    hand.wait_for_one()
    with Redis.from_url(server_url) as connection:  # until the server knows that the client is gone
        wait_for(lambda: not connection.exists("stoker:serve:waiting:gone"), 20)
    hand.finish("of-the-gone", text="late")
    client = serving.client("g" * 16)
    read = client.responses.retrieve("resp_of-the-gone")
    assert read.output_text == "late"
    assert client.responses.create(model="m", input="say on", previous_response_id=read.id).output_text == "on"


def test_a_key_leads_no_other_call_to_a_stored_response_even_once_redis_has_forgotten_its_job(tmp_path):
    served = ServeSettings(tmp_path, body_options=BodyOptions(any_model=True))

    def is_new(owner, text, **more):
        body = json.dumps({"input": text, **more}).encode()
        return call_jobs(body, CallHead(URL, {}, "k", owner), served).has_new_response

    assert [is_new("ann", "x"), is_new("ann", "x")] == [True, False]
    for owner, text, is_stored in (("bob", "x", True), ("ann", "y", True), ("bob", "x", False)):
        with pytest.raises(Failure) as refused:
            is_new(owner, text, store=is_stored)
        assert (refused.value.status, refused.value.error["code"]) == (409, "duplicate_job")


def test_a_call_in_the_background_is_answered_at_once_and_again_by_its_key_with_its_state(client, hand):
    key = {"Idempotency-Key": "in-background"}
    ask = lambda: client.responses.create(model="m", input="wait", background=True, extra_headers=key)  # noqa: E731
    assert [(begun.status, begun.background) for begun in (ask(), ask())] == [("queued", True)] * 2
    assert client.responses.retrieve("resp_in-background").status == "queued"
    hand.finish(hand.wait_for_one(), text="done")
    assert until(client, "resp_in-background", "completed").output_text == "done"
    assert ask().output_text == "done"


def test_a_response_that_is_deleted_while_it_is_made_is_answered_all_the_same(client, hand):
    answers: list[str] = []
    waiting = threading.Thread(
        target=lambda: answers.append(client.responses.create(model="m", input="wait").output_text)
    )
    waiting.start()
    job_id = hand.wait_for_one()
    client.responses.delete(f"resp_{job_id}")
    hand.finish(job_id, text="done")
    waiting.join()
    assert answers == ["done"]


def test_the_responses_of_a_conversation_are_one_session_so_that_the_next_one_finds_their_cache(client, hand):
    def session(**fields):
        made = client.responses.create(model="m", input="say x", **fields)
        return made.id, hand.request(made.id.removeprefix("resp_")).get("session")

    first, of_first = session()
    second, of_second = session(previous_response_id=first)
    assert of_first == of_second == session(previous_response_id=second)[1] is not None
    assert session()[1] != of_first
    names: list[dict[str, Any]] = [{"prompt_cache_key": "k"}, {"extra_headers": {"X-Stoker-Session": "k"}}]
    for name in names:
        named, of_named = session(**name)
        assert of_named == session(previous_response_id=named)[1] == "k"
    assert session(store=False)[1] is None
