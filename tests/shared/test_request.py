"""Valid and invalid requests, and the messages of refusals."""

import tracemalloc

import pytest

from stoker_shared import build_request
from stoker_shared.errors import InvalidRequest, RequestError, RequestVersionTooNew

SECRET = "the launch code is 0000"
MESSAGES = [{"role": "user", "content": SECRET}]
WITH_PROMPT = {"agent_id": "a", "prompt": SECRET}
WITH_MESSAGES = {"agent_id": "a", "messages": MESSAGES}


def nested(depth: int) -> dict[str, object]:
    return {} if depth == 0 else {"a": nested(depth - 1)}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({**WITH_PROMPT, "max_tokenz": 5}, "max_tokenz"),
        ({**WITH_PROMPT, "max_tokens": "5"}, "max_tokens"),
        ({**WITH_PROMPT, "max_tokens": 0}, "add no turn to an agent"),
        ({**WITH_PROMPT, "max_tokens": None}, "max_tokens"),
        ({"agent_id": "a", "prompt": ""}, "prompt"),
        ({"agent_id": "a", "prompt": SECRET + "\ud800"}, "prompt"),
        ({"agent_id": "a", "prompt": SECRET.encode()}, "prompt"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({**WITH_PROMPT, "prompt_token_ids": [1]}, "and 'messages' must be given"),
        ({"agent_id": "a"}, "and 'messages' must be given"),
        ({**WITH_PROMPT, "messages": MESSAGES}, "and 'messages' must be given"),
        ({"prompt": SECRET, "context": "append"}, "agent_id"),
        ({**WITH_PROMPT, "must_exist": True}, "must_exist"),
        ({**WITH_PROMPT, "expect_version": 1}, "expect_version"),
        ({**WITH_PROMPT, "context": "append", "expect_version": -1}, "expect_version"),
        ({**WITH_PROMPT, "agent_id": ""}, "agent_id"),
        ({**WITH_PROMPT, "agent_id": "x" * 201}, "agent_id"),
        ({**WITH_PROMPT, "agent_id": "a\nb"}, "agent_id"),
        ({**WITH_PROMPT, "agent_id": "a\u202eb"}, "agent_id"),
        ({**WITH_PROMPT, "agent_id": "a\ud800"}, "agent_id"),
        ({**WITH_PROMPT, "agent_id": 7}, "agent_id"),
        ({"prompt": SECRET, "session": ""}, "session"),
        ({"prompt": SECRET, "session": "x" * 201}, "session"),
        ({"prompt": SECRET, "session": "a\nb"}, "session"),
        ({**WITH_PROMPT, "session": "s"}, "'session' or 'agent_id'"),
        ({"agent_id": "a", "messages": []}, "messages"),
        ({"agent_id": "a", "messages": SECRET}, "messages"),
        ({"agent_id": "a", "messages": [{"content": SECRET}]}, "messages.0.role"),
        ({"agent_id": "a", "messages": [{"role": "user"}]}, "messages.0: 'content'"),
        ({"agent_id": "a", "messages": [{"role": "user", "content": None}]}, "messages.0: 'content'"),
        ({"agent_id": "a", "messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
        ({"agent_id": "a", "messages": [{"role": "user", "content": SECRET + "\ud800"}]}, "'messages'"),
        ({**WITH_PROMPT, "temperature": float("nan")}, "temperature"),
        ({**WITH_PROMPT, "temperature": -0.1}, "temperature"),
        ({**WITH_PROMPT, "top_p": 0.0}, "top_p"),
        ({**WITH_PROMPT, "top_k": 0}, "top_k"),
        ({**WITH_PROMPT, "min_p": 1.1}, "min_p"),
        ({**WITH_PROMPT, "seed": -1}, "seed"),
        ({**WITH_PROMPT, "seed": 2**63}, "seed"),
        ({**WITH_PROMPT, "stop": ""}, "stop"),
        ({**WITH_PROMPT, "stop": [""]}, "stop.0"),
        ({**WITH_PROMPT, "stop": ["x"] * 17}, "stop"),
        ({**WITH_PROMPT, "context": "append", "cache": "off"}, "append"),
        ({**WITH_PROMPT, "context": "everything"}, "context"),
        ({**WITH_PROMPT, "top_logprobs": 3}, "top_logprobs"),
        ({**WITH_PROMPT, "tools": [{}]}, "tools"),
        ({**WITH_MESSAGES, "tools": [{"a": float("nan")}]}, "tools"),
        ({**WITH_MESSAGES, "tools": [{"a": {SECRET}}]}, "tools"),
        ({**WITH_MESSAGES, "chat_template_kwargs": {"a": "\ud800"}}, "chat_template_kwargs"),
        ({**WITH_PROMPT, "metadata": {"a": 1}}, "metadata.a"),
        ({**WITH_PROMPT, "metadata": {"a": "\ud800"}}, "metadata"),
        ({**WITH_PROMPT, "metadata": {"a": "x" * 513}}, "metadata"),
        ({**WITH_PROMPT, "v": 0}, "v"),
    ],
)
def test_a_bad_request_is_refused_by_the_fields_name_and_without_the_prompt(fields, named):
    with pytest.raises(InvalidRequest) as caught:
        build_request(fields)
    assert named in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_refusal_is_one_short_printable_line():
    with pytest.raises(InvalidRequest, match="and 992 more") as caught:
        build_request({**WITH_PROMPT, "bad\nname": 1, **{f"field{i}": 0 for i in range(999)}})
    assert str(caught.value).isprintable()


def test_every_version_so_far_has_the_same_fields_and_a_newer_one_is_refused_before_its_unknown_fields():
    for v in range(1, 6):
        assert build_request({"prompt": "x", "task": "t", "v": v}).as_payload() == {"v": 5, "prompt": "x", "task": "t"}
    with pytest.raises(RequestVersionTooNew, match=r"v 6.*v 5"):
        build_request({**WITH_PROMPT, "v": 6, "field_of_v6": True})


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER] * 10_001},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 10_001}]},
        {"messages": [{"role": "assistant", "tool_calls": [{}] * 1001}]},
        {"messages": [USER], "tools": [{}] * 1001},
        {"messages": [USER], "chat_template_kwargs": {f"a{i}": 0 for i in range(101)}},
        {"prompt": "x", "check": {"finish_reason": ["stop"] * 9}},
        {"prompt": "x", "model": "x" * 1001},
    ],
)
def test_a_request_holds_so_much_and_no_more(fields):
    with pytest.raises(InvalidRequest, match=r"at most|limit"):
        build_request(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {f"field{i}": 0 for i in range(150_000)},
        {"messages": [{**USER, **{f"field{i}": 0 for i in range(150_000)}}]},
        {"messages": [0] * 200_000},
        {"prompt": "x", "metadata": dict.fromkeys(map(str, range(150_000)), 0)},
    ],
)
def test_a_request_with_very_many_problems_is_refused_in_little_memory(fields):
    """pydantic's list of 150,000 problems, each as a dict, takes 130 MB and seconds."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest) as error:
            build_request(fields)
        assert tracemalloc.get_traced_memory()[1] < 40 * 2**20
    finally:
        tracemalloc.stop()
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("tool", "why"),
    [({"enum": [0] * 200_000}, "more than"), (nested(98), "more than"), (nested(300), "nested")],
    ids=["values", "levels", "too deep to write"],
)
def test_producers_refuse_a_tool_that_workers_would_not_read(tool, why):
    with pytest.raises(RequestError, match=why):
        build_request({**WITH_MESSAGES, "tools": [tool]}).as_payload()


def test_the_wire_has_fields_that_differ_from_their_defaults_and_sampling_that_was_set():
    """A worker may have defaults of its own for sampling, which must not replace what a caller asked for."""
    request = build_request({**WITH_PROMPT, "max_tokens": 256, "stop": "END", "n": 1, "temperature": 0, "top_p": None})
    assert request.as_payload() == {"v": 5, **WITH_PROMPT, "max_tokens": 256, "stop": ["END"], "temperature": 0.0}
    assert "presence_penalty" in build_request({**WITH_PROMPT, "presence_penalty": 0.0}).as_payload()


def test_a_payload_builds_the_same_request_again():
    fields = {
        **WITH_MESSAGES,
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"enable_thinking": False},
        "stop": ["a", "b"],
        "seed": 7,
        "metadata": {"trace": "1"},
    }
    request = build_request(fields)
    assert build_request(request.as_payload()) == request


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"task": "two words"}, "task: must be 1 to 64 ASCII characters without spaces"),
        ({"check": "schema.json"}, "check: must be an object"),
        ({"route": ["small", {"model": "large", "queue": "q"}]}, "route.0: must be an object"),
    ],
)
def test_a_problem_is_told_without_words_of_the_code(fields, problem):
    with pytest.raises(InvalidRequest, match=f"^{problem}$"):
        build_request({"prompt": "p", **fields})
