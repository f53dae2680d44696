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
}


def scene(drawn, processes, agents, faults):
    """One member stops at a moment, others do a few jobs of the same agent and prune, and it goes on."""
    one, agent, moment = drawn.randrange(processes), drawn.randrange(agents), drawn.randrange(7)
    other = drawn.choice([agent, 1 - agent])  # forks write another one's
    wait = drawn.choice([0, 1])

    def jobs(count, of):
        return [("submit", drawn.choice([0, 0, drawn.randrange(9)]), of, drawn.randrange(9), 0) for _ in range(count)]

    actions = [
        *jobs(drawn.randrange(2), agent),
        ("work", drawn.randrange(30), 0, 0, 0),
        ("submit", drawn.randrange(9), agent, drawn.randrange(100), 0),
        ("until", one, moment, drawn.choice([0, 0, 1, 2, 2]), drawn.choice(faults)),
        *[("long_time", drawn.randrange(5, 30), 0, 0, 0)] * wait,
        ("work", 29, 0, 0, 0),
        *jobs(drawn.randrange(5), other),
        ("work", 29, 0, 0, 0),
        ("work", 29, 0, 0, 0),
        *[("long_time", drawn.randrange(30), 0, 0, 0)] * wait,
        *jobs(drawn.randrange(2), other),
        ("work", drawn.randrange(30), 0, 0, 0),
        ("prune", drawn.randrange(3), other, 0, 0),
        ("work", drawn.randrange(30), 0, 0, 0),
        (drawn.choice(["wake", "arrive", "restart"]), one, 0, 0, 0),
        ("steps", one, drawn.randrange(100), drawn.randrange(100), 99),
    ]
    return [action for action in actions if drawn.random() < 0.9]


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
    between = scene(drawn, processes, agents, faults) if drawn.random() < 0.7 else []
    return history[: drawn.choice([0, 0, at])] + between + history[at:]


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
