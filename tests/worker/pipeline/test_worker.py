"""The life of the process: all stages together, and its message if it ends before it is ready."""

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.support.in_memory.queue import InMemoryQueue
from tests.support.wait import wait_for
from tests.worker.pipeline.stages import TIMEOUT_S, PlayedStore

from stoker_shared import build_request
from stoker_shared.errors import EngineFailed, QueueHeld, RedisUnavailable
from stoker_shared.result import GenerationResult
from stoker_worker.engine.scripted import ScriptedProvider
from stoker_worker.pipeline.worker import Worker
from stoker_worker.ports import Busy, ClaimedJob
from stoker_worker.settings import read_settings


def fast() -> ScriptedProvider:
    return ScriptedProvider(max_batch=4, steps_per_s=1000)


class SlowProvider:
    """A model that loads for as long as the test lasts."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def load(self) -> Any:
        self.release.wait(30)
        raise RuntimeError("not loaded")

    def leave_thread(self) -> None:
        pass


def test_a_worker_deposed_while_its_model_loads_reports_that() -> None:
    provider, queue = SlowProvider(), InMemoryQueue()
    queue.take_over()
    settings = read_settings({"heartbeat_s": 0.05, "lease_ttl_s": 1.0})
    worker = Worker(settings, queue, PlayedStore(), provider)
    try:
        with pytest.raises(QueueHeld, match="taken over"):
            worker.run()
    finally:
        provider.release.set()


def test_the_first_jobs_caches_are_read_ahead_while_the_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowlyLoaded(ScriptedProvider):
        def load(self) -> Any:
            assert is_seen.wait(TIMEOUT_S)
            return super().load()

    class Store(PlayedStore):
        def read_ahead(self, agents: Sequence[str]) -> None:
            super().read_ahead(agents)
            if len(self.read_ahead_for) == 1:
                queue.away = True
            if "later" in agents:
                is_seen.set()

    class Queue(InMemoryQueue):
        def next_agents(self, limit: int) -> tuple[str, ...]:
            if self.away:
                self.away = False
                self.enqueue(agent_id="later", max_tokens=1)
                raise RedisUnavailable("it is away for a moment")
            return super().next_agents(limit)

    is_seen, queue, store = threading.Event(), Queue(), Store()
    monkeypatch.setattr("stoker_worker.pipeline.fetcher._READ_AHEAD_S", 0.01)
    for agent_id in "ba":
        queue.enqueue(agent_id=agent_id, max_tokens=1)
    provider = SlowlyLoaded(max_batch=2, steps_per_s=1000)
    Worker(read_settings({"burst": True, "poll_s": 0.001}), queue, store, provider).run()
    calls = list(dict.fromkeys(store.read_ahead_for))
    assert calls[:3] == [("b", "a"), ("b", "a", "later"), "scripted"]
    assert {queue.state(job_id) for job_id in queue.entries} == {"finished"}


def test_of_the_agents_that_wait_the_last_one_loses_its_cache_first() -> None:
    queue, store = InMemoryQueue(), PlayedStore()
    Worker(read_settings({}), queue, store, fast())
    assert store.budget.place_of == queue.place_of


class HangingQueue(InMemoryQueue):
    """A queue whose server does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.release = threading.Event(), threading.Event()

    def recover(self) -> int:
        self.is_asked.set()
        self.release.wait()
        return 0


def test_a_stop_does_not_wait_for_a_redis_that_hangs_in_the_first_recovery() -> None:
    queue = HangingQueue()
    worker = Worker(read_settings({}), queue, PlayedStore(), fast())
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        assert queue.is_asked.wait(TIMEOUT_S)
        worker.request_stop()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    finally:
        queue.release.set()
        thread.join()
    wait_for(lambda: not worker.is_still_loading())  # the engine thread had nothing to wait for any more


class EndlessQueue(InMemoryQueue):
    """A queue with a new job for every free slot."""

    def __init__(self) -> None:
        super().__init__()
        self.claims = 0
        self.claimed_again = threading.Event()

    def claim(self, limit: int, busy: Busy) -> list[ClaimedJob]:
        if not limit:
            return []
        self.claims += 1
        if self.claims > 1:
            self.claimed_again.set()
        self.enqueue(agent_id=f"agent-{self.claims}", max_tokens=5, cache="off")
        return super().claim(limit, busy)


