"""Cancels one job: out of its queue while it waits, by RQ's stop command while it runs. Keeps no state."""

from redis import Redis
from redis.exceptions import WatchError
from rq.command import PUBSUB_CHANNEL_TEMPLATE, send_stop_job_command
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.job import Job, JobStatus, validate_job_id
from rq.serializers import JSONSerializer

from stoker.job_record import ENDED
from stoker_shared.errors import JobNotFound
from stoker_shared.wire import DEFAULT_FAILURE_TTL_S


def cancel_job(connection: Redis, job_id: str) -> bool:
    """Whether the job was canceled, or the worker that runs it was told to stop it; ``False`` when it had ended.

    Raises:
        JobNotFound: there is no such job, or RQ allows no such id (then it fails when a worker comes to it).
        redis.exceptions.RedisError: no server, or it refused.
    """
    try:
        validate_job_id(job_id)
    except ValueError as error:
        raise JobNotFound(job_id, f"RQ reads no such id: {error}") from None
    try:
        while True:
            job = Job.fetch(job_id, connection=connection, serializer=JSONSerializer)
            state = str(job.get_status(refresh=False).value)
            if state in ENDED:
                return False
            if state == JobStatus.STARTED.value and _somebody_listens(connection, job.worker_name):
                send_stop_job_command(connection, job_id, serializer=JSONSerializer)
                return True
            # A job whose worker is gone is canceled in Redis: a stop command to nobody would be lost.
            if _cancel_unless_changed(connection, job, state):
                return True
    except NoSuchJobError:
        raise JobNotFound(job_id, "not found (it never was, was deleted, or has expired)") from None


def _somebody_listens(connection: Redis, worker_name: str | None) -> bool:
    if not worker_name:
        return False
    [(_, listeners)] = connection.pubsub_numsub(PUBSUB_CHANNEL_TEMPLATE % worker_name)
    return bool(listeners)


def _cancel_unless_changed(connection: Redis, job: Job, state: str) -> bool:
    """RQ's cancel, but only of the state we saw: without the watch a job that just ended would be marked canceled."""
    if job.has_rate_limit:  # RQ does not cancel these inside another transaction
        job.cancel()
        return True
    with connection.pipeline(transaction=True) as pipeline:
        try:
            pipeline.watch(job.key)  # type: ignore[no-untyped-call]
            if pipeline.hget(job.key, "status") != state.encode():
                return False
            pipeline.multi()
            job.cancel(pipeline=pipeline)
            ttl_s = DEFAULT_FAILURE_TTL_S if job.failure_ttl is None else job.failure_ttl
            if ttl_s > 0:  # RQ keeps canceled jobs for ever, and a prompt is private
                pipeline.expire(job.key, ttl_s)
            pipeline.execute()
        except (WatchError, InvalidJobOperation):  # it moved on or vanished under us: look again
            return False
    return True
