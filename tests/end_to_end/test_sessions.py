"""Calls of one session: each carries its whole conversation, and only what is new is prefilled."""

import pytest
from tests.support.worker_process import running_worker

from stoker import Producer

pytestmark = pytest.mark.server

SYSTEM = {"role": "system", "content": "You are a coding agent. " * 30}


def asked(*texts):
    roles = ("user", "assistant")
    return [SYSTEM, *({"role": roles[n % 2], "content": text} for n, text in enumerate(texts))]


def test_the_second_call_after_a_kill_prefills_only_what_is_new(redis_url, tmp_path):
    producer, store = Producer(redis_url), tmp_path / "store"

    def call(*texts, session="s"):
        return producer.submit(session=session, messages=asked(*texts), max_tokens=40)

    with running_worker(redis_url, store, log_name="1.log") as worker:
        first = call("Read the file.").result(timeout_s=30)
        side = producer.submit(session="s", prompt="A title for: read the file", max_tokens=10).result(timeout_s=30)
        worker.kill()
    assert (first.usage.cached_tokens, side.usage.cached_tokens) == (0, 0)
    assert (first.agent_id, first.cache.agent_version, first.cache.saved) == (None, None, False)
    with running_worker(redis_url, store, "--max-batch", "4", log_name="2.log"):
        # Two calls of one session at the same time, each of which goes on with the first.
        texts = ("Read the file.", first.content)
        tickets = [call(*texts, "Now run the tests."), call(*texts, "Now commit.")]
        seconds = [ticket.result(timeout_s=30) for ticket in tickets]
        thirds = [
            call(*texts, asked_before, second.content, "And then?").result(timeout_s=30)
            for asked_before, second in zip(("Now run the tests.", "Now commit."), seconds, strict=True)
        ]
        changed = producer.submit(
            session="s", messages=[{"role": "system", "content": "Today is Monday."}, *asked(*texts)], max_tokens=4
        ).result(timeout_s=30)
        assert producer.agents.info("s", timeout_s=30).exists is False
    whole = first.usage.prompt_tokens + first.usage.completion_tokens
    assert [(second.usage.cached_tokens, second.cache.miss_reason) for second in seconds] == [(whole, None)] * 2
    for second, third in zip(seconds, thirds, strict=True):
        assert third.usage.cached_tokens == second.usage.prompt_tokens + second.usage.completion_tokens
    assert changed.cache.miss_reason == "prompt_changed"
    assert changed.usage.cached_tokens < 20
