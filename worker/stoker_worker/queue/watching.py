"""Looks at the jobs in flight: who was withdrawn, who has a new reader; and shows how far they are. Fetcher thread.

Owns no state. One look costs the same few round trips, however many jobs there are.
"""

from collections.abc import Mapping
from typing import Final

from redis import Redis
from rq.job import JobStatus

from stoker_worker.ports import SequenceProgress
from stoker_worker.queue.claimed_job import QueueParts, RqClaimedJob

_LOADING: Final = SequenceProgress("loading")


def look(connection: Redis, parts: QueueParts, progress: Mapping[str, SequenceProgress]) -> list[RqClaimedJob]:
    """The jobs that were withdrawn. As `QueuePort.withdrawn`."""
    jobs = parts.in_flight.snapshot()
    started, runs = JobStatus.STARTED.value.encode(), []
    with connection.pipeline(transaction=False) as pipeline:
        for job in jobs:
            parts.progress.look(pipeline, job.run)
        found = pipeline.execute(raise_on_error=False)
        for job, fields in zip(jobs, found, strict=True):
            # A job whose key is no hash any more was withdrawn as well.
            status, listened_to, meta = (None,) * 3 if isinstance(fields, Exception) else fields
            runs.append(status == started)
            if status == started and listened_to is not None:
                parts.streams.open(job.claim_number, job.run)
            if status == started and meta is not None:
                parts.progress.note(pipeline, job.run, meta, progress.get(job.job_id, _LOADING))
        pipeline.execute()
    for job in jobs:
        if parts.in_flight.get(job.job_id) is not job:  # released meanwhile, perhaps before its stream was opened
            parts.streams.close(job.claim_number, ended=False)
    return [
        job
        for job, still_runs in zip(jobs, runs, strict=True)
        if parts.stop_requests.is_asked(job.job_id) or (not still_runs and parts.ownership.of(job.run) != "ours")
    ]