class BreakingProvider(ScriptedProvider):
    """An engine that breaks in its first step and is slow to close."""

    def __init__(self, closing: Callable[[], Any]) -> None:
        super().__init__(max_batch=1, steps_per_s=1000)
        object.__setattr__(self, "closing", closing)

    def load(self) -> Any:
        engine, loaded = super().load()

        def step() -> Any:
            raise RuntimeError("out of memory")

        engine.step, engine.close = step, self.closing  # type: ignore[method-assign, attr-defined]
        return engine, loaded


def test_a_worker_whose_engine_broke_claims_nothing_more() -> None:
    queue = EndlessQueue()
    provider = BreakingProvider(closing=lambda: queue.claimed_again.wait(0.3))
    settings = read_settings({"poll_s": 0.001})
    with pytest.raises(EngineFailed, match="out of memory"):
        Worker(settings, queue, PlayedStore(), provider).run()
    assert (queue.claims, len(queue.given_back)) == (1, 1)


@pytest.mark.parametrize("thread", ["fetcher.Fetcher.run", "loader.Loader.run", "finisher.Finisher._run"])
def test_a_worker_with_a_thread_that_died_ends_with_an_error(monkeypatch: pytest.MonkeyPatch, thread: str) -> None:
    """Otherwise jobs would wait for that thread for ever, and after a good end no service starts the worker again."""
    monkeypatch.setattr(f"stoker_worker.pipeline.{thread}", lambda self: None)
    queue = InMemoryQueue()
    queue.enqueue(job_id="a")
    with pytest.raises(EngineFailed, match="a thread of the worker has died"):
        Worker(read_settings({"poll_s": 0.001}), queue, PlayedStore(), fast()).run()
    assert queue.state("a") in ("queued", "started")


def test_a_burst_ends_every_job_and_saves_each_turn_once() -> None:
    queue, store = InMemoryQueue(), PlayedStore()
    for turn in range(3):
        for agent_id in "abc":
            queue.enqueue(
                job_id=f"{agent_id}{turn}", agent_id=agent_id, context="append", prompt="say so", max_tokens=9
            )
    queue.enqueue(job_id="broken", agent_id="d", prompt="fail because", retries=1)
    Worker(read_settings({"burst": True, "poll_s": 0.005}), queue, store, fast()).run()
    states = {job_id: entry.state for job_id, entry in queue.entries.items()}
    assert states.pop("broken") == "failed"
    assert set(states.values()) == {"finished"}
    assert [store.open_agent(agent_id).number for agent_id in "abcd"] == [3, 3, 3, 0]
    result = queue.entries["a2"].result
    assert result is not None
    assert (result["text"], result["cache"]["agent_version"], result["cache"]["saved"]) == ("so", 3, True)
    assert queue.in_flight() == ()
    assert queue.serving is not None
    assert (queue.serving.max_batch, queue.serving.max_batch_why) == (4, "given")


def test_an_agent_calls_a_tool_and_goes_on_with_its_result() -> None:
    queue, store = InMemoryQueue(), PlayedStore()
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    call = '<think>Hm.</think><tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>'

    def run(job_id: str, message: dict[str, str]) -> Any:
        fields = {"agent_id": "a", "context": "append", "tools": tools, "messages": [message], "max_tokens": 200}
        queue.enqueue(job_id=job_id, request=build_request(fields))
        Worker(read_settings({"burst": True, "poll_s": 0.001}), queue, store, fast()).run()
        return GenerationResult.model_validate(queue.entries[job_id].result)

    asked = run("1", {"role": "user", "content": f"say {call}"})
    assert (asked.finish_reason, asked.text, asked.content, asked.reasoning) == ("tool_calls", call, "", "Hm.")
    assert asked.usage.reasoning_tokens == len("Hm.")
    assert asked.tool_calls is not None
    (made,) = asked.tool_calls
    assert json.loads(made.function.arguments) == {"at": "sky"}
    told = run("2", {"role": "tool", "content": "say blue", "tool_call_id": made.id})
    assert (told.finish_reason, told.content, told.tool_calls) == ("stop", "blue", None)
    assert told.cache.miss_reason is None
    assert told.usage.cached_tokens >= asked.usage.prompt_tokens + asked.usage.completion_tokens - 1
