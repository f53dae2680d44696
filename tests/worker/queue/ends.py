"""Ends jobs as the finisher does: the end, then the release. An end that raises leaves the job in flight."""

from collections.abc import Mapping, Sequence
from typing import Any

from stoker_worker.ports import ClaimedJob


def finish(job: ClaimedJob, result: Mapping[str, Any]) -> None:
    job.finish(result)
    job.release()


def fail(job: ClaimedJob, error: Exception, partial_text: str | None = None, *, may_retry: bool = True) -> None:
    job.fail(error, partial_text, may_retry=may_retry)
    job.release()


def stop(job: ClaimedJob) -> None:
    job.stop()
    job.release()


def drop(job: ClaimedJob) -> None:
    try:
        job.drop()
    finally:
        job.release()


def give_back(jobs: Sequence[ClaimedJob], *, counts_as_attempt: bool, alone: bool = False) -> int:
    """Return how many were given back. Each goes to the very front, so the first job goes last."""
    given_back = 0
    for job in reversed(jobs):
        try:
            given_back += job.give_back(counts_as_attempt=counts_as_attempt, alone=alone)
        finally:
            job.release()
    return given_back
