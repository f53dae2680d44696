"""A fleet of workers in virtual time: agents that ask, workers that die and come back, and what is counted of it.

Run as a script with a JSON line (`setup`, `groups`), it prints a JSON line with the counts of these groups.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final

import numpy as np
import virtual_time
from fleet_load import ANSWER_TOKENS, BUCKET_STORES, DOWN_S, NEW_TOKENS, STORE_TOKENS, Population, Setup, TokenStore
from fleet_worker import LEASE_S, QUEUE, Ask, FleetWorker, Run, Turn, rq_name
from played_redis import PlayedRedis
from virtual_time import CLOCK

Json = dict[str, Any]
WARM_UP_S: Final = 30.0
_DRAWN: Final = 4096
_BEGINS_S: Final = 1000.0
"""When a fleet begins: no time of the product's means never."""


class FirstMakers(dict[bytes, str]):
    """Some worker has made every agent's newest version before; what has changed since is kept."""

    def __init__(self, first: dict[int, str]) -> None:
        super().__init__()
        self._first = first

    def get(self, agent: bytes, default: Any = "") -> Any:
        found = super().get(agent)
        return f"{rq_name(self._first[int(agent)], 0)} 1" if found is None else found


class PlayedFleet:
    """One queue with its workers and agents.

    Attributes:
        redis: the queue's server.
        patience_s: as the workers' setting.
        asks: the jobs that have not ended, by id.
        bucket: the shared store's caches; ``None`` for a worker that is alone.
    """

    def __init__(self, setup: Setup, population: Population, group: int) -> None:
        self._chance = np.random.default_rng([setup.seed, group])
        self._setup = setup
        self.patience_s = setup.patience_s
        self._contexts: Any = population.contexts
        self._conversations: dict[int, tuple[int, int]] = {}
        self._agents = np.flatnonzero(population.groups == group)
        rates = population.rates[self._agents]
        self._jobs_per_s, self._sums = float(rates.sum()), np.cumsum(rates)
        self._drawn: list[int] = []
        self._acts: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._asking: set[int] = set()
        self.asks: dict[str, Ask] = {}
        self.waits: list[float] = []
        self.firsts: list[float] = []
        self.counts: Counter[str] = Counter()
        CLOCK.now = self._begin = _BEGINS_S
        names = [f"mac{group}-{n}" for n in range(setup.workers // setup.groups)]
        first = dict(zip(self._agents.tolist(), self._chance.choice(names, len(self._agents)).tolist(), strict=True))
        self.redis = PlayedRedis(QUEUE, FirstMakers(first))
        recent = population.recency[population.groups[population.recency] == group].tolist()
        served: dict[str, list[int]] = {name: [] for name in names}
        for agent in recent:
            served[first[agent]].append(agent)
        stores = {name: TokenStore(STORE_TOKENS) for name in names}
        for name, store in stores.items():
            store.fill((agent, int(self._contexts[agent])) for agent in served[name])
        self.bucket: TokenStore | None = None
        if setup.is_shared:
            self.bucket = TokenStore(BUCKET_STORES * STORE_TOKENS * len(names))
            self.bucket.fill((agent, int(self._contexts[agent])) for agent in recent)
        self._workers = {name: FleetWorker(self, name, store) for name, store in stores.items()}

    def run(self) -> Json:
        """Let it run; returns what was counted after the warm-up."""
        ends_at = self._begin + WARM_UP_S + 60 * self._setup.minutes
        self.at(self._begin, self._submit)
        self.at(self._begin + WARM_UP_S, self._forget_counts)
        if self._setup.deaths_per_min:
            self._next_death()
        while self._acts[0][0] < ends_at:
            CLOCK.now, _, act = heappop(self._acts)
            act()
        CLOCK.now = ends_at
        waiting = [ask for ask in self.asks.values() if ask.started_at is None]
        self.waits += [ends_at - ask.submitted_at for ask in waiting]
        quarantined = sum(self.redis.losses[ask.job_id.encode()] > 0 for ask in waiting)
        self.counts.update({"waiting at the end": len(waiting), "quarantined at the end": quarantined})
        return {
            "counts": self.counts,
            "sent": self.redis.sent,
            "waits": [round(wait, 3) for wait in self.waits],
            "firsts": [round(wait, 3) for wait in self.firsts],
        }

    # --- what the workers use ---

    def conversation(self, agent: int) -> tuple[int, int]:
        """Its number, and its tokens."""
        return self._conversations.get(agent) or (0, int(self._contexts[agent]))

    def at(self, when: float, act: Callable[[], None]) -> None:
        heappush(self._acts, (when, next(self._numbers), act))

    def claimed(self, run: Run) -> None:
        """A move: another worker has made the agent's newest version."""
        self.counts["claimed"] += 1
        last = run.granted.last
        if last is not None and last.member != run.worker.name:
            is_alive = self.redis.is_ready(last.member)
            self.counts[f"moves from the {'living' if is_alive else 'dead'}"] += 1

    def ended(self, run: Run, turn: Turn, conversation: tuple[int, int]) -> None:
        ask = run.ask
        assert ask.started_at is not None
        self._conversations[ask.agent] = conversation
        self._asking.discard(ask.agent)
        del self.asks[ask.job_id]
        self.redis.end(ask.job_id.encode())
        self.waits.append(ask.started_at - ask.submitted_at)
        self.firsts.append(ask.first_token_at - ask.submitted_at)
        self.counts.update({"jobs": 1, "run again": int(run.attempt > 1)})
        self.counts.update({"prompt": turn.prompt, "context": turn.context})
        self.counts.update({"local": turn.local, "fetched": turn.fetched})

    def bury(self, member: str) -> None:
        """As `Recoverer`, whoever does it first."""
        if self.redis.is_member(member):
            self._put_back(member)
            self.redis.remove(member)

    # --- what happens to it ---

    def _submit(self) -> None:
        agent = self._draw()
        ask = Ask(
            f"j{next(self._numbers)}",
            agent,
            CLOCK.now,
            int(self._chance.integers(*NEW_TOKENS)),
            int(self._chance.integers(*ANSWER_TOKENS)),
        )
        self._asking.add(agent)
        self.asks[ask.job_id] = ask
        self.redis.push(ask.job_id.encode(), f"write {agent}")
        self.at(CLOCK.now + self._chance.exponential(1 / self._jobs_per_s), self._submit)

    def _draw(self) -> int:
        """An agent asks nothing while it waits for an answer: then another one does."""
        while True:
            if not self._drawn:
                found = np.searchsorted(self._sums, self._chance.random(_DRAWN) * self._sums[-1])
                self._drawn = self._agents[found].tolist()
            agent = self._drawn.pop()
            if agent not in self._asking:
                return agent

    def _forget_counts(self) -> None:
        self.counts.clear()
        self.redis.sent.clear()
        self.waits.clear()
        self.firsts.clear()

    def _next_death(self) -> None:
        every_s = 60 * self._setup.groups / self._setup.deaths_per_min
        self.at(CLOCK.now + self._chance.exponential(every_s), self._kill)

    def _kill(self) -> None:
        living = [worker for worker in self._workers.values() if worker.is_alive]
        if len(living) > 1:
            worker = living[int(self._chance.integers(len(living)))]
            worker.die()
            self.counts["deaths"] += 1
            self.at(CLOCK.now + LEASE_S, partial(self._lose_lease, worker))
            self.at(CLOCK.now + DOWN_S, partial(self._start_again, worker))
        self._next_death()

    def _lose_lease(self, worker: FleetWorker) -> None:
        self.redis.lose_lease(worker.name)

    def _start_again(self, worker: FleetWorker) -> None:
        self._put_back(worker.name)
        self._workers[worker.name] = FleetWorker(self, worker.name, worker.store, life=worker.life + 1)

    def _put_back(self, member: str) -> None:
        """The jobs that a dead worker had in flight, the oldest one in front; each counts a loss."""
        worker = self._workers[member]
        for run in sorted(worker.in_flight.snapshot(), key=lambda run: run.ask.submitted_at, reverse=True):
            worker.in_flight.remove(run)
            run.ask.started_at = None
            self.redis.losses[run.job_id.encode()] += 1
            self.redis.push(run.job_id.encode(), f"write {run.ask.agent}", front=True)
            self.counts["lost with a worker"] += 1


def simulate(setup: Setup, groups: list[int]) -> Json:
    """The counts of some of a setup's groups together."""
    virtual_time.enter()
    population = Population(setup)
    counts, sent = Counter[str](), Counter[str]()
    waits: dict[str, list[float]] = {"waits": [], "firsts": []}
    for group in groups:
        found = PlayedFleet(setup, population, group).run()
        counts.update(found["counts"])
        sent.update(found["sent"])
        for kind in waits:
            waits[kind] += found[kind]
    rates = {"asked_per_s": float(population.rates.sum()), "stores_hits": population.hits}
    return {**rates, "counts": counts, "sent": sent, **waits}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(simulate(Setup(**asked["setup"]), asked["groups"])))
