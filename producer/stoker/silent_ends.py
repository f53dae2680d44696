"""Finds jobs that ended without a result entry, because they are gone or canceled. Keeps no state."""

from typing import Any, Final

from rq.job import Job
from rq.registry import CanceledJobRegistry

from stoker.operations import Commands, Operation
from stoker.rq_keys import registry_key

_KEYS_PER_COMMAND: Final = 500


def gone_of(job_ids: list[str]) -> Operation[list[str]]:
    """The ids of jobs that do not exist. EXISTS only counts, so a group with missing jobs is split and asked again."""
    gone: list[str] = []
    parts = parts_of(job_ids, _KEYS_PER_COMMAND)
    while parts:
        counts: list[Any] = yield Commands([("EXISTS", *map(Job.key_for, part)) for part in parts])
        smaller: list[list[str]] = []
        for part, count in zip(parts, counts, strict=True):
            if count == 0:
                gone += part
            elif count < len(part):
                smaller += parts_of(part, max(1, len(part) // 8))
        parts = smaller
    return gone


def canceled_of(queue: str, job_ids: list[str]) -> Operation[list[str]]:
    """The ids that are in the queue's registry of canceled jobs."""
    key = registry_key(CanceledJobRegistry, queue)
    parts = parts_of(job_ids, _KEYS_PER_COMMAND)
    scores = yield Commands([("ZMSCORE", key, *part) for part in parts])
    return [
        job_id
        for part, found in zip(parts, scores, strict=True)
        for job_id, score in zip(part, found, strict=True)
        if score is not None
    ]


def parts_of(items: list[str], size: int) -> list[list[str]]:
    """The items in lists of at most `size`."""
    return [items[at : at + size] for at in range(0, len(items), size)]
