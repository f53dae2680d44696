"""Withdraws a job the way its plan names: RQ's own ways and ours. Owns no thread."""

from redis import Redis
from redis.exceptions import RedisError
from rq.command import send_stop_job_command
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer
from tests.chaos.deliveries import ENDED
from tests.chaos.plan import PlannedJob

from stoker import Producer
from stoker_shared.errors import JobNotFound, RedisUnavailable


class Withdrawal:
    def __init__(self, connection: Redis, producer: Producer) -> None:
        self._connection = connection
        self._producer = producer

    def has_come_to_its_end(self, job: PlannedJob) -> bool:
        """Otherwise withdraw it, if it is time; a stop command may be lost together with its worker."""
        try:
            rq_job = Job.fetch(job.job_id, self._connection, JSONSerializer)
            state = rq_job.get_status(refresh=False)
            if state in ENDED:
                return True
            if job.withdraw_when != "started" or state == "started":
                self._withdraw(job, rq_job, is_started=state == "started")
        except (NoSuchJobError, JobNotFound):
            return True
        except (InvalidJobOperation, RedisError, RedisUnavailable, OSError):
            pass
        return False

    def _withdraw(self, job: PlannedJob, rq_job: Job, *, is_started: bool) -> None:
        match job.withdraw:
            case "ticket":
                self._producer.cancel(job.job_id)
            case "cancel":
                rq_job.cancel()
            case "delete":
                rq_job.delete()
            case "stop" if is_started and rq_job.worker_name:
                send_stop_job_command(self._connection, job.job_id, serializer=JSONSerializer)
