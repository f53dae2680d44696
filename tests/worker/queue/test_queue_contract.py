"""The contract of `QueuePort` and `ClaimedJob`, for RQ on a real server and for the queue in memory."""

from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis
from rq import Retry
from rq.command import send_stop_job_command
from rq.job import Job
from rq.queue import Queue
from rq.serializers import JSONSerializer
from tests.support.in_memory.queue import InMemoryQueue
from tests.worker.queue.ends import fail, finish, give_back
from tests.worker.queue.looking import taken_over

from stoker_shared.answer_parts import Markers
from stoker_shared.errors import EngineFailed, InvalidRequest, OwnershipLost
from stoker_shared.wire import FIELD_STREAM, STREAM_KEY, TASK_PATH
from stoker_worker.ports import Busy, ClaimedJob, QueuePort, SequenceProgress, Serving, TextSoFar
from stoker_worker.queue.lease import OwnStore
from stoker_worker.queue.rq_queue import open_queue
from stoker_worker.queue.waiting import MOST_PASSED
from stoker_worker.settings import read_settings

RESULT = {"text": "done"}


class OutsideMemory:
    def __init__(self, at_hand: set[str]) -> None:
        self.queue = InMemoryQueue(lambda agent_id: not at_hand or agent_id in at_hand)
        self.cancel = self.queue.cancel
        self.ask_to_stop = self.queue.ask_to_stop
        self.listen = self.queue.listen
        self.take_over = self.queue.take_over
        self.state = self.queue.state

    def enqueue(self, job_id: str, agent_id: str | None = None, *, retries: int = 0, **fields: Any) -> None:
        if agent_id is not None:
            fields["agent_id"] = agent_id
        self.queue.enqueue(job_id=job_id, retries=retries, **fields)

    def result(self, job_id: str) -> Any:
        return self.queue.entries[job_id].result

    def text(self, job_id: str) -> str:
        return self.queue.entries[job_id].text

    def waiting(self) -> list[str]:
        return list(self.queue.waiting)


class OutsideRq:
    def __init__(self, queue: QueuePort, connection: Redis) -> None:
        self.queue, self._connection = queue, connection
        self._plain = Queue("generate", connection=connection, serializer=JSONSerializer)

    def enqueue(self, job_id: str, agent_id: str | None = None, *, retries: int = 0, **fields: Any) -> None:
        request = {"prompt": "p", **({"agent_id": agent_id, "v": 1} if agent_id else {"v": 2}), **fields}
        retry = Retry(max=retries) if retries else None
        self._plain.enqueue(TASK_PATH, request=request, job_id=job_id, retry=retry)

    def cancel(self, job_id: str) -> None:
        self._job(job_id).cancel()

    def ask_to_stop(self, job_id: str) -> None:
        send_stop_job_command(self._connection, job_id, serializer=JSONSerializer)

    def listen(self, job_id: str) -> None:
        self._connection.hset(Job.key_for(job_id), FIELD_STREAM, "1")

    def take_over(self) -> None:
        taken_over(self._connection)

    def state(self, job_id: str) -> str:
        return str(self._job(job_id).get_status().value)

    def result(self, job_id: str) -> Any:
        return self._job(job_id).return_value()

    def text(self, job_id: str) -> str:
        entries: Any = self._connection.xrange(STREAM_KEY.format(job_id=job_id))
        return "".join(fields[b"text"].decode() for _, fields in entries)

    def waiting(self) -> list[str]:
        found: Any = self._connection.lrange("rq:queue:generate", 0, -1)
        return [job_id.decode() for job_id in found]

    def _job(self, job_id: str) -> Job:
        return Job.fetch(job_id, self._connection, JSONSerializer)


Outside = OutsideMemory | OutsideRq
"""The actions of producers, operators and other workers on the queue, and their view of it."""


@pytest.fixture
def at_hand() -> set[str]:
    """The agents whose caches are at hand; all, if it is empty."""
    return set()


@pytest.fixture(params=["in memory", pytest.param("RQ", marks=pytest.mark.server)])
def outside(request: pytest.FixtureRequest, at_hand: set[str]) -> Iterator[Outside]:
    if request.param == "in memory":
        yield OutsideMemory(at_hand)
        return
    connection, redis_url = request.getfixturevalue("connection"), request.getfixturevalue("redis_url")
    store = OwnStore(is_at_hand=lambda agent_id: not at_hand or agent_id in at_hand)
    with open_queue(read_settings({"redis_url": redis_url}), redis_url, store=store) as opened:
        yield OutsideRq(opened.rq_queue, connection)


def claim(outside: Outside, limit: int = 8, busy: Busy | None = None) -> list[ClaimedJob]:
    """As the fetcher does: with the agents of jobs in flight as busy."""
    return outside.queue.claim(limit, busy or Busy().beside(job.memory_use for job in outside.queue.in_flight()))


def ids(jobs: Any) -> list[str]:
    return [job.job_id for job in jobs]


