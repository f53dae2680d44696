"""Sends one delivery to Redis, through RQ's own queue or the producer. Owns no thread."""

import datetime

from redis import Redis
from rq import Queue
from rq.job import Dependency, Job
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat, utcparse
from tests.chaos.deliveries import UNKNOWN, Delivery
from tests.chaos.plan import PlannedJob

from stoker import Producer
from stoker_shared.wire import TASK_PATH


class Enqueuer:
    def __init__(self, connection: Redis, producer: Producer) -> None:
        self._connection = connection
        self._producer = producer

    def send(self, delivery: Delivery, *, is_new: bool) -> None:
        """
        Args:
            is_new: no job has this id yet.
        """
        delivery.met.append(None if is_new and not delivery.met else UNKNOWN)  # until the answer comes
        if delivery.job.is_submitted:
            self._submit(delivery)
        elif delivery.job.delay_s is not None:
            self._schedule(delivery)
        elif delivery.job.parents:
            self._queue(delivery.job).enqueue_job(self._rq_job(delivery))
        else:
            self._enqueue(delivery)
        delivery.is_acknowledged = True

    def _submit(self, delivery: Delivery) -> None:
        job = delivery.job
        timeout_s, at_front = job.options["job_timeout"], bool(job.options.get("at_front"))
        if job.index % 2 and not at_front:
            self._producer.submit_many([job.request], queue=job.queue, job_timeout_s=timeout_s, job_ids=[job.job_id])
        else:
            options = {"queue": job.queue, "job_timeout_s": timeout_s, "at_front": at_front}
            self._producer.submit(**job.request, **options, job_id=job.job_id)

    def _schedule(self, delivery: Delivery) -> None:
        job = delivery.job
        assert job.delay_s is not None
        self._queue(job).schedule_job(self._rq_job(delivery), now() + datetime.timedelta(seconds=job.delay_s))

    def _enqueue(self, delivery: Delivery) -> None:
        """Enqueue in one transaction that also reads the state of the job that has the id."""
        rq_job = self._rq_job(delivery)
        with self._connection.pipeline() as pipeline:
            pipeline.multi()
            pipeline.hget(rq_job.key, "status")
            at_front = bool(delivery.job.options.get("at_front"))
            self._queue(delivery.job).enqueue_job(rq_job, pipeline=pipeline, at_front=at_front)
            [met, *_] = pipeline.execute()
        delivery.met[-1] = met and met.decode()

    def _rq_job(self, delivery: Delivery) -> Job:
        """A new object for each send: RQ writes into the job it enqueues."""
        job = delivery.job
        options = {name: value for name, value in job.options.items() if name not in {"at_front", "job_timeout"}}
        if job.parents:
            options["depends_on"] = Dependency(jobs=list(job.parents), allow_failure=job.allow_failure)
        rq_job = self._queue(job).create_job(
            TASK_PATH,
            kwargs={"request": job.request},
            job_id=job.job_id,
            description="chaos",
            timeout=job.options["job_timeout"],
            **options,
        )
        if delivery.created_at is None:
            delivery.created_at = utcformat(rq_job.created_at)
        else:
            rq_job.created_at = utcparse(delivery.created_at)
        return rq_job

    def _queue(self, job: PlannedJob) -> Queue:
        return Queue(job.queue, connection=self._connection, serializer=JSONSerializer)
