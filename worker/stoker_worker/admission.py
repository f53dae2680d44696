"""Which job may be in flight. Pure policy, no I/O; inbox thread."""

from collections.abc import Iterable

from stoker_worker.ports import Busy, ClaimedJob


class Admission:
    """At most `max_in_flight` jobs, and beside one that writes an agent's memory none that uses it: they need what it
    leaves."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._jobs: dict[str, ClaimedJob] = {}

    @property
    def room(self) -> int:
        return self._max_in_flight - len(self._jobs)

    @property
    def busy(self) -> Busy:
        return Busy().beside(job.memory_use for job in self._jobs.values())

    @property
    def jobs(self) -> list[ClaimedJob]:
        """In the order they were admitted."""
        return list(self._jobs.values())

    def admit(self, jobs: Iterable[ClaimedJob]) -> None:
        self._jobs.update((job.job_id, job) for job in jobs)

    def release(self, job: ClaimedJob) -> None:
        if self._jobs.get(job.job_id) is job:  # its id may have been enqueued again, and admitted since
            del self._jobs[job.job_id]
