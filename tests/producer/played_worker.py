"""Plays the worker: ends jobs through RQ's own code, so that Redis holds what a real worker would have written."""

import json
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from redis import Redis
from rq.exceptions import NoSuchJobError
from rq.job import Job, JobStatus, Retry
from rq.queue import Queue
from rq.results import Result
from rq.serializers import JSONSerializer

from stoker_shared.wire import (
    DEFAULT_QUEUE,
    LEASE_KEY,
    MEMBERS_KEY,
    META_PARTIAL,
    META_PROGRESS,
    SERVED_KEY,
    WORKER_KEY,
)

WORKER = "played"


def result_fields(job_id: str, text: str = "hello") -> dict[str, object]:
    return {
        "job_id": job_id,
        "agent_id": "a",
        "text": text,
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 2},
        "cache": {"source": "disk", "agent_version": 1, "saved": True},
        "timing": {"queued_s": 0.0, "prefill_s": 0.1, "first_token_s": 0.1, "decode_s": 0.1, "total_s": 0.2},
        "model": "scripted",
    }


def end(connection: Redis, job_id: str, text: str = "hello") -> None:
    """Write only the end of a job: quickly, with two commands that no waiting producer sends."""
    value = b64encode(json.dumps(result_fields(job_id, text)).encode())
    with connection.pipeline() as pipeline:
        pipeline.hset(Job.key_for(job_id), "status", "finished")
        pipeline.xadd(Result.get_key(job_id), {"type": 1, "return_value": value})
        pipeline.execute()


def publish(connection: Redis, name: str, *queues: str, **record: object) -> None:
    """All that a live worker keeps in Redis: its record, with these fields, its lease and its queues."""
    said = {"queues": queues, "model": "m", "context_tokens": 9, "mode": "in rows", "host": "mac", "pid": 7}
    connection.sadd("rq:workers", f"rq:worker:{name}")
    connection.set(WORKER_KEY.format(name=name), json.dumps({**said, "started_at": 1.0, **record}))
    lease = json.dumps({"worker": name, "queues": queues, "fence": 5})
    connection.set(LEASE_KEY.format(member=name), lease)
    connection.hset(MEMBERS_KEY, name, lease)
    for queue in queues:
        connection.set(SERVED_KEY.format(queue=queue), name)


class PlayedWorker:
    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        connection.set(SERVED_KEY.format(queue=DEFAULT_QUEUE), "played")

    def job(self, job_id: str) -> Job:
        return Job.fetch(job_id, connection=self._connection, serializer=JSONSerializer)

    def start(self, job_id: str, tokens: int | None = None) -> None:
        job = self.job(job_id)
        with self._connection.pipeline() as pipeline:
            pipeline.lrem(self._queue(job).key, 1, job_id)
            job.prepare_for_execution(WORKER, pipeline=pipeline)
            pipeline.execute()
        if tokens is not None:
            job.meta[META_PROGRESS] = {"stage": "decode", "tokens": tokens, "tokens_per_s": 8.5}
            job.save_meta()

    def finish(self, job_id: str, value: object = None, text: str = "hello") -> None:
        job = self.job(job_id)
        job._result = result_fields(job_id, text) if value is None else value
        with self._connection.pipeline() as pipeline:
            pipeline.lrem(self._queue(job).key, 1, job_id)
            job._handle_success(job.result_ttl, pipeline=pipeline, worker_name=WORKER)
            job.cleanup(job.result_ttl, pipeline=pipeline, remove_from_queue=False)
            pipeline.execute()

    def fail(
        self, job_id: str, exc_string: str, partial: str | None = None, status: JobStatus = JobStatus.FAILED
    ) -> None:
        job = self.job(job_id)
        if partial is not None:
            job.meta[META_PARTIAL] = partial
            job.save_meta()
        with self._connection.pipeline() as pipeline:
            pipeline.lrem(self._queue(job).key, 1, job_id)
            job.set_status(status, pipeline=pipeline)
            job._handle_failure(exc_string, pipeline=pipeline, worker_name=WORKER)
            pipeline.execute()

    def stop(self, job_id: str) -> None:
        self.fail(job_id, "JobStopped: stopped on request", status=JobStatus.STOPPED)

    def retry(self, job_id: str) -> None:
        """As RQ does when a task returns `Retry`: write an entry to the result stream that is not the job's end."""
        job = self.job(job_id)
        with self._connection.pipeline() as pipeline:
            job._handle_retry_result(
                self._queue(job), pipeline, Retry(max=1), "e", job.created_at, job.created_at, WORKER
            )
            pipeline.execute()

    def _queue(self, job: Job) -> Queue:
        return Queue(job.origin or DEFAULT_QUEUE, connection=self._connection, serializer=JSONSerializer)


@contextmanager
def playing(connection: Redis, answer: Callable[[str], object]) -> Iterator[None]:
    """Calls `answer` with the id of each job that waits, again and again, in a thread of its own."""
    stop = threading.Event()

    def play() -> None:
        while not stop.wait(0.005):
            for job_id in connection.lrange(f"rq:queue:{DEFAULT_QUEUE}", 0, -1):
                with suppress(NoSuchJobError):  # it was taken out just now
                    answer(job_id.decode())

    thread = threading.Thread(target=play)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