def test_a_job_is_claimed_has_one_end_and_is_released(outside: Outside) -> None:
    outside.enqueue("job", "a", max_tokens=7)
    assert not outside.queue.is_empty()
    (job,) = claim(outside)
    assert (job.job_id, job.attempt, job.losses_alone, job.cancel.reason) == ("job", 1, 0, None)
    assert (job.request.agent_id, job.memory_use.access) == ("a", "write")
    assert job.delivery.job_id == "job"
    assert job.enqueued_at <= job.claimed_at
    assert outside.state("job") == "started"
    assert outside.queue.is_empty()
    job.finish(RESULT)
    assert (outside.state("job"), outside.result("job")) == ("finished", RESULT)
    assert outside.queue.in_flight() == (job,)  # later steps of its end may still run
    with pytest.raises(OwnershipLost):
        job.finish({"text": "another"})
    with pytest.raises(OwnershipLost):
        job.fail(ValueError("late"))
    assert outside.result("job") == RESULT
    job.release()
    assert outside.queue.in_flight() == ()


def test_no_more_jobs_are_claimed_than_the_limit_and_an_agents_jobs_keep_their_order(outside: Outside) -> None:
    for job_id, agent_id in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("none", None), ("c1", "c")):
        outside.enqueue(job_id, agent_id)
    first = claim(outside, limit=2)
    assert ids(first) == ["a1", "b1"]
    assert ids(claim(outside)) == ["none", "c1"]
    assert claim(outside) == []
    assert ids(outside.queue.in_flight()) == ["a1", "b1", "none", "c1"]
    finish(first[0], RESULT)
    assert ids(claim(outside)) == ["a2"]


def test_jobs_that_only_read_an_agents_memory_run_together(outside: Outside) -> None:
    for job_id, cache in (("r1", "read"), ("r2", "read"), ("w", "readwrite"), ("r3", "read")):
        outside.enqueue(job_id, "a", cache=cache)
    readers = claim(outside)
    assert ids(readers) == ["r1", "r2"]
    for job in readers:
        finish(job, RESULT)
    assert ids(claim(outside)) == ["w"]


def test_a_job_whose_agent_is_at_hand_passes_others_but_none_of_its_own_agent(
    outside: Outside, at_hand: set[str]
) -> None:
    at_hand.add("c")
    for job_id in ("a1", "b1", "c1", "c2"):
        outside.enqueue(job_id, job_id[0])
    for wanted in ("c1", "c2"):
        (job,) = claim(outside, limit=1)
        assert job.job_id == wanted
        finish(job, RESULT)
    assert ids(claim(outside)) == ["a1", "b1"]


def test_a_job_is_passed_over_only_so_often(outside: Outside, at_hand: set[str]) -> None:
    at_hand.add("c")
    outside.enqueue("a1", "a")
    for number in range(2 * MOST_PASSED):
        outside.enqueue(f"c{number}", "c")
    n_passed = 0
    while (job := claim(outside, limit=1)[0]).job_id != "a1":
        finish(job, RESULT)
        n_passed += 1
    assert 0 < n_passed <= MOST_PASSED


def test_the_place_of_an_agent_is_that_of_its_first_waiting_job(outside: Outside) -> None:
    for job_id in ("a1", "b1", "c1", "b2", "a2"):
        outside.enqueue(job_id, job_id[0])
    claim(outside, limit=0)
    assert sorted("zcba", key=outside.queue.place_of) == ["a", "b", "c", "z"]
    claim(outside, limit=1)
    assert sorted("zcba", key=outside.queue.place_of) == ["b", "c", "a", "z"]


def test_the_agents_of_the_next_jobs_are_known_before_the_first_claim_and_after_it(outside: Outside) -> None:
    for job_id in ("a1", "a2", "none", "b1", "c1", "d1"):
        outside.enqueue(job_id, None if job_id == "none" else job_id[0])
    assert outside.queue.next_agents(3) == ("a", "b", "c")
    outside.enqueue("e1", "e")
    assert outside.queue.next_agents(8) == ("a", "b", "c", "d", "e")
    assert outside.queue.in_flight() == ()
    assert outside.waiting() == ["a1", "a2", "none", "b1", "c1", "d1", "e1"]
    first, *_ = claim(outside, limit=3)
    running = {job.memory_use.agent_id for job in outside.queue.in_flight()}
    assert "a" in running
    assert outside.queue.next_agents(8) == tuple(agent for agent in "bcde" if agent not in running)
    finish(first, RESULT)
    assert outside.queue.next_agents(8)[0] == "a"
    assert outside.queue.next_agents(2) == outside.queue.next_agents(8)[:2]


def test_a_failure_is_retried_in_place_as_often_as_allowed_unless_it_is_permanent(outside: Outside) -> None:
    outside.enqueue("job", "a", retries=1)
    outside.enqueue("next", "a", retries=3)
    outside.enqueue("wrong", "a", retries=3)
    (job,) = claim(outside)
    fail(job, EngineFailed("passes"))
    assert outside.waiting() == ["job", "next", "wrong"]
    for job_id, error, may_retry in (
        ("job", EngineFailed("did not pass"), True),
        ("next", EngineFailed("it may not"), False),
        ("wrong", InvalidRequest("the request is wrong"), True),
    ):
        (job,) = claim(outside)
        fail(job, error, may_retry=may_retry)
        assert (job.job_id, outside.state(job_id)) == (job_id, "failed")


