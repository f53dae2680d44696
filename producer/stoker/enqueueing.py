"""Enqueues each job once: neither a lost reply nor a producer that repeats its call makes a second job. Keeps no state.

redis-py sends a transaction again when its reply is lost, and a packet can arrive long after its sender gave up. So the
transaction watches the job's key, and the server refuses it if the job has been made since. If in doubt, we check
whether the job is there and has the same request. The transaction also watches the jobs that the new one depends on: if
one of them ended unnoticed, the new job would wait for ever.
"""

from typing import Any, Final

from redis.exceptions import RedisError, WatchError
from rq.job import Job, JobStatus

from stoker.connection import LOST, REFUSED
from stoker.new_job import NewJob, make_queue_known, push
from stoker.operations import Command, Commands, Operation, Watched
from stoker_shared.agents import build_agent_request
from stoker_shared.errors import DuplicateJob, JobNotFound, StokerError
from stoker_shared.job_data import MAX_DATA_BYTES, read_json, unpacked
from stoker_shared.request import build_request, request_digest
from stoker_shared.wire import REQUEST_KWARG, TASK_PATH

_TRIES: Final = 5  # in each of them, redis-py tries several times too
_TRIES_OF_A_RACE: Final = 100  # a job that runs is written to twice a second, and this one may depend on it


def enqueue(queue: str, jobs: list[NewJob], *, at_front: bool, ids_are_new: bool) -> Operation[None]:
    """Enqueue those of `jobs` that do not exist yet, in one transaction.

    Args:
        ids_are_new: the ids were generated just now, so that no other job can have them.

    Raises:
        DuplicateJob: an id names another job; none of `jobs` was enqueued.
        JobNotFound: a job that one of `jobs` depends on does not exist; none was enqueued.
        redis.exceptions.RedisError: whether the jobs were enqueued is unknown; it is safe to repeat the call.
    """
    left, look_first = jobs, not ids_are_new
    losses = races = 0
    while True:
        try:
            if (yield from _enqueued(queue, left, at_front=at_front, look_first=look_first)):
                return
        except REFUSED:
            raise
        except LOST:
            losses += 1
            if losses == _TRIES:
                raise
        except WatchError:
            races += 1
            if races == (_TRIES_OF_A_RACE if left[0].dependency_ids else _TRIES):
                raise
        look_first, left = True, (yield from _without_existing(queue, left))
        if not left:
            return


def _enqueued(queue: str, jobs: list[NewJob], *, at_front: bool, look_first: bool) -> Operation[bool]:
    """Whether the transaction was carried out; it is not if a job with one of these ids exists."""
    keys = [job.key for job in jobs]
    dependency_ids = list(dict.fromkeys(job_id for job in jobs for job_id in job.dependency_ids))
    reads: list[Command] = [("EXISTS", *keys)] if look_first else []
    reads += [("HGET", Job.key_for(job_id), "status") for job_id in dependency_ids]

    def write(replies: list[Any]) -> list[Command] | None:
        if look_first and replies.pop(0):
            return None
        states = dict(zip(dependency_ids, replies, strict=True))
        commands: list[Command] = [make_queue_known(queue)]
        ready = []
        for job in jobs:
            deferred = _has_to_wait(job, states)
            commands += job.commands(deferred=deferred)
            if not deferred:
                ready.append(job)
        return commands + push(queue, ready, at_front=at_front)

    watched = keys + [Job.key_for(job_id) for job_id in dependency_ids]
    return (yield Watched(watched, reads, write)) is not None


def _has_to_wait(job: NewJob, states: dict[str, bytes | None]) -> bool:
    """
    Raises:
        JobNotFound: a dependency does not exist; RQ would take it for a job that has finished.
    """
    met = {JobStatus.FINISHED.value, JobStatus.FAILED.value if job.runs_after_failures else JobStatus.FINISHED.value}
    waits = False
    for dependency_id in job.dependency_ids:
        state = states[dependency_id]
        if state is None:
            raise JobNotFound(dependency_id, f"job {job.job_id} cannot wait for it: it never existed, or has expired")
        waits |= state.decode(errors="replace") not in met
    return waits


def _without_existing(queue: str, jobs: list[NewJob]) -> Operation[list[NewJob]]:
    """
    Raises:
        DuplicateJob: an existing job has another request or is in another queue.
    """
    looks: list[Command] = []
    for job in jobs:
        looks += [("HMGET", job.key, "data", "origin"), ("EXISTS", job.key)]
    replies = yield Commands(looks, errors_as_replies=True)  # a key that is not a hash means: this id is taken
    left = []
    for job, found, exists in zip(jobs, replies[::2], replies[1::2], strict=True):
        if isinstance(exists, RedisError):
            raise exists
        if not exists:
            left.append(job)
        elif isinstance(found, Exception) or not _is_the_same(queue, job, *found):
            raise DuplicateJob(f"job_id: {job.job_id!r} names another job already")
    return left


def _is_the_same(queue: str, job: NewJob, data: bytes | None, origin: bytes | None) -> bool:
    """Whether request and queue are the same; the job's times and its place in the queue do not matter."""
    if data == job.data and origin == queue.encode():  # the same call again: nothing has to be unpacked
        return True
    try:
        function, _, _, kwargs = read_json(unpacked(data or b""), MAX_DATA_BYTES)
        theirs = kwargs[REQUEST_KWARG]
        ours, queues = read_json(unpacked(job.data), MAX_DATA_BYTES)[3][REQUEST_KWARG], {queue}
        if ours.get("route") and theirs.get("route"):  # it goes by what was known of the models when it was made
            queues = {step["queue"] for step in theirs["route"]}
            ours, theirs = ({**payload, "route": []} for payload in (ours, theirs))
        if function != job.task or (origin or b"").decode() not in queues:
            return False
        if request_digest(theirs) == request_digest(ours):
            return True
        # Another client, or an earlier version of this one, may write out defaults where this one does not.
        build = build_request if function == TASK_PATH else build_agent_request
        found, wanted = (build(payload).model_dump(mode="json", exclude={"v"}) for payload in (theirs, ours))
        return found == wanted
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, StokerError):  # not a job of stoker's
        return False
