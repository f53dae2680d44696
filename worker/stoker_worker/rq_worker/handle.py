"""What the queue adapter keeps of a claimed job. Owns nothing."""

from dataclasses import dataclass

from rq.executions import Execution

from stoker_worker.rq_worker.json_job import JsonJob


@dataclass(frozen=True)
class RqHandle:
    """`ClaimedJob.handle`: RQ's own records of the job and of this execution of it."""

    job: JsonJob
    execution: Execution
