"""The finisher with answers that are checked: the rejected go on to the next model."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from tests.in_memory.agent_store import InMemoryAgentStore
from tests.in_memory.queue import InMemoryQueue
from tests.worker.pipeline.stages import TIMEOUT_S, generated, loaded_job, loaded_model

from stoker_shared.errors import ContextLimitExceeded, EngineFailed
from stoker_shared.result import Attempt
from stoker_worker.pipeline.finisher import Finisher
from stoker_worker.pipeline.job import Failed

ROUTE = [{"model": "scripted", "queue": "generate"}, {"model": "large", "queue": "q-large"}]


class Scene:
    def __init__(self) -> None:
        self.queue, self.store = InMemoryQueue(), InMemoryAgentStore()
        self.finisher = Finisher(self.store, loaded_model(), retry_s=0.01)

    def end(self, outcome: Any, *, tried: tuple[Attempt, ...] = (), **fields: Any) -> Any:
        """The entry of agent a's job after it ended so."""
        fields = {"check": {"contains": ["yes"]}, "route": ROUTE, "task": "t", "cache": "read", **fields}
        job = loaded_job(self.queue, "a", **fields)
        object.__setattr__(job.claimed, "tried", tried)
        self.finisher.put(job, outcome)
        assert self.queue.wait_for_release(TIMEOUT_S)
        return self.queue.entries[job.job_id]


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    scene.finisher.start()
    yield scene
    scene.finisher.finish()
    for thread in scene.finisher.threads:
        thread.join()


def test_a_job_whose_answer_is_rejected_goes_on(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    entry = scene.end(generated(text="secret no"))
    assert scene.queue.escalated == [("job-a", "q-large")]
    assert scene.store.memory.agents == {}
    [attempt] = entry.tried
    assert (attempt.model, attempt.accepted, attempt.reason) == ("scripted", False, "contains: 'yes' is missing")
    assert (attempt.prompt_tokens, attempt.completion_tokens) == (2, 1)
    assert "escalated job=job-a agent=a reason=contains to=large" in caplog.messages
    assert "yes" not in caplog.text
    assert "secret" not in caplog.text


def test_a_job_whose_stop_was_asked_for_goes_nowhere(scene: Scene) -> None:
    scene.queue.asked_to_stop.add("job-a")
    assert scene.end(generated(text="no")).state == "stopped"
    assert scene.queue.escalated == []


@pytest.mark.parametrize("text", ["yes", "no"])
def test_the_last_answer_is_the_result(scene: Scene, text: str) -> None:
    tried = (Attempt(model="small", accepted=False),)
    entry = scene.end(generated(text=text), tried=tried)
    assert scene.queue.escalated == []
    assert entry.state == "finished"
    assert [attempt["accepted"] for attempt in entry.result["attempts"]] == [False, text == "yes"]
    assert (entry.result["task"], entry.result["text"]) == ("t", text)


def test_a_job_that_is_too_long_for_one_model_goes_on_and_other_errors_fail_it(scene: Scene) -> None:
    entry = scene.end(Failed(ContextLimitExceeded("too long")))
    assert [attempt.reason for attempt in entry.tried] == ["ContextLimitExceeded"]
    assert scene.queue.escalated == [("job-a", "q-large")]
    assert scene.end(Failed(EngineFailed("broken"))).state == "failed"


def test_a_result_without_a_check_has_no_attempts(scene: Scene) -> None:
    result = scene.end(generated(), check=None, route=[], task=None).result
    assert (result["attempts"], result["task"]) == (None, None)