def test_jobs_given_back_are_in_front_in_their_order(outside: Outside) -> None:
    for name in "abc":
        outside.enqueue(name, name)
    jobs = claim(outside, limit=2)
    assert give_back(jobs, counts_as_attempt=False) == 2
    assert outside.waiting() == ["a", "b", "c"]
    assert [job.attempt for job in claim(outside)] == [1, 1, 1]


def test_a_job_that_is_lost_twice_counts_the_losses_and_runs_alone(outside: Outside) -> None:
    for name in "ab":
        outside.enqueue(name, name)
    for _ in range(2):
        (lost,) = claim(outside, limit=1)
        assert lost.give_back(counts_as_attempt=True, alone=True)
        lost.release()
    (again,) = claim(outside)
    assert (again.job_id, again.attempt, again.losses_alone) == ("a", 3, 2)
    assert claim(outside) == []
    finish(again, RESULT)
    assert ids(claim(outside)) == ["b"]


def test_a_job_that_was_canceled_or_asked_to_stop_is_not_given_back(outside: Outside) -> None:
    for name in ("canceled", "stopped"):
        outside.enqueue(name, name)
    jobs = claim(outside)
    outside.cancel("canceled")
    outside.ask_to_stop("stopped")
    while "stopped" not in ids(outside.queue.withdrawn({})):
        pass
    assert give_back(jobs, counts_as_attempt=False) == 0
    assert (outside.state("canceled"), outside.state("stopped"), outside.waiting()) == ("canceled", "stopped", [])


def test_canceled_and_stopped_jobs_are_withdrawn_and_ended(outside: Outside) -> None:
    for name in ("canceled", "stopped", "fine"):
        outside.enqueue(name, name)
    jobs = {job.job_id: job for job in claim(outside)}
    assert outside.queue.withdrawn({}) == []
    outside.cancel("canceled")
    outside.ask_to_stop("stopped")
    found: set[str] = set()
    for _ in range(1000):
        found.update(ids(outside.queue.withdrawn({"fine": SequenceProgress("decode", 3)})))
        if len(found) == 2:
            break
    assert found == {"canceled", "stopped"}
    for name in found:
        jobs[name].stop()
        jobs[name].release()
    assert [outside.state(name) for name in jobs] == ["canceled", "stopped", "started"]
    assert ids(outside.queue.in_flight()) == ["fine"]


def test_texts_are_published_only_for_jobs_with_a_reader(outside: Outside) -> None:
    outside.enqueue("read", "a")
    outside.enqueue("unread", "b")
    outside.listen("read")
    jobs = {job.job_id: job for job in claim(outside)}
    outside.queue.withdrawn({})
    assert outside.queue.listened_to() == {jobs["read"].claim_number}
    outside.queue.tell({jobs["read"].claim_number: TextSoFar("so far", Markers())})
    assert outside.text("read") == "so far"
    finish(jobs["read"], RESULT)
    assert outside.queue.listened_to() == frozenset()


def test_a_deposed_worker_ends_nothing_and_claims_nothing(outside: Outside) -> None:
    outside.enqueue("job", "a")
    outside.enqueue("other", "b")
    (job,) = claim(outside, limit=1)
    assert outside.queue.beat()
    outside.take_over()
    assert not outside.queue.beat()
    with pytest.raises(OwnershipLost):
        job.finish(RESULT)
    assert not job.give_back(counts_as_attempt=False)
    job.drop()
    job.release()
    assert claim(outside) == []
    assert (outside.state("job"), outside.state("other")) == ("started", "queued")


def test_a_release_wakes_its_waiter_once(outside: Outside) -> None:
    for name in "ab":
        outside.enqueue(name, name)
    jobs = claim(outside)
    assert not outside.queue.wait_for_release(0.0)
    for job in jobs:
        finish(job, RESULT)
        job.release()  # a second release does no harm
    assert outside.queue.wait_for_release(0.0)
    assert not outside.queue.wait_for_release(0.0)


def test_the_end_of_a_run_does_not_release_the_next_run_of_its_id(outside: Outside) -> None:
    outside.enqueue("job", "a", retries=1)
    (first,) = claim(outside)
    fail(first, EngineFailed("passes"))
    (second,) = claim(outside)
    first.release()
    assert outside.queue.in_flight() == (second,)


def test_claims_are_numbered_and_housekeeping_finds_nothing_to_do(outside: Outside) -> None:
    for name in "abc":
        outside.enqueue(name, name)
    jobs = [*claim(outside, limit=1), *claim(outside)]
    assert [job.claim_number for job in jobs] == sorted({job.claim_number for job in jobs})
    assert ids(jobs) == ["a", "b", "c"]
    assert outside.queue.recover() == 0
    assert not outside.queue.tidy()
    assert not outside.queue.has_unread()
    outside.queue.announce(Serving("m", 100, "batched", 8, "given"))
    assert ids(outside.queue.in_flight()) == ["a", "b", "c"]
