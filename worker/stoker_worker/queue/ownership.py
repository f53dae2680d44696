"""Decides whether a run is still this worker's, and ends it in one step while it is. Owns no state; any thread.

A run is not ours any more if this worker has ended it and the reply was lost, if another worker recovered it, or if it
was canceled or deleted. If a job with the same id was written over it, the run goes on and the hash is put right if
that is the same delivery; else the new job is left untouched. An end is a list of commands, recorded as RQ's own code
issues them. One script checks the ownership and carries them out, so nothing can come between.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from redis import Redis
from redis.exceptions import ResponseError
from rq.queue import Queue
from rq.utils import now, str_to_date, utcformat

from stoker_shared.errors import JobLost, OwnershipLost
from stoker_shared.job_data import unpacked
from stoker_shared.wire import FIELD_SAVING
from stoker_worker.queue.client import lua
from stoker_worker.queue.json_job import MOST_BYTES, OF_THE_RUN, JobRun, JsonJob, delivery_stamp, hash_of
from stoker_worker.queue.lease import Lease

_WITHDRAWN: Final = (b"canceled", b"stopped")
_LOOKS: Final = 30  # the job may be written again between a look and the repair

State = Literal["ours", "ended", "lost"]
Commands = Sequence[Sequence[Any]]


@dataclass(frozen=True)
class RunEnd:
    """An end of a run.

    Attributes:
        commands: makes the commands; called again if `meta` has changed. The server may refuse the first one.
        sets_free: enqueue the jobs that wait for such an end.
        kept_s: the new lifetime of the set of jobs that still wait; ``None``: unchanged.
    """

    commands: Callable[[], Commands]
    sets_free: Literal["finished", "failed", ""] = ""
    kept_s: int | None = None


_NO_END: Final = RunEnd(tuple)


class Ownership:
    """Checks whether runs are ours, ends those that are, and clears up after the others. `member`: this worker's."""

    def __init__(self, connection: Redis, lease: Lease) -> None:
        self.member = lease.member
        self._connection = connection
        self.lease = lease
        self._end = connection.register_script(lua("holds", "count", "run", "enqueue", "set_free", "rewritten", "end"))
        self._put_right = connection.register_script(lua("holds", "delivery", "rewritten", "put_right"))
        self._let_go = connection.register_script(lua("holds", "let_go"))

    def of(self, run: JobRun, *, saves: bool = False) -> State:
        """The state of a run; ``ended``: by this worker. Takes an expired lease again, as `Lease.renew` does.

        Args:
            saves: if it is ours, note that its turn is being saved: it is not canceled any more.
        """
        if saves:
            run.job.has_run_fields = True
        return self._asked(run, _NO_END, FIELD_SAVING if saves else "")

    def end(self, run: JobRun, end: RunEnd) -> None:
        """End a run, unless this worker has ended it before.

        Raises:
            OwnershipLost: the run is not ours (any more).
            RedisError: it may have ended or not; another call finds out. After a refusal nothing has changed.
        """
        if self._asked(run, end, "") == "lost":
            raise OwnershipLost(f"job {run.job.id} is no longer this worker's, or has ended already")

    def _asked(self, run: JobRun, end: RunEnd, field: str) -> State:
        job = run.job
        keys = [*self._keys(run), job.dependents_key]
        started_at = utcformat(job.started_at) if job.started_at else ""
        about = [*self.lease.args, job.id, self.lease.worker_name, started_at, field]
        for _ in range(_LOOKS):
            meta = job.raw_meta  # the fetcher may show progress meanwhile
            words = [word for command in end.commands() for word in (len(command), *command)]
            kept_s = "" if end.kept_s is None else end.kept_s
            args = [*about, meta, MOST_BYTES, end.sets_free, kept_s, utcformat(now()), *words]
            reply = self._end(keys=keys, args=args)
            if isinstance(reply, list):
                job.raw_meta = reply[1]
                continue
            if (found := reply.decode()) != "enqueued":
                return cast(State, found)
            if not self._goes_on(run):
                break
        return "lost"

    def refuse_if_lost(self, run: JobRun, claim_number: int) -> None:
        """Raise `JobLost` if a run is not ours any more because Redis has lost it, not because it was withdrawn."""
        self.lease.renew()  # nobody may have noticed the loss yet
        if not self.lease.lost_data.had_in_flight(claim_number):
            return
        with suppress(ResponseError):  # the key is no hash
            if self._connection.hget(run.job.key, "status") in _WITHDRAWN:
                return
        raise JobLost("Redis has lost data, and with it this run of the job; nothing of it is kept")

    def let_go(self, run: JobRun) -> None:
        """Remove the rest of a run that is not ours any more; the job's own state is left as it is."""
        about = [run.execution.composite_key, run.execution.id, *OF_THE_RUN]
        self._let_go(keys=[*self.lease.keys, *run.keys], args=[*self.lease.args, *about])

    def _keys(self, run: JobRun) -> list[str]:
        return [*self.lease.keys, run.job.key, run.execution.key]

    def _goes_on(self, run: JobRun) -> bool:
        """Put right the hash of a job that was enqueued again; ``False`` if that is another delivery."""
        rq_job = run.job
        names = ("created_at", "data", "origin")
        fields = cast(list[bytes | None], self._connection.hmget(rq_job.key, names))
        created_at, data, origin = (value or b"" for value in fields)
        if not _is_delivery_of(rq_job, created_at, data):
            return False
        queues = {rq_job.origin, origin.decode(errors="replace") or rq_job.origin}
        keys = [*self._keys(run), *(Queue(name, connection=self._connection).key for name in sorted(queues))]
        started_at = utcformat(rq_job.started_at) if rq_job.started_at else ""
        written = [delivery_stamp(created_at, data), rq_job.origin, self.lease.worker_name, started_at]
        self._put_right(keys=keys, args=[*self.lease.args, "", rq_job.id, *written])
        return True


def _is_delivery_of(rq_job: JsonJob, created_at: bytes, data: bytes) -> bool:
    """True if the hash has this delivery. Bytes may differ if a client of RQ's has rewritten the job: it compresses the
    data, and has its own form of times."""
    if hash_of(unpacked(data)) != rq_job.data_hash:
        return False
    written = rq_job.raw_created_at
    if created_at == written.encode(errors="replace"):
        return True
    try:
        return str_to_date(created_at) == str_to_date(written.encode())
    except ValueError:
        return False
