"""The counts of verdicts in Redis: reads them, adds a later verdict on one job, removes them. Operations only.

Workers add the verdicts of checks (`TRUST_KEY`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rq.job import Job

from stoker.operations import Command, Operation, Watched, ask, undisturbed
from stoker_shared.errors import InvalidRequest, JobNotFound
from stoker_shared.result import GenerationResult
from stoker_shared.trust import MOST_PAIRS, Counts, field_of, model_and_task
from stoker_shared.wire import FIELD_FEEDBACK, TRUST_KEY


@dataclass(frozen=True)
class Trusted:
    """The counts of one model in one class of tasks."""

    model: str
    task: str
    counts: Counts

    def as_json(self) -> dict[str, Any]:
        counts = self.counts
        shown = {"accepted": counts.accepted, "rejected": counts.rejected, "rate": counts.rate}
        rounded = {name: round(value, 4) for name, value in {**shown, "at_least": counts.lower_bound()}.items()}
        return {"model": self.model, "task": self.task, **rounded}


def read_trust() -> Operation[list[Trusted]]:
    """All counts, sorted by class and model."""
    found = yield from ask("HGETALL", TRUST_KEY)
    known = []
    for field, value in found.items():
        model, task = model_and_task(field.decode(errors="replace"))
        known.append(Trusted(model, task, Counts.parsed(value)))
    return sorted(known, key=lambda trusted: (trusted.task, trusted.model))


def forget_trust(of: Callable[[Trusted], bool]) -> Operation[int]:
    """Remove the counts for which `of` is true; returns their number."""
    known = yield from read_trust()
    fields = [field_of(trusted.model, trusted.task) for trusted in known if of(trusted)]
    return int((yield from ask("HDEL", TRUST_KEY, *fields))) if fields else 0


def give_feedback(result: GenerationResult, *, accepted: bool) -> Operation[bool]:
    """Count a later verdict on a result, once for a job. It replaces the verdict of the job's check. Returns ``False``
    if the opposite verdict was given before. Raises `InvalidRequest`: the job had no check, no route and no `task`, so
    its class is not known; `JobNotFound`: Redis no longer has the job."""
    if result.task is None:
        raise InvalidRequest("feedback: the job had none of 'task', 'check' and 'models', so its class is not known")
    key, field, word = Job.key_for(result.job_id), field_of(result.model, result.task), b" 1" if accepted else b" 0"

    def write(replies: list[Any]) -> Sequence[Command] | None:
        exists, (created_at, before), counts, n_pairs = replies
        if not exists:
            raise JobNotFound(result.job_id)
        if (before or b"").startswith((created_at or b"") + b" "):
            return None
        commands: list[Command] = [("HSET", key, FIELD_FEEDBACK, (created_at or b"") + word)]
        if counts is None and n_pairs >= MOST_PAIRS:
            return commands
        if result.accepted is None:
            commands.append(("HSET", TRUST_KEY, field, str(Counts.parsed(counts).after(accepted=accepted))))
        elif result.accepted != accepted:
            commands.append(("HSET", TRUST_KEY, field, str(Counts.parsed(counts).corrected(accepted=accepted))))
        return commands

    given = ("HMGET", key, "created_at", FIELD_FEEDBACK)
    reads: list[Command] = [("EXISTS", key), given, ("HGET", TRUST_KEY, field), ("HLEN", TRUST_KEY)]
    yield from undisturbed(Watched([key, TRUST_KEY], reads, write))
    created_at, found = yield from ask(*given)
    return bool(found == (created_at or b"") + word)
