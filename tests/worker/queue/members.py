"""What tests of several workers on one queue do with each of them."""

from collections.abc import Iterable, Sequence

from redis import Redis
from tests.support.wait import wait_for
from tests.worker.queue.ends import finish

from stoker_shared.wire import LAST_KEY, LEASE_KEY
from stoker_worker.ports import Busy, ClaimedJob
from stoker_worker.queue.registration import member_of
from stoker_worker.queue.rq_queue import RqQueue

TTL_S = 0.3


def claim(queue: RqQueue, limit: int = 16) -> list[ClaimedJob]:
    """As the fetcher does: beside what is in flight."""
    return queue.claim(limit, Busy().beside(job.memory_use for job in queue.in_flight()))


def claim_within(queue: RqQueue) -> list[ClaimedJob]:
    """Claims until there is something, as a fetcher does again and again."""
    return wait_for(lambda: claim(queue), 20, lambda: "nothing to claim")


def ids(jobs: Sequence[ClaimedJob]) -> list[str]:
    return [job.job_id for job in jobs]


def last_of(connection: Redis, agent_id: str) -> str:
    """The member that made the agent's newest version, and its number."""
    worker, _, number = (connection.hget(LAST_KEY.format(queue="generate"), agent_id) or b"").decode().partition(" ")
    return f"{member_of(worker)} {number}" if worker else ""


def turn(version: int, *, saved: bool = True) -> dict[str, dict[str, object]]:
    """The result of a job that has made this version of its agent."""
    return {"cache": {"agent_version": version, "saved": saved}}


def run(jobs: Iterable[ClaimedJob], version: int | None = None) -> None:
    for job in jobs:
        finish(job, {} if version is None else turn(version))


def die(queue: RqQueue) -> None:
    """The worker stops without a word: its lease runs out."""
    queue._connection.delete(LEASE_KEY.format(member=queue._lease.member))


def impatient(queue: RqQueue) -> RqQueue:
    """A dead worker is found soon; its own lease lasts."""
    queue._members._ttl_s = TTL_S
    return queue


def recovered(queue: RqQueue) -> int:
    return wait_for(queue.recover, 20, lambda: "nothing recovered")
