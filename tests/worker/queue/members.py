"""What tests of several workers on one queue do with each of them."""

import time
from collections.abc import Iterable, Sequence

from redis import Redis
from tests.worker.queue.ends import finish

from stoker_shared.wire import HOMES_KEY, LEASE_KEY
from stoker_worker.ports import Busy, ClaimedJob
from stoker_worker.queue.rq_queue import RqQueue

TTL_S = 0.6


def claim(queue: RqQueue, limit: int = 16) -> list[ClaimedJob]:
    """As the fetcher does: beside what is in flight."""
    return queue.claim(limit, Busy().beside(job.memory_use for job in queue.in_flight()))


def claim_within(queue: RqQueue, within_s: float = 20.0) -> list[ClaimedJob]:
    """Claims until there is something, as a fetcher does again and again."""
    end = time.monotonic() + within_s
    while not (found := claim(queue)):
        assert time.monotonic() < end, "nothing to claim"
        time.sleep(0.02)
    return found


def claim_in_turn(claiming: RqQueue, idle: RqQueue) -> list[str]:
    """What one worker claims while another one, which must not claim anything, looks as well."""
    end = time.monotonic() + 20
    while not (found := claim(claiming)):
        assert claim(idle) == []
        assert time.monotonic() < end, "nothing to claim"
        time.sleep(0.02)
    return ids(found)


def ids(jobs: Sequence[ClaimedJob]) -> list[str]:
    return [job.job_id for job in jobs]


def home_of(connection: Redis, agent_id: str) -> str:
    """The agent's entry."""
    return (connection.hget(HOMES_KEY.format(queue="generate"), agent_id) or b"").decode()


def run(jobs: Iterable[ClaimedJob]) -> None:
    for job in jobs:
        finish(job, {})


def die(queue: RqQueue) -> None:
    """The worker stops without a word: its lease runs out."""
    queue._connection.delete(LEASE_KEY.format(member=queue._lease.member))


def impatient(queue: RqQueue) -> RqQueue:
    """A dead worker is found soon; its own lease lasts."""
    queue._members._ttl_s = TTL_S
    return queue


def recovered(queue: RqQueue, within_s: float = 20.0) -> int:
    end = time.monotonic() + within_s
    while not (found := queue.recover()):
        assert time.monotonic() < end, "nothing recovered"
        time.sleep(0.02)
    return found
