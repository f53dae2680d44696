"""Histories at random, the search for one that breaks an invariant, and the shortest part of it that still does."""

import random
import sys
import time
from pathlib import Path
from types import ModuleType

from tests.placement_model import rule as the_rule
from tests.placement_model.invariants import Broken
from tests.placement_model.world import FAULTS, World

WORK = {"submit": 10, "steps": 20, "time": 6, "until": 10, "work": 6}
TROUBLE = {
    "long_time": 3,
    "sleep": 3,
    "wake": 4,
    "crash": 3,
    "restart": 3,
    "stop": 1,
    "cancel": 3,
    "retry": 3,
    "outage": 1,
    "arrive": 3,
    "flush": 1,
    "replicate": 2,
    "go_back": 2,
    "prune": 5,
    "expire": 2,
    "bring": 2,
    "idle": 1,
    "slow": 2,
}


APPEND, FULL, READ, FORGET, ROLLBACK, FORK, PLAIN = 0, 3, 4, 5, 6, 7, 8  # in `KINDS`
AT_PUT, AT_COMPUTE = 0, 3  # in `MOMENTS`
ALL, LONG = 29, 8  # rounds: all that can be done; more than a grace


class Scenes:
    """Directed parts of a history. Each line of one is left out now and then."""

    def __init__(self, drawn, processes, agents, faults):
        self.drawn, self.faults = drawn, faults
        self.one, self.other = drawn.sample(range(processes), 2)
        self.agent = drawn.randrange(agents)

    def any_of(self):
        scene = self.drawn.choice(
            [self.stops] * 3 + [self.late, self.slow] * 4 + [self.listed] * 3 + [self.hint, self.poison, self.outage]
            + [self.again, self.failing, self.closed]
        )
        return [action for action in scene() if self.drawn.random() < 0.95]

    def job(self, *kinds, agent=None, argument=0):
        return ("submit", self.drawn.choice(kinds), self.agent if agent is None else agent, argument, 0)

    def jobs(self, most, *kinds):
        return [self.job(*(kinds or range(9)), argument=self.drawn.randrange(9)) for _ in range(self.drawn.randint(0, most))]

    def work(self, rounds=ALL):
        return ("work", rounds, 0, 0, 0)

    def idle(self, least=0):
        return ("idle", self.drawn.randint(least, 13), 0, 0, 0)

    def prune(self):
        return ("prune", self.drawn.randrange(3), self.agent, 0, 0)

    def maybe(self, *actions):
        return [action for action in actions if self.drawn.random() < 0.5]

    def emptied(self):
        """An agent without turns, so that forks and imports may write it."""
        return [self.job(FORGET), self.work(), ("bring", self.drawn.randrange(3), self.agent, self.drawn.randrange(3), 0)]

    def versions(self):
        """Some, by others too: a member is left at the end of its patience, a fork and an import hold nothing."""
        kinds = [[APPEND, FULL], [FORGET, APPEND], [FORGET, FORK, FULL], [APPEND]]
        found = []
        for _ in range(self.drawn.randint(2, 4)):
            found += [self.job(*self.drawn.choice(kinds)), *self.maybe(("steps", 1, 1, 9, 99)), self.work()]
        return found + self.maybe(*self.emptied())

    def stops(self):
        """One member stops at a moment, others do a few jobs of the same agent and prune, and it goes on."""
        self.agent = self.drawn.choice([self.agent, 1 - self.agent])  # forks write another one's
        end = self.drawn.choice(["wake", "arrive", "restart"])
        return [
            *self.jobs(1),
            self.work(self.drawn.randrange(30)),
            self.job(*range(9), argument=self.drawn.randrange(9)),
            ("until", self.one, self.drawn.randrange(7), self.drawn.choice([0, 0, 1, 2, 2]), self.drawn.choice(self.faults)),
            *self.maybe(("long_time", self.drawn.randrange(5, 30), 0, 0, 0)),
            *self.jobs(4),
            self.work(),
            self.work(),
            *self.maybe(("long_time", self.drawn.randrange(30), 0, 0, 0)),
            self.prune(),
            self.work(self.drawn.randrange(30)),
            (end, self.one, 0, 0, 0),
            ("steps", self.one, self.drawn.randrange(100), self.drawn.randrange(100), 99),
        ]

    def late(self):
        """A put arrives when its number was made by another and pruned; a rollback goes to that number."""
        return [
            *self.jobs(2, APPEND, FULL),
            self.work(),
            self.job(APPEND, FULL, FORGET),
            ("until", self.one, AT_PUT, 2, self.drawn.choice([2, 2, 3])),
            *self.drawn.choice(
                [
                    [("until", self.one, AT_COMPUTE, 2, 4)],
                    [("flush", 0, 0, 0, 0)],
                    [("crash", self.one, 1, 0, 0), ("idle", 4, 0, 0, 0), ("restart", self.one, 0, 0, 0)],
                ]
            ),
            self.work(),
            *self.drawn.choice([[], self.versions(), [self.job(APPEND)], [self.job(APPEND), self.job(FULL)]]),
            self.work(),
            self.idle(LONG),
            self.prune(),
            self.work(),
            ("arrive", 0, 0, 0, 0),
            self.job(ROLLBACK, ROLLBACK, READ, FORK, argument=2),
            self.work(),
        ]

    def slow(self):
        """One thread stops at a moment, and its member does not: it keeps its lease while the chain goes on."""
        source = 1 - self.agent
        fork = [self.job(FORGET), self.job(APPEND, agent=source), self.work(), self.job(FORK, agent=source)]
        write = [*self.jobs(1, APPEND), self.work(), self.job(APPEND, FULL, FORGET)]
        is_fork = self.drawn.random() < 0.6
        expired = [self.idle(12), ("expire", self.other, self.agent, 0, 0), self.work(), *self.emptied()[2:], self.work()]
        return [
            *(fork if is_fork else write),
            ("slow", self.drawn.randrange(3), self.drawn.choice([AT_PUT, AT_PUT, AT_PUT, AT_COMPUTE, 6, 7]), 0, 0),
            *(self.versions() if is_fork else expired + expired),
            self.idle(LONG),
            self.prune(),
            self.work(),
            *[("wake", process, 0, 0, 0) for process in range(3)],
            self.work(self.drawn.choice([1, 2, 3, ALL])),
            self.job(READ, ROLLBACK, APPEND),
            self.work(),
        ]

    def hint(self):
        """Redis, or a command without Redis, leaves a member with a hint that is no longer true."""
        meanwhile = [
            [("go_back", 0, 0, 0, 0)],
            [self.job(FORGET), self.work(), *self.emptied()],
            [self.idle(12), ("expire", self.other, self.agent, 0, 0), self.work()],
        ]
        return [
            self.job(APPEND, FORGET),
            self.work(),
            ("replicate", 0, 0, 0, 0),
            ("sleep", self.one, 0, 0, 0),
            ("idle", self.drawn.randrange(4), 0, 0, 0),
            self.job(APPEND, FULL),
            self.work(),
            ("wake", self.one, 0, 0, 0),
            *self.drawn.choice(meanwhile),
            self.job(READ, APPEND, ROLLBACK, FORK),
            ("until", self.one, self.drawn.choice([AT_COMPUTE, AT_PUT]), 3, 99),
            *self.maybe(self.idle(LONG), self.prune()),
            self.work(),
        ]

    def poison(self):
        """A job takes one member after the other along."""
        dies = [
            part
            for process in self.drawn.choices(range(3), k=12)
            for part in (("until", process, AT_COMPUTE, 1, 99), ("idle", 4, 0, 0, 0), ("restart", process, 0, 0, 0))
        ]
        return [self.job(APPEND, READ, FULL), *dies, self.work()]

    def outage(self):
        """The bucket goes away at a moment, and members stop. It stays away."""
        moment = self.drawn.randrange(7)
        stops = self.maybe(*[("stop", process, 0, 0, 0) for process in range(3)])
        return [
            self.job(APPEND, FULL),
            ("until", self.one, moment, 3, 99),
            ("outage", 0, 0, 0, 0),
            *self.maybe(("steps", self.one, 1, self.drawn.randrange(12), 99)),
            *stops,
            *self.jobs(2, APPEND, PLAIN),
        ]

    def again(self):
        """What was forgotten is imported again."""
        name = self.drawn.randrange(3)
        return [
            self.job(FORGET),
            self.work(),
            ("bring", self.one, self.agent, name, 0),
            self.work(),
            *self.jobs(1, APPEND),
            self.job(FORGET),
            self.work(),
            ("bring", self.other, self.agent, name, 0),
            self.work(),
        ]

    def listed(self):
        """Names go while somebody who sees an old listing follows them upwards."""
        reads = [self.job(READ, READ, ROLLBACK, FORK, argument=1) for _ in range(4)]
        return [
            *self.maybe(*self.versions()),
            self.idle(),
            *[self.job(APPEND, APPEND, FULL, FORGET) for _ in range(self.drawn.randint(2, 5))],
            ("slow", self.one, AT_PUT, 1, 0),
            *self.maybe(("sleep", self.one, 0, 0, 0), ("idle", 4, 0, 0, 0)),
            self.work(),
            *self.maybe(("flush", 0, 0, 0, 0)),
            ("time", self.drawn.randrange(4), 0, 0, 0),
            *self.maybe(("wake", self.one, 0, 0, 0)),
            self.prune(),
            self.work(self.drawn.randrange(12)),
            self.prune(),
            *reads,
            self.work(),
        ]

    def failing(self):
        """A job fails by itself after a put whose outcome is unknown, and is run again."""
        faults = [("until", self.one, AT_PUT, 2, 2), ("until", self.one, AT_COMPUTE, 2, 4)]
        return [
            self.job(APPEND, READ, APPEND),
            *faults,
            ("until", self.one, AT_PUT, 2, self.drawn.choice([0, 1, 2, 3])),
            *self.maybe(("until", self.one, AT_PUT, 2, self.drawn.choice([0, 1, 2, 3]))),
            self.work(),
            ("retry", 0, 0, 0, 0),
            ("arrive", 0, 0, 0, 0),
            self.work(),
        ]

    def closed(self):
        """A read of the line waits for a write before it."""
        return [
            self.job(READ, FORK),
            ("until", self.one, AT_COMPUTE, 3, 99),
            self.job(APPEND, FORGET),
            self.job(READ, APPEND),
            self.work(self.drawn.randrange(4)),
            *self.maybe(("until", self.other, AT_COMPUTE, 0, 99)),
            self.work(),
        ]


