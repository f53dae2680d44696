"""One worker of a fleet in virtual time: the product's routing, a scripted engine.

The product's own code chooses, claims, leaves jobs to other workers, and finds out who is dead. Played are Redis, the
start of a claimed job, which only notes it, and the engine: prompts are prefilled one at a time, and each answer takes
its time after that.
"""

from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Final

from fleet_load import (
    BUCKET_PER_S,
    DECODE_PER_S,
    DISK_PER_S,
    MOST_CONTEXT,
    PLACES,
    PREFILL_PER_S,
    TOKEN_BYTES,
    TokenStore,
)
from virtual_time import CLOCK

from stoker_shared.wire import LEASE_KEY
from stoker_worker.placement.placement import Placement, Writes
from stoker_worker.ports import Busy, MemoryUse
from stoker_worker.process_identity import ProcessIdentity
from stoker_worker.queue.claim_order import ClaimOrder
from stoker_worker.queue.claimer import Claimer, Granted
from stoker_worker.queue.in_flight import JobsInFlight
from stoker_worker.queue.member import Member
from stoker_worker.queue.members import Members

QUEUE: Final = "generate"
POLL_S: Final = 0.05
GATHER_S: Final = 0.005
LEASE_S: Final = 4.0
"""The product's defaults."""


@dataclass(eq=False)
class Ask:
    """A job as its agent sees it."""

    job_id: str
    agent: int
    submitted_at: float
    new_tokens: int
    answer_tokens: int
    started_at: float | None = None
    first_token_at: float = 0.0


@dataclass(eq=False)
class Run:
    """A claimed job, as far as `ClaimOrder` looks at it."""

    ask: Ask
    memory_use: MemoryUse
    attempt: int
    granted: Granted
    worker: "FleetWorker"

    @property
    def job_id(self) -> str:
        return self.ask.job_id

    def is_ours(self) -> bool:
        return True

    def give_back(self, *, counts_as_attempt: bool) -> None:
        self.worker.fleet.redis.push(self.job_id.encode(), f"write {self.ask.agent}", front=True)


@dataclass
class Turn:
    """What became of a run: tokens of its prompt, of the conversation before it, and of that from which caches."""

    prompt: int
    context: int
    local: int
    fetched: int


@dataclass(frozen=True)
class PlayedLease:
    member: str
    worker_name: str
    value: str
    queues: tuple[str, ...] = (QUEUE,)

    @property
    def keys(self) -> list[str]:
        return [LEASE_KEY.format(member=self.member)]


class FleetWorker:
    """
    Attributes:
        store: its caches, which outlive it.
        life: how often this worker was started before.
    """

    def __init__(self, fleet: Any, name: str, store: TokenStore, *, life: int = 0) -> None:
        self.fleet = fleet
        self.name = name
        self.store = store
        self.life = life
        self.is_alive = True
        redis: Any = fleet.redis
        worker_name = rq_name(name, life)
        process = ProcessIdentity(f"{name}.played", "", 1, "")  # a host of its own
        member = Member(name, worker_name, (QUEUE,), name, process, "bucket", "model", is_ready=True)
        lease: Any = PlayedLease(name, worker_name, redis.join(member))
        self.in_flight: JobsInFlight[Any] = JobsInFlight()
        self._members = Members(redis, lease, ttl_s=LEASE_S, clock=CLOCK.monotonic)
        self._placement = Placement(redis, () if fleet.bucket is None else (QUEUE,), worker_name=worker_name)
        claimer = Claimer(redis, QUEUE, lease, self._placement, patience_s=fleet.patience_s, clock=CLOCK.monotonic)
        played: Any = self
        self._claim_order = ClaimOrder({QUEUE: claimer}, self._members, played, _never, self.in_flight)
        self._prefills_until = 0.0
        self._next_tick = inf
        self.wake(CLOCK.now)

    def wake(self, at: float) -> None:
        """Look into the queue then, unless that is due before."""
        if at < self._next_tick:
            self._next_tick = at
            self.fleet.at(at, partial(self._tick, at))

    def die(self) -> None:
        self.is_alive = False

    def start(self, queue: str, granted: Granted) -> Run:
        """What `JobStart` does for `ClaimOrder`."""
        redis, ask = self.fleet.redis, self.fleet.asks[granted.job_id]
        job_id = granted.job_id.encode()
        redis.start(self.name, job_id)
        return Run(ask, MemoryUse("write", str(ask.agent)), redis.losses[job_id] + 1, granted, self)

    def _tick(self, at: float) -> None:
        """As the fetcher's thread and `RqQueue.claim`."""
        if at != self._next_tick or not self.is_alive:
            return
        self._next_tick = inf
        for member in self._members.dead:
            self.fleet.bury(member.name)
        self._members.look_if_due()
        running = self.in_flight.snapshot()
        if not any(run.attempt > 1 for run in running):
            claimed: list[Any] = []
            busy = Busy().beside(run.memory_use for run in running)
            self._claim_order.claim(PLACES - len(running), busy, claimed)
            for run in claimed:
                self._serve(run)
            self._claim_order.look_around()
        self.wake(CLOCK.now + POLL_S)

    def _serve(self, run: Run) -> None:
        ask = run.ask
        ask.started_at = CLOCK.now
        number, context = self.fleet.conversation(ask.agent)
        local = min(context, self.store.tokens(ask.agent, number))
        remote = 0 if self.fleet.bucket is None else min(context, self.fleet.bucket.tokens(ask.agent, number))
        turn = Turn(context + ask.new_tokens, context, local, max(0, remote - local))
        read_s = TOKEN_BYTES * (turn.local / DISK_PER_S + turn.fetched / BUCKET_PER_S)
        prefill_s = (turn.prompt - turn.local - turn.fetched) / PREFILL_PER_S
        self._prefills_until = max(CLOCK.now + read_s, self._prefills_until) + prefill_s
        ask.first_token_at = self._prefills_until
        self.fleet.claimed(run)
        self.fleet.at(self._prefills_until + ask.answer_tokens / DECODE_PER_S, partial(self._end, run, number, turn))

    def _end(self, run: Run, number: int, turn: Turn) -> None:
        if not self.is_alive:
            return
        agent, tokens = run.ask.agent, turn.prompt + run.ask.answer_tokens
        self.store.put(agent, number, tokens)
        if self.fleet.bucket is not None:
            self.fleet.bucket.put(agent, number, tokens)
        pipeline: Any = self.fleet.redis
        known = run.granted.last.number if run.granted.last else 0
        result = {"cache": {"saved": True, "agent_version": known + 1}}
        self._placement.wrote(pipeline, Writes(str(agent), str(agent), known), result)
        self.in_flight.remove(run)
        self.fleet.ended(run, turn, (number, tokens) if tokens <= MOST_CONTEXT else (number + 1, 0))
        self.wake(CLOCK.now + GATHER_S)


def rq_name(member: str, life: int) -> str:
    """As `new_worker_name`, without its randomness."""
    return f"stoker-{member}-{life:08x}"


def _never(*claim: Any, **options: Any) -> Any:
    raise NotImplementedError("no id is enqueued twice here")
