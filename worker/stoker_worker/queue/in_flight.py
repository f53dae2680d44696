"""The jobs that this worker has in flight. Owns this table, the only one, and RQ's stop commands for them; any thread.

The queue adds a job once it is claimed and started, and a finisher thread removes it when it is released. Stages read
snapshots.
"""

import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

from stoker_worker.ports import ClaimedJob

J = TypeVar("J", bound=ClaimedJob)


class JobsInFlight(Generic[J]):
    """Jobs by id, in the order in which they were claimed. A stop command for any other id is ignored: a later job of
    that id must not be stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, J] = {}
        self._released = threading.Event()
        self._starting: set[str] = set()
        self._to_stop: set[str] = set()

    def starting(self, job_id: str) -> None:
        """Accept stop commands for this id from now on, although its job is not in flight yet."""
        with self._lock:
            self._starting.add(job_id)

    def all_started(self) -> None:
        """End `starting`: the ids that are not in flight by now will not be. Their stop commands are dropped."""
        with self._lock:
            self._to_stop &= self._jobs.keys()
            self._starting.clear()

    def add(self, job: J) -> None:
        with self._lock:
            self._jobs[job.job_id] = job

    def remove(self, job: J) -> None:
        with self._lock:
            if self._jobs.get(job.job_id) is job:  # its id may have been enqueued again, and claimed since
                del self._jobs[job.job_id]
                self._to_stop.discard(job.job_id)
        self._released.set()

    def get(self, job_id: str) -> J | None:
        return self._jobs.get(job_id)

    def snapshot(self) -> tuple[J, ...]:
        with self._lock:
            return tuple(self._jobs.values())

    def wait_for_release(self, timeout_s: float) -> bool:
        """See `QueuePort.wait_for_release`. One thread at a time."""
        if not self._released.wait(timeout_s):
            return False
        self._released.clear()
        return True

    def ask_to_stop(self, job_id: str) -> None:
        with self._lock:
            if job_id in self._jobs or job_id in self._starting:
                self._to_stop.add(job_id)

    def is_to_stop(self, job_id: str) -> bool:
        return job_id in self._to_stop

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._jobs

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter(tuple(self._jobs))

    def __len__(self) -> int:
        return len(self._jobs)