def history_of(seed):
    """Each has some kinds of trouble and lacks others, so that one kind does not hide another."""
    drawn = random.Random(seed)
    weights = WORK | {name: weight for name, weight in TROUBLE.items() if drawn.random() < 0.6}
    faults = [n for n in range(len(FAULTS)) if drawn.random() < 0.5] or [99]
    often = drawn.choice([0.02, 0.1, 0.3])
    names = drawn.choices(list(weights), list(weights.values()), k=drawn.randint(20, 100))
    processes, agents = drawn.choice([2, 3]), drawn.choice([1, 2])
    history = [
        (
            name,
            drawn.randrange(processes) if name in ("steps", "until") else drawn.randrange(100),
            drawn.randrange(agents) if name in ("submit", "prune", "expire") else drawn.randrange(100),
            drawn.randrange(100),
            drawn.choice(faults) if name == "until" or drawn.random() < often else 99,
        )
        for name in names
    ]
    at = drawn.randint(0, len(history))
    scenes = Scenes(drawn, processes, agents, faults)
    between = [action for _ in range(drawn.choice([1, 1, 2, 2])) for action in scenes.any_of()]
    return history[: drawn.choice([0, 0, at])] + between + history[at if drawn.random() < 0.5 else len(history) :]


def play(history, seed, rule: ModuleType = the_rule):
    """What broke, or ``None``."""
    try:
        World(rule, seed).play(history)
    except Broken as error:
        return str(error)
    return None


