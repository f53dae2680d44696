"""One worker of a fleet in virtual time: the product's routing, a scripted engine.

The product's own code chooses, claims, homes, asks, gives up, and finds out who is dead. Played are Redis, the start of
a claimed job, which only notes it, and the engine: prompts are prefilled one at a time, and each answer takes its time
after that.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Final, Protocol

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
from played_redis import PlayedRedis
from virtual_time import CLOCK

from stoker_shared.wire import LEASE_KEY
from stoker_worker.ports import Busy, MemoryUse
from stoker_worker.queue.claim_order import ClaimOrder
from stoker_worker.queue.claimer import Claimer
from stoker_worker.queue.homes import NOBODY, Homes
from stoker_worker.queue.in_flight import JobsInFlight
from stoker_worker.queue.keeping import Keeping
from stoker_worker.queue.members import Members
from stoker_worker.queue.moving import ClaimRate, Moving
from stoker_worker.queue.waiting_job import Granted, HomeRule

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
    """A claimed job, as far as `ClaimOrder` and `Moving` look at it."""

    ask: Ask
    memory_use: MemoryUse
    attempt: int
    granted: Granted
    worker: "FleetWorker"

    @property
    def job_id(self) -> str:
        return self.ask.job_id

    @property
    def former_home(self) -> str | None:
        """As `ClaimedJob` has it: the agent has moved."""
        return None if self.granted.former in ("", NOBODY) else self.granted.former

    def is_ours(self) -> bool:
        return True

    def give_back(self, *, counts_as_attempt: bool) -> None:
        self.worker.fleet.redis.push(self.job_id.encode(), _note(self.ask), front=True)


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
    store: str
    value: str
    queues: tuple[str, ...] = (QUEUE,)

    @property
    def keys(self) -> list[str]:
        return [LEASE_KEY.format(member=self.member)]


class Fleet(Protocol):
    """What a worker sees of the others.

    Attributes:
        asks: the jobs that have not ended, by id.
        conversations: of each agent, the number of its conversation and its tokens.
        bucket: the shared store's caches; ``None`` without one.
    """

    redis: PlayedRedis
    asks: dict[str, Ask]
    bucket: TokenStore | None

    def conversation(self, agent: int) -> tuple[int, int]: ...
    def at(self, when: float, act: Any) -> None: ...
    def claimed(self, run: Run) -> None: ...
    def ended(self, run: Run, turn: Turn, conversation: tuple[int, int]) -> None: ...
    def bury(self, member: str) -> None: ...


class FleetWorker:
    """
    Attributes:
        store: its caches, which outlive it.
    """

    def __init__(self, fleet: Fleet, name: str, store: TokenStore) -> None:
        self.fleet = fleet
        self.name = name
        self.store = store
        self.is_alive = True
        redis: Any = fleet.redis
        travels = fleet.bucket is not None
        lease: Any = PlayedLease(name, name, redis.join(name, description(name, "b" if travels else "")))
        self.in_flight: JobsInFlight[Any] = JobsInFlight()
        self._members = Members(redis, lease, ttl_s=LEASE_S, clock=CLOCK.monotonic)
        self._homes = Homes(redis, lease, memory_travels=travels)
        rule = HomeRule(memory_travels=travels)
        claimers = {QUEUE: Claimer(redis, QUEUE, lease, rule)}
        played: Any = self
        self._claim_order = ClaimOrder(claimers, self._members, played, _never, self.in_flight)
        self._moving = Moving(redis, self._members, self._homes, claimers)
        self._moving._rate = ClaimRate(CLOCK.monotonic)
        if travels:
            self._moving.move_s = lambda agent: self.fleet.conversation(int(agent))[1] * TOKEN_BYTES / BUCKET_PER_S
        redis.listeners[f"rq-{name}"] = self._moving.asked.add
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
        redis.claimed[self.name].remove(job_id)
        return Run(ask, MemoryUse("write", str(ask.agent)), redis.losses[job_id] + 1, granted, self)

    def _tick(self, at: float) -> None:
        """As the fetcher's thread and `RqQueue.claim`."""
        if at != self._next_tick or not self.is_alive:
            return
        self._next_tick = inf
        for member in self._members.dead:
            self.fleet.bury(member.name)
        running = self.in_flight.snapshot()
        busy = Busy().beside(run.memory_use for run in running)
        free = PLACES - len(running)
        is_held_up = any(run.attempt > 1 for run in running)
        self._members.look_if_due()
        self._moving.answer(lambda: busy.agents, is_full=is_held_up or free == 0)
        if not is_held_up:
            claimed: list[Any] = []
            self._claim_order.claim(free, busy, claimed)
            for run in claimed:
                self._serve(run)
            n_moved_in = sum(run.former_home is not None for run in self.in_flight.snapshot())
            self._moving.look_around(len(claimed), free - len(claimed), n_moved_in)
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
        keeping = Keeping(str(agent), run.granted.version, run.granted.store == self.name)
        self._homes.keep(pipeline, keeping, {"cache": {"saved": True, "agent_version": run.granted.version + 1}})
        self.in_flight.remove(run)
        self.fleet.ended(run, turn, (number, tokens) if tokens <= MOST_CONTEXT else (number + 1, 0))
        self.wake(CLOCK.now + GATHER_S)


def description(name: str, shared: str) -> Mapping[str, Any]:
    """A member as its lease describes it, on a host of its own. `shared`: as in `Lease`."""
    where = {"host": f"{name}.played", "boot": "", "pid": 1, "started": ""}
    return {"worker": f"rq-{name}", "queues": [QUEUE], "store": name, "shared": shared, "fence": 1, **where}


def _note(ask: Ask) -> str:
    return f"write {ask.agent}"


def _never(*claim: Any, **options: Any) -> Any:
    raise NotImplementedError("no id is enqueued twice here")
