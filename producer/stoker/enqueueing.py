"""Enqueues jobs once: a lost reply, or a producer that asks again, makes no second job. Owns that; keeps no state.

redis-py sends a transaction again when its reply is lost, and a packet may arrive long after its sender gave it up. So
the job's key is watched first: a transaction that comes after another one that made the job is refused by the server.
After any doubt we look whether the job is there, and whether it is ours. The jobs it depends on are watched too: of a
job that ends just then, the new one would never hear.
"""

import json
from typing import Any, Final

from redis.exceptions import RedisError, WatchError
from rq.job import Job, JobStatus

from stoker.connection import LOST, REFUSED
from stoker.new_job import NewJob, make_queue_known, push
from stoker.operations import Command, Commands, Operation, Watched
from stoker_shared.errors import DuplicateJob, JobNotFound, StokerError
from stoker_shared.job_data import unpacked
from stoker_shared.request import build_request, request_digest
from stoker_shared.wire import REQUEST_KWARG, TASK_PATH

_TRIES: Final = 5  # each with redis-py's own tries in it
_TRIES_OF_A_RACE: Final = 100  # a job that it depends on changes twice a second while it runs


def enqueue(queue: str, jobs: list[NewJob], *, at_front: bool, ids_are_new: bool) -> Operation[None]:
    """All of `jobs` that are not there yet, in one transaction.

    Args:
        ids_are_new: they were made up just now, so that nobody can have used them.

    Raises:
        DuplicateJob: an id names another job; none of `jobs` was enqueued.
        JobNotFound: a job that one of `jobs` depends on is not there; none was enqueued.
        redis.exceptions.RedisError: whether they were enqueued is unknown; the same call again is safe.
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
        look_first, left = True, (yield from _without_those_there(queue, left))
        if not left:
            return


def _enqueued(queue: str, jobs: list[NewJob], *, at_front: bool, look_first: bool) -> Operation[bool]:
    """Whether the transaction was carried out; not when there is a job of one of these ids."""
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
        JobNotFound: RQ would take a job that is not there for one that has finished.
    """
    met = {JobStatus.FINISHED.value, JobStatus.FAILED.value if job.runs_after_failures else JobStatus.FINISHED.value}
    waits = False
    for dependency_id in job.dependency_ids:
        state = states[dependency_id]
        if state is None:
            raise JobNotFound(dependency_id, f"job {job.job_id} cannot wait for it: it never was, or has expired")
        waits |= state.decode(errors="replace") not in met
    return waits


def _without_those_there(queue: str, jobs: list[NewJob]) -> Operation[list[NewJob]]:
    """
    Raises:
        DuplicateJob: what is there is not the same request in the same queue.
    """
    looks: list[Command] = []
    for job in jobs:
        looks += [("HMGET", job.key, "data", "origin"), ("EXISTS", job.key)]
    replies = yield Commands(looks, errors_as_replies=True)  # a key that is no hash is one id that is taken
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
    """By request and queue: times and place may have changed since, and are not what runs."""
    try:
        function, _, _, kwargs = json.loads(unpacked(data or b""))
        theirs = kwargs[REQUEST_KWARG]
        if function != TASK_PATH or origin != queue.encode():
            return False
        # Another language may have written out what is a default.
        return (
            request_digest(theirs) == request_digest(job.payload) or build_request(theirs).as_payload() == job.payload
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, StokerError):  # a pickle, or another's
        return False
