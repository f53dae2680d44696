"""What a fleet of workers is asked for, and what a long past has left in their stores. No product code, no I/O.

Agents are asked for by Zipf's law, but none of them more often than it could be answered. Each agent's conversation
grows with its turns and begins anew at `MOST_CONTEXT`. The figures of a worker are assumed; they stand for a Mac with a
model of 8 billion weights, and nobody has measured them.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

PLACES: Final = 16
PREFILL_PER_S: Final = 800.0
DECODE_PER_S: Final = 20.0
"""Tokens a second: of the one prompt that is prefilled at a time, and of each answer."""

NEW_TOKENS: Final = (100, 700)
ANSWER_TOKENS: Final = (50, 350)
MOST_CONTEXT: Final = 8000

TOKEN_BYTES: Final = 144 * 1024
STORE_BYTES: Final = 1e12
DISK_PER_S: Final = 3e9
BUCKET_PER_S: Final = 500e6
"""Bytes a second that a worker reads of its own store and of the shared one."""

BUCKET_STORES: Final = 2.0
"""The caches in the shared store, in stores of all workers."""

LOAD: Final = 0.7
DOWN_S: Final = 30.0
"""From the death of a worker until it is started again, with its store."""

STORE_TOKENS: Final = int(STORE_BYTES / TOKEN_BYTES)
_MEAN_NEW: Final = sum(NEW_TOKENS) / 2
_MEAN_ANSWER: Final = sum(ANSWER_TOKENS) / 2
_MEAN_JOB_S: Final = _MEAN_NEW / PREFILL_PER_S + _MEAN_ANSWER / DECODE_PER_S


@dataclass(frozen=True)
class Setup:
    """
    Attributes:
        minutes: of virtual time, after a warm-up that does not count.
        groups: queues that share nothing; each has as many workers, and agents by chance.
        simulated: so many of the groups are simulated, which stand for all.
        patience_s: as the workers' setting.
        load: of what the workers could do with the hit share that their stores allow.
        deaths_per_min: of the whole fleet.
    """

    workers: int
    agents: int
    minutes: float
    groups: int = 1
    simulated: int = 1
    deaths_per_min: float = 0.0
    patience_s: float = 10.0
    load: float = LOAD
    seed: int = 26

    @property
    def is_shared(self) -> bool:
        """Whether there is a shared store: a worker that is alone in its group has none."""
        return self.workers > self.groups


class Population:
    """
    Attributes:
        rates: jobs a second of each agent; the agents are numbered from the busiest on.
        contexts: tokens of each agent's conversation at the beginning.
        recency: the agents, those that were served last first.
        groups: of each agent, its queue.
        hits: the share of jobs whose agents the stores have room for.
    """

    def __init__(self, setup: Setup) -> None:
        chance = np.random.default_rng(setup.seed)
        weights = 1.0 / np.arange(1, setup.agents + 1)
        most = 0.5 / _MEAN_JOB_S  # it thinks for as long as an answer takes
        rates = capped(weights, setup.workers * setup.load * jobs_per_s(1.0), most)
        self.contexts = chance.integers(0, MOST_CONTEXT, setup.agents)
        self.recency = np.argsort(chance.exponential(size=setup.agents) / rates)
        stores = setup.workers * (BUCKET_STORES if setup.is_shared else 1.0)
        n_kept = int(stores * STORE_TOKENS / (MOST_CONTEXT / 2))
        self.hits = float(rates[self.recency[:n_kept]].sum() / rates.sum())
        self.rates = capped(weights, setup.workers * setup.load * jobs_per_s(self.hits), most)
        self.groups = chance.integers(0, setup.groups, setup.agents)


def jobs_per_s(hits: float) -> float:
    """What one worker can do if the caches of this share of its jobs are there."""
    prefill_s = (_MEAN_NEW + (1 - hits) * MOST_CONTEXT / 2) / PREFILL_PER_S
    return min(1 / prefill_s, PLACES / (1.5 * prefill_s + _MEAN_ANSWER / DECODE_PER_S))


def capped(weights: Any, total: float, most: float) -> Any:
    """Rates in proportion to the weights, none above `most`, that add up to `total`."""
    low, high = 0.0, total / weights[-1]
    for _ in range(60):
        factor = (low + high) / 2
        low, high = (factor, high) if np.minimum(factor * weights, most).sum() < total else (low, factor)
    return np.minimum(high * weights, most)


class TokenStore:
    """The caches of agents, as many tokens as there is room for; those that were used least recently go first."""

    def __init__(self, n_tokens: float) -> None:
        self._room = n_tokens
        self._kept: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def fill(self, agents: Iterable[tuple[int, int]]) -> None:
        """
        Args:
            agents: each with its tokens, those that were used last first.
        """
        for agent, tokens in agents:
            if self._room < tokens:
                break
            self._room -= tokens
            self._kept[agent] = (0, tokens)
            self._kept.move_to_end(agent, last=False)

    def tokens(self, agent: int, conversation: int) -> int:
        """How many tokens of the beginning of this conversation are here."""
        number, tokens = self._kept.get(agent, (conversation, 0))
        return tokens if number == conversation else 0

    def put(self, agent: int, conversation: int, tokens: int) -> None:
        _, before = self._kept.pop(agent, (0, 0))
        self._kept[agent] = (conversation, tokens)
        self._room -= tokens - before
        while self._room < 0:
            _, (_, gone) = self._kept.popitem(last=False)
            self._room += gone
