"""A `QueuePort` without a server, for one worker. It keeps the contract in tests/worker/queue/test_queue_contract.py.

What producers, operators and other workers do is done by methods of its own (`enqueue` to `take_over`); `away` makes
each call raise `RedisUnavailable`. Safe for the worker's threads.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stoker_shared.agents import AgentRequest
from stoker_shared.errors import OwnershipLost, RedisUnavailable, RequestError
from stoker_shared.request import GenerationRequest, build_request
from stoker_worker.ports import (
    NOTHING_LOST,
    Busy,
    ClaimedJob,
    DataLoss,
    Delivery,
    LastVersion,
    QueuePort,
    SequenceProgress,
    Serving,
    TextSoFar,
)
from stoker_worker.queue.in_flight import JobsInFlight
from stoker_worker.queue.lease import NO_STORE
from stoker_worker.queue.waiting import PassedOver

State = Literal["queued", "started", "finished", "failed", "stopped", "canceled"]


@dataclass
class Entry:
    """
    Attributes:
        run: claim number of the run that may end it.
    """

    job_id: str
    request: GenerationRequest | AgentRequest
    retries_left: int
    timeout_s: float | None
    created_at: str
    lives_s: float = 3600.0
    enqueued_at: float = field(default_factory=time.time)
    state: State = "queued"
    lost: int = 0
    losses_alone: int = 0
    stop_asked: bool = False
    is_listened_to: bool = False
    text: str = ""
    progress: SequenceProgress | None = None
    result: Mapping[str, Any] | None = None
    error: Exception | None = None
    partial_text: str | None = None
    run: int | None = None
    last: LastVersion | None = None
    was_saving: bool = False


class InMemoryQueue(QueuePort):
    """One queue and one worker's hold on it."""

    def __init__(self, is_at_hand: Callable[[str], bool] = NO_STORE.is_at_hand) -> None:
        self.lock = threading.RLock()
        self.entries: dict[str, Entry] = {}
        self.waiting: list[str] = []
        self.is_held = True
        self.away = False
        self.serving: Serving | None = None
        self.given_back: list[str] = []
        self._numbers = itertools.count()
        self._is_at_hand = is_at_hand
        self._passed_over = PassedOver()
        self._n_claimed = 0
        self._in_flight: JobsInFlight[InMemoryJob] = JobsInFlight()

    # --- producers, operators, other workers ---

    def enqueue(
        self,
        *,
        job_id: str | None = None,
        request: GenerationRequest | AgentRequest | None = None,
        retries: int = 0,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> str:
        """Enqueue a job; `fields` are those of a generation request, for which there is a prompt already."""
        with self.lock:
            number = next(self._numbers)
            job_id = job_id or f"job-{number}"
            request = request or build_request({"prompt": "p", **fields})
            self.entries[job_id] = Entry(job_id, request, retries, timeout_s, created_at=str(number))
            self.waiting.append(job_id)
            return job_id

    def cancel(self, job_id: str) -> None:
        with self.lock:
            self.entries[job_id].state = "canceled"
            if job_id in self.waiting:
                self.waiting.remove(job_id)

    def ask_to_stop(self, job_id: str) -> None:
        with self.lock:
            self.entries[job_id].stop_asked = True

    def listen(self, job_id: str) -> None:
        with self.lock:
            self.entries[job_id].is_listened_to = True

    def take_over(self) -> None:
        """Another worker has the queue now."""
        self.is_held = False

    def state(self, job_id: str) -> State:
        return self.entries[job_id].state

    def ask(self) -> None:
        """
        Raises:
            RedisUnavailable: the server is away.
        """
        if self.away:
            raise RedisUnavailable("Redis is away (in memory)")

    # --- the port ---

    def claim(self, limit: int, busy: Busy) -> list[ClaimedJob]:
        self.ask()
        with self.lock:
            return list(self._claim(limit, busy))

    def _claim(self, limit: int, busy: Busy) -> "list[InMemoryJob]":
        running = self._in_flight.snapshot()
        if not self.is_held or any(job.is_quarantined for job in running):
            return []
        claimed: list[InMemoryJob] = []
        for job_id in sorted(self.waiting, key=self._is_passed):
            if len(claimed) >= limit:
                break
            job = self._job(self.entries[job_id])
            use = job.memory_use
            alone = job.is_quarantined
            if busy.bars(use) or (alone and (running or claimed)):
                busy = busy.beside([use])  # no later job of this agent passes it
                continue
            busy = busy.beside([use])
            claimed.append(job)
            if alone:
                break
        for job in claimed:
            before = self.waiting[: self.waiting.index(job.job_id)]
            self._passed_over.note(filter(self._is_passed, before), self._n_claimed)
            self._passed_over.forget(job.job_id)
            self._n_claimed += 1
            self.waiting.remove(job.job_id)
            job.entry.state, job.entry.run = "started", job.claim_number
            self._in_flight.add(job)
        return claimed

    def _is_passed(self, job_id: str) -> bool:
        """Jobs of agents that are not at hand come last, within bounds."""
        agent_id = self.entries[job_id].request.agent_id
        is_ready = agent_id is None or self._is_at_hand(agent_id)
        return not is_ready and not self._passed_over.for_long(job_id, self._n_claimed)

    def in_flight(self) -> tuple[ClaimedJob, ...]:
        return self._in_flight.snapshot()

    def wait_for_release(self, timeout_s: float) -> bool:
        return self._in_flight.wait_for_release(timeout_s)

    def has_unread(self) -> bool:
        return False

    def knows_all(self) -> bool:
        return True

    def waiting_agents(self) -> frozenset[str]:
        with self.lock:
            requests = [self.entries[job_id].request for job_id in self.waiting]
            return frozenset(request.agent_id for request in requests if request.agent_id)

    def place_of(self, agent_id: str) -> tuple[int, int]:
        with self.lock:
            agents = [self.entries[job_id].request.agent_id for job_id in self.waiting]
            return (0, agents.index(agent_id)) if agent_id in agents else (1, 0)

    def next_agents(self, limit: int) -> tuple[str, ...]:
        with self.lock:
            running = {job.memory_use.agent_id for job in self._in_flight.snapshot()}
            found = (self.entries[job_id].request.agent_id for job_id in self.waiting)
            return tuple(dict.fromkeys(name for name in found if name and name not in running))[:limit]

    def withdrawn(self, progress: Mapping[str, SequenceProgress]) -> list[ClaimedJob]:
        self.ask()
        found: list[ClaimedJob] = []
        for job in self._in_flight.snapshot():
            job.entry.progress = progress.get(job.job_id, SequenceProgress("loading"))
            if job.entry.stop_asked or not job.runs:
                found.append(job)
        return found

    def listened_to(self) -> frozenset[int]:
        return frozenset(job.claim_number for job in self._in_flight.snapshot() if job.entry.is_listened_to)

    def tell(self, texts: Mapping[int, TextSoFar]) -> None:
        self.ask()
        for job in self._in_flight.snapshot():
            if so_far := texts.get(job.claim_number):
                job.entry.text = so_far.text

    def recover(self) -> int:
        self.ask()
        return 0

    def has_dead(self) -> bool:
        return False

    def leave(self) -> None:
        self.ask()

    def tidy(self) -> bool:
        self.ask()
        return False

    def is_empty(self) -> bool:
        self.ask()
        return not self.waiting

    def announce(self, serving: Serving) -> None:
        self.serving = serving

    def beat(self) -> bool:
        self.ask()
        return self.is_held

    def data_loss(self) -> DataLoss:
        return NOTHING_LOST

    def is_suspended(self) -> bool:
        return False

    def hang_up(self) -> None:
        pass

    # --- for its jobs ---

    def remove(self, job: "InMemoryJob") -> None:
        self._in_flight.remove(job)

    def _job(self, entry: Entry) -> "InMemoryJob":
        now = time.monotonic()
        return InMemoryJob(
            job_id=entry.job_id,
            queue="generate",
            request=entry.request,
            delivery=Delivery(entry.job_id, entry.created_at),
            attempt=entry.lost + 1,
            model=None if isinstance(entry.request, AgentRequest) else entry.request.model,
            losses_alone=entry.losses_alone,
            last=entry.last,
            was_saving=entry.was_saving,
            enqueued_at=entry.enqueued_at,
            claimed_at=time.time(),
            claim_number=next(self._numbers),
            deadline=None if entry.timeout_s is None else now + entry.timeout_s,
            entry=entry,
            owner=self,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class InMemoryJob(ClaimedJob):
    """See `ClaimedJob`."""

    entry: Entry = field(repr=False)
    owner: InMemoryQueue = field(repr=False)

    @property
    def lives_s(self) -> float:
        return self.entry.lives_s

    @property
    def runs(self) -> bool:
        """Whether this run may still end the job."""
        return self.entry.state == "started" and self.entry.run == self.claim_number

    def is_ours(self) -> bool:
        with self.owner.lock:
            self.owner.ask()
            return self.owner.is_held and self.runs

    def begin_save(self) -> None:
        self._check()
        self.entry.was_saving = True

    def finish(self, result: Mapping[str, Any]) -> bool:
        with self.owner.lock:
            self._check()
            self.entry.state, self.entry.result = "finished", result
            return True

    def fail(self, error: Exception, partial_text: str | None = None, *, may_retry: bool = True) -> bool:
        with self.owner.lock:
            self._check()
            self.entry.error, self.entry.partial_text = error, partial_text
            if self.entry.retries_left and may_retry and not isinstance(error, RequestError):
                self.entry.retries_left -= 1
                self._requeue()
            else:
                self.entry.state = "failed"
            return True

    def stop(self) -> None:
        with self.owner.lock:
            if self.is_ours():
                self.entry.state = "stopped"

    def give_back(self, *, counts_as_attempt: bool, alone: bool = False) -> bool:
        with self.owner.lock:
            if not self.is_ours():
                return False
            if self.entry.stop_asked:
                self.stop()
                return False
            if counts_as_attempt:
                self.entry.lost += 1
                self.entry.losses_alone += alone
            self._requeue()
            self.owner.given_back.append(self.job_id)
            return True

    def drop(self) -> None:
        with self.owner.lock:
            self.owner.ask()

    def release(self) -> None:
        self.owner.remove(self)

    def _check(self) -> None:
        if not self.is_ours():
            raise OwnershipLost(f"job {self.job_id} is no longer this worker's")

    def _requeue(self) -> None:
        self.entry.state, self.entry.run = "queued", None
        self.owner.waiting.insert(0, self.job_id)
