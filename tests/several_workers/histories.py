"""Histories at random, with directed parts for what seldom happens by chance."""

import random

from tests.several_workers.actions import FAULTS

USUAL = {"submit": 10, "steps": 20, "time": 6, "until": 10, "work": 6}
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
    "idle": 1,
    "slow": 2,
}


APPEND, FULL, READ, FORGET, ROLLBACK, FORK, PLAIN = 0, 3, 4, 5, 6, 7, 8  # in `KINDS`
AT_PUT, AT_COMPUTE = 0, 3  # in `MOMENTS`
LATE, FAILED = 2, 4  # in `FAULTS`
GRACE, TTL = 8, 12  # rounds of `idle` that take longer
WORK = ("work", 29)  # all that can be done


class Scenes:
    """Directed parts of a history, by members `one` and `other` and an agent. Now and then an action is left out."""

    def __init__(self, drawn, processes, agents, faults):
        self.drawn, self.faults, self.below = drawn, faults, drawn.randrange
        self.one, self.other = drawn.sample(range(processes), 2)
        self.agent = drawn.randrange(agents)
        self.all = [self.stops] * 3 + [self.late] * 6 + [self.slow] * 4 + [self.listed] * 3
        self.all += [self.hint, self.poison, self.outage, self.failing, self.waiting]

    def any(self):
        return [action for action in self.drawn.choice(self.all)() if self.drawn.random() < 0.95]

    def job(self, *kinds, agent=None, argument=0):
        return ("submit", self.drawn.choice(kinds), self.agent if agent is None else agent, argument)

    def jobs(self, most, *kinds):
        return [self.job(*kinds, argument=self.below(9)) for _ in range(self.below(most + 1))]

    def idle(self, least=0):
        return ("idle", self.drawn.randint(least, 13))

    def prune(self):
        return ("prune", self.below(3), self.agent)

    def maybe(self, *actions):
        return [action for action in actions if self.drawn.random() < 0.5]

    def versions(self):
        """Some, by others too: a fork holds nothing."""
        kinds = [[APPEND, FULL], [FORGET, APPEND], [FORGET, FORK, FULL], [APPEND]]
        found = []
        for _ in range(self.drawn.randint(2, 4)):
            found += [self.job(*self.drawn.choice(kinds)), *self.maybe(("steps", 1, 1, 9)), WORK]
        return found + self.maybe(self.job(FORGET), WORK)

    def stops(self):
        """One member stops at a moment, others do a few jobs of the same agent and prune, and it goes on."""
        self.agent = self.drawn.choice([self.agent, 1 - self.agent])  # forks write another one's
        stop = ("until", self.one, self.below(7), self.drawn.choice([0, 0, 1, 2, 2]), self.drawn.choice(self.faults))
        start = [*self.jobs(1, *range(9)), ("work", self.below(30)), self.job(*range(9), argument=self.below(9)), stop]
        meanwhile = [*self.maybe(("long_time", self.drawn.randrange(5, 30))), *self.jobs(4, *range(9)), WORK, WORK]
        end = [*self.maybe(("long_time", self.below(30))), self.prune(), ("work", self.below(30))]
        again = [(self.drawn.choice(["wake", "arrive", "restart"]), self.one)]
        return start + meanwhile + end + again + [("steps", self.one, self.below(100), self.below(100))]

    def late(self):
        """A put arrives when its number was made by another and pruned; a rollback goes to that number."""
        put = [*self.jobs(2, APPEND, FULL), WORK, self.job(APPEND, FULL, FORGET), ("until", self.one, AT_PUT, 2, LATE)]
        lives_again = [("crash", self.one, 1), ("idle", 4), ("restart", self.one)]
        ends = self.drawn.choice([[("until", self.one, AT_COMPUTE, 2, FAILED)], [("flush",)], lives_again])
        above = self.drawn.choice([[], self.versions(), [self.job(APPEND)], [self.job(APPEND), self.job(FULL)]])
        back = self.job(ROLLBACK, ROLLBACK, READ, FORK, argument=2)
        return [*put, *ends, WORK, *above, WORK, self.idle(GRACE), self.prune(), WORK, ("arrive",), back, WORK]

    def slow(self):
        """One thread stops at a moment, and its member does not: it keeps its lease while the chain goes on."""
        moment = self.drawn.choice([AT_PUT, AT_PUT, AT_PUT, AT_COMPUTE, 6, 7])
        stop, source = ("slow", self.below(3), moment), 1 - self.agent
        if self.drawn.random() < 0.6:
            start = [self.job(FORGET), self.job(APPEND, agent=source), WORK, self.job(FORK, agent=source)]
            meanwhile = self.versions()
        else:
            start = [*self.jobs(1, APPEND), WORK, self.job(APPEND, FULL, FORGET)]
            meanwhile = [self.idle(TTL), WORK, self.job(APPEND), WORK, self.idle(TTL), WORK]
        wake = [("wake", process) for process in range(3)]
        end = [("work", self.drawn.choice([1, 2, 3, 29])), self.job(READ, ROLLBACK, APPEND), WORK]
        return [*start, stop, *meanwhile, self.idle(GRACE), self.prune(), WORK, *wake, *end]

    def hint(self):
        """Redis, or a command without Redis, leaves a member with a hint that is no longer true."""
        expired, emptied = [self.idle(TTL), WORK], [self.job(FORGET), WORK, *self.maybe(self.job(APPEND), WORK)]
        start = [self.job(APPEND, FORGET), WORK, ("replicate",), ("sleep", self.one), ("idle", self.below(4))]
        moved = [self.job(APPEND, FULL), WORK, ("wake", self.one)]
        moved += self.drawn.choice([[("go_back",)], emptied, expired])
        use = [self.job(READ, APPEND, ROLLBACK, FORK), ("until", self.one, self.drawn.choice([AT_COMPUTE, AT_PUT]), 3)]
        return [*start, *moved, *use, *self.maybe(self.idle(GRACE), self.prune()), WORK]

    def listed(self):
        """Names go while somebody who sees an old listing follows them upwards."""
        written = [self.job(APPEND, APPEND, FULL, FORGET) for _ in range(self.drawn.randint(2, 5))]
        start = [*self.maybe(*self.versions()), self.idle(), *written, ("slow", self.one, AT_PUT, 1)]
        sleep = [*self.maybe(("sleep", self.one), ("idle", 4)), WORK, *self.maybe(("flush",)), ("time", self.below(4))]
        prune = [*self.maybe(("wake", self.one)), self.prune(), ("work", self.below(12)), self.prune()]
        return [*start, *sleep, *prune, *[self.job(READ, READ, ROLLBACK, FORK, argument=1) for _ in range(4)], WORK]

    def poison(self):
        """A job takes one member after the other along."""
        victims = self.drawn.choices(range(3), k=12)
        deaths = [death for p in victims for death in (("until", p, AT_COMPUTE, 1), ("idle", 4), ("restart", p))]
        return [self.job(APPEND, READ, FULL), *deaths, WORK]

    def outage(self):
        """The bucket goes away at a moment, and members stop. It stays away."""
        start = [self.job(APPEND, FULL), ("until", self.one, self.below(7), 3), ("outage",)]
        stops = self.maybe(("steps", self.one, 1, self.below(12)), *[("stop", process) for process in range(3)])
        return [*start, *stops, *self.jobs(2, APPEND, PLAIN)]

    def failing(self):
        """A job fails by itself after a put whose outcome is unknown, and is run again."""
        start = [self.job(APPEND, READ, APPEND), ("until", self.one, AT_PUT, 2, LATE)]
        start += [("until", self.one, AT_COMPUTE, 2, FAILED), ("until", self.one, AT_PUT, 2, self.below(4))]
        return [*start, *self.maybe(("until", self.one, AT_PUT, 2, self.below(4))), WORK, ("retry",), ("arrive",), WORK]

    def waiting(self):
        """A read waits for the write before it, which waits for a read."""
        start = [self.job(READ, FORK), ("until", self.one, AT_COMPUTE, 3), self.job(APPEND, FORGET)]
        return [*start, self.job(READ, APPEND), *self.maybe(("until", self.other, AT_COMPUTE, 0)), WORK]


def history_of(seed):
    """Each has some kinds of trouble and lacks others, so that one kind does not hide another."""
    drawn = random.Random(seed)
    weights = USUAL | {name: weight for name, weight in TROUBLE.items() if drawn.random() < 0.6}
    faults = [n for n in range(len(FAULTS)) if drawn.random() < 0.5] or [99]
    often = drawn.choice([0.02, 0.1, 0.3])
    names = drawn.choices(list(weights), list(weights.values()), k=drawn.randint(20, 100))
    processes, agents = drawn.choice([2, 3]), drawn.choice([1, 2])
    history = [
        (
            name,
            drawn.randrange(processes) if name in ("steps", "until") else drawn.randrange(100),
            drawn.randrange(agents) if name in ("submit", "prune") else drawn.randrange(100),
            drawn.randrange(100),
            drawn.choice(faults) if name == "until" or drawn.random() < often else 99,
        )
        for name in names
    ]
    at = drawn.randint(0, len(history))
    scenes = Scenes(drawn, processes, agents, faults)
    between = [action for _ in range(drawn.choice([1, 1, 2, 2])) for action in scenes.any()]
    return history[: drawn.choice([0, 0, at])] + between + history[at if drawn.random() < 0.5 else len(history) :]
