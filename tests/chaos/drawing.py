"""The jobs of a chaos run, drawn from one seed. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from rq import Retry
from tests.chaos.plan import QUEUES, PlannedJob
from tests.chaos.relations import Shares, related


@dataclass(frozen=True)
class Mix:
    """The mix of jobs of a run.

    Attributes:
        kinds: the weight of each kind.
        words: the vocabulary of prompts; a prompt has up to `most_words`.
        short, long: ranges of `max_tokens`.
        endless: `max_tokens` of a job that a withdrawal or its timeout ends.
        may_end_early: whether such a job may finish all the same, because the model stops by itself.
        shares: the shares of related jobs.
    """

    kinds: Mapping[str, int]
    words: Sequence[str]
    most_words: int
    short: range
    long: range
    endless: int
    may_end_early: bool = False
    shares: Shares = field(default_factory=Shares)


SCRIPTED = Mix(
    kinds={
        "words": 46, "say": 14, "long": 8, "fail": 5, "flaky": 7, "late": 3,
        "canceled": 5, "withdrawn": 6, "short-lived": 2, "scheduled": 3, "question": 4, "off": 3, "nobody": 3,
    },
    words=("and", "then", "some", "more", "words"),
    most_words=60,
    short=range(4, 60),
    long=range(200, 600),
    endless=1_000_000,
)  # fmt: skip


def draw_jobs(
    random: Random, mix: Mix, *, n_jobs: int, n_agents: int, n_crash: int, n_break: int = 0
) -> list[PlannedJob]:
    """The jobs in the order of their first enqueue. `n_crash` of them kill their worker, `n_break` its engine."""
    kinds = random.choices(list(mix.kinds), list(mix.kinds.values()), k=n_jobs)
    poison = random.sample(range(n_jobs // 3, n_jobs), n_crash + n_break)
    for at in poison[:n_crash]:
        kinds[at] = "crash"
    for at in poison[n_crash:]:
        kinds[at] = "break"
    jobs = [_draw(random, mix, index, kind, n_agents) for index, kind in enumerate(kinds)]
    return related(random, jobs, mix.shares, mix.long)


def _draw(random: Random, mix: Mix, index: int, kind: str, n_agents: int) -> PlannedJob:  # noqa: PLR0912
    number = random.randrange(n_agents)
    # Most agents use `append` turns, some `full` ones, some both.
    contexts: Sequence[str] = ("append", "append", "append", "full", "mixed")
    context = contexts[number % len(contexts)]
    if context == "mixed":
        context = random.choice(("append", "append", "full"))
    options: dict[str, Any] = {"job_timeout": 120}
    if random.random() < 0.05:
        options["at_front"] = True
    values: dict[str, Any] = {
        "index": index,
        "agent": f"agent {number}",
        "queue": random.choices(QUEUES, (3, 2))[0],
        "context": context,
        "cache": "readwrite",
        "max_tokens": random.choice(mix.short),
        "options": options,
    }
    lines = " ".join(random.choices(mix.words, k=random.randrange(1, mix.most_words)))
    last = "go on"
    match kind:
        case "say":
            last = f"say answer {index}"
        case "long":
            values["max_tokens"] = random.choice(mix.long)
        case "fail":
            last = f"fail number {index}"
            values["ends"] = frozenset({"failed"})
            options["retry"] = random.choice((None, Retry(max=2), Retry(max=2, interval=[0, 1])))
        case "flaky":
            values["flaky"] = random.randrange(1, 3)
            options["retry"] = random.choice((Retry(max=2), Retry(max=2, interval=1)))
        case "late":
            values["max_tokens"] = mix.endless
            values["ends"] = frozenset({"failed", "finished"} if mix.may_end_early else {"failed"})
            options["job_timeout"] = 1
        case "crash":
            last, values["ends"], values["is_poison"] = "crash", frozenset({"failed"}), True
            values["queue"] = QUEUES[-1]  # agents of the other queues have work meanwhile
        case "break":
            last, values["ends"], values["is_poison"] = f"break {index}", frozenset({"failed"}), True
        case "canceled":
            values["withdraw"] = random.choice(("cancel", "ticket", "delete"))
            if values["withdraw"] != "ticket":  # RQ's own would also mark a job that just ended
                values["max_tokens"] = mix.endless
        case "withdrawn":
            values["max_tokens"] = mix.endless
            values |= {"withdraw": random.choice(("cancel", "ticket", "stop", "delete")), "withdraw_when": "started"}
        case "short-lived":
            options["ttl"], values["short_lived"] = 2, True
        case "scheduled":
            values["delay_s"] = random.uniform(0, 3)
        case "question":
            values |= {"cache": "read"}
        case "off":
            values |= {"cache": "off", "context": "full"}
        case "nobody":
            values |= {"agent": None, "cache": random.choice(("readwrite", "off")), "context": "full"}
    return PlannedJob(prompt=f"\n[{index}] {lines}\n{last}", **values)
