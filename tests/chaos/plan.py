"""What a chaos run enqueues: jobs drawn from one seed, and what may become of each. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from rq import Retry

QUEUES = ("high", "low")


@dataclass(frozen=True)
class PlannedJob:
    """One job.

    Attributes:
        options: RQ's, for `Queue.enqueue`.
        ends: the states it may end in when nobody withdraws it.
        short_lived: it may expire in the queue, by its own ttl.
        withdraw: what is done to it: ``cancel`` and ``delete`` (RQ's own), ``ticket`` (ours), ``stop`` (command).
        withdraw_when: while it is ``queued`` or once it is ``started``.
        delay_s: for `enqueue_in`; ``None`` for at once.
    """

    index: int
    agent: str
    queue: str
    context: str
    cache: str
    prompt: str
    max_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    ends: frozenset[str] = frozenset({"finished"})
    withdraw: str | None = None
    withdraw_when: str = "queued"
    delay_s: float | None = None
    flaky: int = 0
    short_lived: bool = False
    is_poison: bool = False

    @property
    def job_id(self) -> str:
        return f"job-{self.index:05}"

    @property
    def keeps_order(self) -> bool:
        """Whether docs/lifecycle.md gives it a place in the order of its agent's jobs in its queue.

        It does not where the job goes to the front, or to the end once more.
        """
        retry = self.options.get("retry")
        return not (self.options.get("at_front") or self.delay_s is not None or (retry and any(retry.intervals)))

    @property
    def request(self) -> dict[str, Any]:
        metadata = {"job": self.job_id} | ({"flaky": str(self.flaky)} if self.flaky else {})
        return {
            "agent_id": self.agent,
            "prompt": self.prompt,
            "context": self.context,
            "cache": self.cache,
            "max_tokens": self.max_tokens,
            "metadata": metadata,
        }


@dataclass(frozen=True)
class Mix:
    """What the jobs of a run are like.

    Attributes:
        kinds: how often each is drawn.
        words: what prompts are made of; of those up to `most_words`.
        short, long: ranges of `max_tokens`.
        endless: `max_tokens` of a job that somebody or its timeout ends.
        may_end_early: whether such a job may finish all the same, because the model has nothing more to say.
    """

    kinds: Mapping[str, int]
    words: Sequence[str]
    most_words: int
    short: range
    long: range
    endless: int
    may_end_early: bool = False


SCRIPTED = Mix(
    kinds={
        "words": 46, "say": 14, "long": 8, "fail": 5, "flaky": 7, "late": 3,
        "canceled": 5, "withdrawn": 6, "short-lived": 2, "scheduled": 3, "question": 2, "off": 2,
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
    """The jobs in the order they are enqueued. `n_crash` of them kill their worker, `n_break` its engine."""
    kinds = random.choices(list(mix.kinds), list(mix.kinds.values()), k=n_jobs)
    poison = random.sample(range(n_jobs), n_crash + n_break)
    for at in poison[:n_crash]:
        kinds[at] = "crash"
    for at in poison[n_crash:]:
        kinds[at] = "break"
    return [_draw(random, mix, index, kind, n_agents) for index, kind in enumerate(kinds)]


def _draw(random: Random, mix: Mix, index: int, kind: str, n_agents: int) -> PlannedJob:  # noqa: PLR0912
    number = random.randrange(n_agents)
    # Most agents talk in `append` turns, some in `full` ones, some mix them.
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
        "queue": random.choice(QUEUES),
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
        case "break":
            last, values["ends"], values["is_poison"] = f"break {index}", frozenset({"failed"}), True
        case "canceled":
            values["withdraw"] = random.choice(("cancel", "ticket", "delete"))
            if values["withdraw"] != "ticket":  # RQ's own would mark a job that just ended, too
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
    return PlannedJob(prompt=f"\n[{index}] {lines}\n{last}", **values)
