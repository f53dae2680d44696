"""The inbox tells agent memory whose cache must stay, before anybody relies on it."""

import time
from dataclasses import replace
from typing import Any

import pytest

from stoker_shared.request import GenerationRequest
from stoker_worker.admission import Admission
from stoker_worker.inbox import Inbox
from stoker_worker.ports import Busy, ClaimedJob, Delivery


def job(agent_id: str) -> ClaimedJob:
    request = GenerationRequest(agent_id=agent_id, prompt="x")
    return ClaimedJob(agent_id, "generate", request, Delivery(agent_id, ""), 1, 0.0, 0.0, 0, None, handle=None)


class ScriptedQueue:
    """Hands out one job of each agent, in order, one at a time."""

    def __init__(self, *agents: str) -> None:
        self.waiting = list(agents)

    def claim(self, limit: int, busy: Busy) -> list[ClaimedJob]:
        return [job(self.waiting.pop(0))] if self.waiting and limit else []

    def waiting_agents(self) -> frozenset[str]:
        return frozenset(self.waiting)

    def has_unread(self) -> bool:
        return False

    def recover(self) -> int:
        return 0

    def tidy(self) -> bool:
        return False

    def withdrawn(self, *args: Any) -> list[ClaimedJob]:
        return []

    def announce(self, serves: str) -> None: ...

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


class LongQueue(ScriptedQueue):
    """What waits comes to light at the tenth look only: behind many of another agent's jobs, or many that are due."""

    def __init__(self, hidden: str) -> None:
        super().__init__()
        self._hidden = hidden
        self.looks = 0

    def claim(self, limit: int, busy: Busy) -> list[ClaimedJob]:
        self.looks += 1
        return [job("a")] if self.looks == 10 and limit else []

    def has_unread(self) -> bool:
        return self._hidden == "behind" and self.looks < 10

    def tidy(self) -> bool:
        return self._hidden == "due" and self.looks < 10


def inbox_of(queue: ScriptedQueue, n_places: int, claimed: list[str]) -> Inbox:
    """It looks again after a minute, unless there is a reason to do so at once; and leaves with its first job."""

    def take(job: ClaimedJob) -> None:
        claimed.append(job.job_id)
        inbox.leave()
        inbox.ended(job)

    inbox = Inbox(
        queue,  # type: ignore[arg-type]
        Admission(n_places),
        to_loader=take,
        protect=lambda agents: None,
        progress=dict,
        poll_s=60,
        recover_s=100,
        burst=False,
    )
    inbox.start()
    return inbox


@pytest.mark.parametrize("hidden", ["behind", "due"])
def test_what_was_not_come_to_yet_is_not_waited_for_while_a_place_is_free(hidden: str) -> None:
    claimed: list[str] = []
    inbox = inbox_of(LongQueue(hidden), 1, claimed)
    inbox.join(30)
    assert (claimed, inbox.is_alive()) == (["a"], False)


def test_with_every_place_taken_looks_are_no_more_frequent_than_asked_for() -> None:
    queue = LongQueue("behind")
    inbox = inbox_of(queue, 0, [])
    while not queue.looks:
        time.sleep(0.001)
    time.sleep(0.05)
    assert queue.looks == 1
    inbox.leave()
    inbox.ended(job("nobody"))
    inbox.join(30)


def test_the_end_of_a_run_does_not_free_the_place_of_its_ids_next_one() -> None:
    """The id was enqueued again, for another agent, and claimed before the first run's end was told."""
    admission = Admission(2)
    first, second = job("a"), replace(job("a"), request=GenerationRequest(agent_id="b", prompt="x"))
    admission.admit([first])
    admission.admit([second])
    admission.release(first)
    assert admission.busy == Busy(writing=frozenset({"b"}))
    admission.release(second)
    assert admission.busy == Busy()
