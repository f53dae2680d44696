"""The relations between the jobs of a chaos run: ids used twice, dependencies. Pure.

The jobs that the producer submits are drawn here too: it takes neither dependencies nor an id with another request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from tests.chaos.plan import Again, PlannedJob

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
