"""A session as Claude Code sends it, through `stoker serve` to a worker; tests/clients runs the program itself."""

import anthropic
import pytest
from tests.producer.serve.conftest import serving_at
from tests.support.worker_process import running_worker

pytestmark = pytest.mark.server

CALL = '<tool_call>{"name": "Bash", "arguments": {"command": "ls"}}</tool_call>'
CACHED = {"cache_control": {"type": "ephemeral"}}


def text(value, **fields):
    return {"type": "text", "text": value, **fields}


def body(number, *later):
    """Of the session's call of this number. Its billing header differs each time."""
    said = [text("<system-reminder>\nToday's date is 2026-11-24.\n</system-reminder>"), text(f"say {CALL}")]
    return {
        "model": "any",
        "max_tokens": 32_000,
        "system": [text(f"x-anthropic-billing-header: cc={number}"), text("You are an agent. " * 100, **CACHED)],
        "messages": [{"role": "user", "content": said}, {"role": "system", "content": "Agents: Explore."}, *later],
        "tools": [{"name": "Bash", "description": "d", "input_schema": {"type": "object"}}],
        "metadata": {"user_id": '{"device_id": "d", "session_id": "s"}'},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "extra_body": {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    }


def test_the_second_call_of_a_session_prefills_only_what_is_new_also_after_a_kill(redis_url, store, tmp_path):
    def call(number, *later):
        with claude.messages.stream(**body(number, *later)) as stream:
            return stream.get_final_message()

    with serving_at(redis_url) as serving, anthropic.Anthropic(base_url=serving.url, api_key="none") as claude:
        with running_worker(redis_url, store, log_name="1.log") as worker:
            first = call(1)
            worker.kill()
        [use] = first.content
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "say all done", **CACHED}
        later = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        with running_worker(redis_url, store, log_name="2.log"):
            second = call(2, *later)
            later += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "say bye"}]
            third = call(3, *later)
            counted = claude.messages.count_tokens(model="any", messages=[{"role": "user", "content": "x"}])
    assert (first.stop_reason, use.name, use.input) == ("tool_use", "Bash", {"command": "ls"})
    assert (second.stop_reason, second.content[0].text) == ("end_turn", "all done")
    assert first.usage.cache_read_input_tokens == 0
    assert second.usage.cache_read_input_tokens == first.usage.input_tokens  # the template writes calls in its own way
    usage = second.usage
    whole = usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens
    assert (third.content[0].text, third.usage.cache_read_input_tokens) == ("bye", whole)
    assert counted.input_tokens == len("|user\nx|\n|assistant\n")  # the scripted template, a token for each byte
