"""The inbox tells agent memory whose cache must stay, before anybody relies on it."""

import time
from dataclasses import replace
from typing import Any

from stoker_shared.request import GenerationRequest
from stoker_worker.admission import Admission
from stoker_worker.inbox import Inbox
from stoker_worker.ports import ClaimedJob, Delivery


def job(agent_id: str) -> ClaimedJob:
    request = GenerationRequest(agent_id=agent_id, prompt="x")
    return ClaimedJob(agent_id, "generate", request, Delivery(agent_id, ""), 1, 0.0, 0.0, 0, None, handle=None)


class ScriptedQueue:
    """Hands out one job of each agent, in order, one at a time."""

    def __init__(self, *agents: str) -> None:
        self.waiting = list(agents)

    def claim(self, limit: int, busy_agents: frozenset[str]) -> list[ClaimedJob]:
        return [job(self.waiting.pop(0))] if self.waiting and limit else []

    def waiting_agents(self) -> frozenset[str]:
        return frozenset(self.waiting)

    def recover(self) -> int:
        return 0

    def tidy(self) -> None: ...

    def withdrawn(self, *args: Any) -> list[ClaimedJob]:
        return []

    def is_empty(self) -> bool:
        return not self.waiting


def test_agents_with_work_are_named_before_the_loader_has_their_job_and_until_it_has_ended() -> None:
    events: list[Any] = []
    running: list[ClaimedJob] = []

    def to_loader(job: ClaimedJob) -> None:
        running.append(job)
        events.append(job.job_id)

    inbox = Inbox(
        ScriptedQueue("a", "b"),  # type: ignore[arg-type]
        Admission(1),
        to_loader=to_loader,
        protect=lambda agents: events.append(set(agents)),
        progress=dict,
        poll_s=0.001,
        recover_s=100,
        burst=True,
    )
    inbox.start()
    for number in range(2):
        while sum(isinstance(event, str) for event in events) <= number:
            time.sleep(0.001)
        inbox.ended(running[number])
    inbox.join()
    assert events == [{"a", "b"}, "a", {"b"}, "b", set()]


def test_the_end_of_a_run_does_not_free_the_place_of_its_ids_next_one() -> None:
    """The id was enqueued again, for another agent, and claimed before the first run's end was told."""
    admission = Admission(2)
    first, second = job("a"), replace(job("a"), request=GenerationRequest(agent_id="b", prompt="x"))
    admission.admit([first])
    admission.admit([second])
    admission.release(first)
    assert admission.busy_agents == {"b"}
    admission.release(second)
    assert admission.busy_agents == frozenset()