def search(seeds, rule: ModuleType = the_rule):
    """The first seed whose history breaks an invariant, and which."""
    for seed in seeds:
        if (broken := play(history_of(seed), seed, rule)) is not None:
            return seed, broken
    return None


def shortest(seed, rule: ModuleType = the_rule):
    """The history without each part that it does not need to break the same invariant."""
    history = history_of(seed)
    wanted = play(history, seed, rule)
    size = len(history)
    while size:
        at = 0
        while at < len(history):
            shorter = history[:at] + history[at + size :]
            if play(shorter, seed, rule) == wanted:
                history = shorter
            else:
                at += size
        size //= 2
    return history


def rule_with(*changes):
    """The rule with lines of it broken: what is there, exactly once, and what is there instead."""
    source = Path(the_rule.__file__).read_text()
    for old, new in changes:
        assert source.count(old) == 1, f"{source.count(old)} times in the rule: {old!r}"
        source = source.replace(old, new)
    broken = ModuleType("tests.placement_model.broken_rule")
    sys.modules[broken.__name__] = broken  # dataclasses look themselves up
    exec(compile(source, "broken_rule.py", "exec"), broken.__dict__)
    return broken


def explore(seconds, first=0, rule: ModuleType = the_rule):
    """How many histories, and what the first one that broke an invariant was."""
    seed, until = first, time.monotonic() + seconds
    while time.monotonic() < until:
        if found := search([seed], rule):
            return seed - first, found
        seed += 1
    return seed - first, None
