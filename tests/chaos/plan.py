"""The jobs of a chaos run, drawn from one seed, with their relations and how they may end. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from rq import Retry

QUEUES = ("high", "low")


@dataclass(frozen=True)
class Again:
    """The id of a job, enqueued once more.

    Attributes:
        when: the job's state at that time, if it gets that far: ``queued``, ``started`` or ``ended``.
        job: the second request: the same, or another.
        same_moment: it has the first one's `created_at`. The same request is then the same delivery.
    """

    when: str
    job: "PlannedJob"
    same_moment: bool


@dataclass(frozen=True)
class PlannedJob:
    """One job.

    Attributes:
        agent: ``None`` for a job without one.
        options: RQ's, for `Queue.enqueue`.
        ends: the states it may end in if it is not withdrawn.
        short_lived: its own ttl may expire in the queue.
        withdraw: the way it is withdrawn: ``cancel`` and ``delete`` (RQ's own), ``ticket`` (ours), ``stop`` (command).
        withdraw_when: while it is ``queued`` or once it is ``started``.
        delay_s: for `enqueue_in`; ``None`` for at once.
        again: the second use of its id.
        reuses: the index of the job whose id this one has.
        parents: ids of the jobs it depends on.
        is_submitted: enqueued by `Producer.submit`, otherwise by RQ's own queue.
    """

    index: int
    agent: str | None
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
    again: Again | None = None
    reuses: int | None = None
    parents: tuple[str, ...] = ()
    allow_failure: bool = False
    is_submitted: bool = False

    @property
    def name(self) -> str:
        """The name of the request: the result returns it."""
        return f"job-{self.index:05}"

    @property
    def job_id(self) -> str:
        return self.name if self.reuses is None else f"job-{self.reuses:05}"

    @property
    def keeps_order(self) -> bool:
        """Whether docs/lifecycle.md gives it a place in the order of its agent's jobs in its queue.

        It does not where the job goes to the front, or to the end once more, or its id has a place already.
        """
        retry = self.options.get("retry")
        if self.again or self.reuses is not None or self.parents:
            return False
        return not (self.options.get("at_front") or self.delay_s is not None or (retry and any(retry.intervals)))

    @property
    def request(self) -> dict[str, Any]:
        metadata = {"job": self.name} | ({"flaky": str(self.flaky)} if self.flaky else {})
        return {
            "agent_id": self.agent,
            "prompt": self.prompt,
            "context": self.context,
            "cache": self.cache,
            "max_tokens": self.max_tokens,
            "metadata": metadata,
        }


_MOST_PARENTS = 3
_PARENTS_AMONG = 20  # the jobs enqueued just before
_FATEFUL = 4  # how much likelier a parent is if it may not finish
_POISON = 40


@dataclass(frozen=True)
class Shares:
    """The shares of jobs whose id is used twice, that depend on others, and that the producer submits.

    Attributes:
        fails: the share of second requests that fail, among those that differ, if the engine can be told to fail.
    """

    again: float = 0.12
    fails: float = 0.2
    dependent: float = 0.12
    submitted: float = 0.12


def related(random: Random, jobs: Sequence[PlannedJob], shares: Shares, long: range) -> list[PlannedJob]:
    """Return the same jobs, some of them with relations."""
    done: list[PlannedJob] = []
    for job in jobs:
        chance = random.random()
        parents = _parents(random, done[-_PARENTS_AMONG:])
        if not _is_plain(job):
            done.append(job)
        elif chance < shares.again and job.cache == "readwrite" and job.ends == {"finished"}:
            done.append(_again(random, job, len(jobs) + len(done), shares.fails, long))
        elif shares.again <= chance < shares.again + shares.dependent and parents:
            done.append(replace(job, parents=parents, allow_failure=random.random() < 0.5))
        elif chance > 1 - shares.submitted and "retry" not in job.options:
            done.append(replace(job, is_submitted=True))
        else:
            done.append(job)
    return done


def _is_plain(job: PlannedJob) -> bool:
    """Whether it simply runs, at once and once."""
    has_fate = job.withdraw or job.short_lived or job.is_poison or job.flaky or job.delay_s is not None
    return not has_fate and job.options["job_timeout"] > 1


def _parents(random: Random, before: Sequence[PlannedJob]) -> tuple[str, ...]:
    """Without jobs whose hash may go before they end: RQ never looks at their dependents again."""
    fit = [job for job in before if not (job.short_lived or job.withdraw == "delete")]
    weights = [_POISON if job.is_poison else _FATEFUL if job.withdraw or "failed" in job.ends else 1 for job in fit]
    chosen = random.choices(fit, weights, k=random.randrange(1, _MOST_PARENTS + 1)) if fit else []
    return tuple(dict.fromkeys(job.job_id for job in chosen))


def _again(random: Random, job: PlannedJob, index: int, fails: float, long: range) -> PlannedJob:
    when = random.choice(("queued", "started", "ended"))
    if when == "started":
        job = replace(job, max_tokens=random.choice(long), prompt=job.prompt.rpartition("\n")[0] + "\ngo on")
    if random.random() < 0.5:
        same = replace(job, reuses=job.index)
        return replace(job, again=Again(when, same, same_moment=random.random() < 0.6))
    last, ends = (f"fail number {index}", {"failed"}) if random.random() < fails else ("go on", {"finished"})
    other = replace(
        job,
        index=index,
        reuses=job.index,
        agent=job.agent if job.agent is None or random.random() < 0.6 else job.agent + " other",
        prompt=f"\n[{index}] another\n{last}",
        ends=frozenset(ends),
        max_tokens=random.randrange(4, 20),
    )
    return replace(job, again=Again(when, other, same_moment=random.random() < 0.2))


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
