"""The fetcher: it pins the cache of waiting agents in time, and claims again when there is a reason."""

import time
from typing import Any

import pytest
from tests.support.in_memory.queue import InMemoryQueue
from tests.support.wait import wait_for
from tests.worker.pipeline.stages import TIMEOUT_S, NotedLoader, PlayedStore
from tests.worker.queue.ends import finish

from stoker_shared.answer_parts import Markers
from stoker_shared.errors import RedisUnavailable
from stoker_worker.pipeline.fetcher import Fetcher, Leaving
from stoker_worker.pipeline.job import Job
from stoker_worker.ports import Busy, ClaimedJob, TextSoFar


def fetcher_of(
    queue: InMemoryQueue, loader: NotedLoader, store: PlayedStore | None = None, max_in_flight: int = 1, **options: Any
) -> Fetcher:
    """A fetcher that claims once a minute, unless there is a reason to claim at once."""
    values: dict[str, Any] = {"poll_s": 60, "recover_s": 100, "leaving": Leaving(), **options}
    fetcher = Fetcher(queue, store or PlayedStore(), loader.engine, loader, max_in_flight=max_in_flight, **values)
    fetcher.serve(max_in_flight)
    fetcher.start()
    return fetcher


def end(fetcher: Fetcher, queue: InMemoryQueue) -> None:
    fetcher.leave()
    queue.enqueue(job_id="last")
    for job in (*queue.claim(1, Busy()), *queue.in_flight()):
        job.release()  # so that it wakes up
    fetcher.join(TIMEOUT_S)
    assert not fetcher.is_alive()


def test_agents_with_work_are_pinned_before_the_loader_gets_their_job_and_until_it_has_ended() -> None:
    events: list[Any] = []

    class Store(PlayedStore):
        def pin(self, running: frozenset[str], waiting: frozenset[str], *, is_all: bool = True) -> None:
            pins = [event for event in events if isinstance(event, tuple)]
            if (set(running), set(waiting)) not in pins[-1:]:  # only `is_all` has changed
                events.append((set(running), set(waiting)))

    class Loader(NotedLoader):
        def put(self, job: Job) -> None:
            events.append(job.job_id)
            super().put(job)

    queue, loader = InMemoryQueue(), Loader()
    for agent_id in "ab":
        queue.enqueue(job_id=agent_id, agent_id=agent_id)
    fetcher = fetcher_of(queue, loader, Store(), leaving=Leaving(burst=True), poll_s=0.001)
    for _ in range(2):
        finish(loader.jobs.get(timeout=TIMEOUT_S).claimed, {})
    fetcher.join(TIMEOUT_S)
    assert events == [({"a"}, {"b"}), "a", ({"b"}, set()), "b", (set(), set())]


def test_the_store_is_told_that_these_are_all_while_every_place_is_taken() -> None:
    """Otherwise a worker with no place free for days would remove no agent that is unused."""
    pins = []

    class Store(PlayedStore):
        def pin(self, running: frozenset[str], waiting: frozenset[str], *, is_all: bool = True) -> None:
            pins.append((running, waiting, is_all))

    queue, loader = InMemoryQueue(), NotedLoader()
    queue.enqueue(agent_id="a")
    fetcher = fetcher_of(queue, loader, Store(), poll_s=0.001)
    loader.jobs.get(timeout=TIMEOUT_S)
    queue.enqueue(agent_id="b")
    wait_for(lambda: (frozenset("a"), frozenset("b"), True) in pins, why=lambda: str(pins))
    end(fetcher, queue)


def test_an_agent_whose_job_is_just_claimed_or_cannot_be_seen_does_not_look_unused() -> None:
    """The store removes agents that are unused for long, unless others than those it is told of may have work."""
    known: list[bool] = []

    class Store(PlayedStore):
        def pin(self, running: frozenset[str], waiting: frozenset[str], *, is_all: bool = True) -> None:
            known.append(is_all)

    class Queue(InMemoryQueue):
        def claim(self, limit: int, busy: Busy) -> list[ClaimedJob]:
            assert not any(known[-1:])
            return super().claim(limit, busy)

    queue, loader = Queue(), NotedLoader()
    fetcher = Fetcher(
        queue, Store(), loader.engine, loader, max_in_flight=1, poll_s=60, recover_s=100, leaving=Leaving()
    )
    fetcher.serve(1)
    fetcher._tick()
    assert known[-1]
    queue.enqueue(agent_id="a")
    queue.away = True
    with pytest.raises(RedisUnavailable):
        fetcher._tick()
    assert not known[-1]
    queue.away = False
    fetcher._tick()
    assert known[-1]
    fetcher.drain()
    fetcher._tick()
    assert not known[-1]


def test_after_each_claim_the_caches_of_the_next_jobs_are_read_ahead_in_queue_order() -> None:
    queue, loader, store = InMemoryQueue(), NotedLoader(), PlayedStore()
    for agent_id in "bacade":
        queue.enqueue(agent_id=agent_id)
    fetcher = fetcher_of(queue, loader, store, leaving=Leaving(burst=True), poll_s=0.001)
    for _ in range(6):
        finish(loader.jobs.get(timeout=TIMEOUT_S).claimed, {})
    fetcher.join(TIMEOUT_S)
    assert list(dict.fromkeys(store.read_ahead_for)) == [
        ("a", "c"),  # two for the one place, and not b, whose job runs
        ("c", "d"),
        ("a", "d"),
        ("d", "e"),
        ("e",),
        (),
    ]


@pytest.mark.parametrize(("limits", "n_claimed"), [({"max_jobs": 3}, 3), ({"max_idle_s": 0.05}, 5)])
def test_a_worker_leaves_after_its_share_or_when_it_was_idle(limits: dict[str, Any], n_claimed: int) -> None:
    queue, loader = InMemoryQueue(), NotedLoader()
    for _ in range(5):
        queue.enqueue()
    fetcher = fetcher_of(queue, loader, max_in_flight=2, leaving=Leaving(**limits), poll_s=0.001)
    for _ in range(n_claimed):
        assert not fetcher.left.is_set(), "jobs are in flight"
        finish(loader.jobs.get(timeout=TIMEOUT_S).claimed, {})
    fetcher.join(TIMEOUT_S)
    assert not fetcher.is_alive()
    assert loader.jobs.empty()
    assert queue.is_empty() is (n_claimed == 5)


class LongQueue(InMemoryQueue):
    """A queue with jobs that only the tenth claim finds: behind many jobs of another agent, or among many due ones."""

    def __init__(self, hidden: str) -> None:
        super().__init__()
        self._hidden = hidden
        self.looks = 0

    def claim(self, limit: int, busy: Busy) -> list[ClaimedJob]:
        self.looks += 1
        if self.looks == 10:
            self.enqueue(job_id="a")
        return super().claim(limit, busy)

    def has_unread(self) -> bool:
        return self._hidden == "behind" and self.looks < 10

    def tidy(self) -> bool:
        return self._hidden == "due" and self.looks < 10


@pytest.mark.parametrize("hidden", ["behind", "due"])
def test_the_fetcher_claims_again_at_once_while_a_slot_is_free_and_jobs_are_unread(hidden: str) -> None:
    queue, loader = LongQueue(hidden), NotedLoader()
    fetcher = fetcher_of(queue, loader)
    job = loader.jobs.get(timeout=TIMEOUT_S)
    assert job.job_id == "a"
    end(fetcher, queue)


def test_with_every_slot_taken_the_fetcher_keeps_its_interval() -> None:
    queue, loader = LongQueue("behind"), NotedLoader()
    fetcher = fetcher_of(queue, loader, max_in_flight=0)
    wait_for(lambda: queue.looks)
    time.sleep(0.05)
    assert queue.looks == 1
    end(fetcher, queue)


def test_a_withdrawn_or_late_job_is_cancelled_and_streamed_texts_are_published() -> None:
    queue, loader = InMemoryQueue(), NotedLoader()
    for job_id, timeout_s in (("canceled", None), ("stopped", None), ("late", 0.05), ("fine", 60)):
        queue.enqueue(job_id=job_id, agent_id=job_id, timeout_s=timeout_s)
    queue.listen("fine")
    fetcher = fetcher_of(queue, loader, max_in_flight=4, poll_s=0.01)
    jobs = {job.job_id: job for job in (loader.jobs.get(timeout=TIMEOUT_S) for _ in range(4))}
    loader.engine.generated = {jobs["fine"].claimed.claim_number: TextSoFar("so far", Markers())}
    queue.cancel("canceled")
    queue.ask_to_stop("stopped")
    wait_for(lambda: all(jobs[name].cancel.reason for name in ("canceled", "stopped", "late")))
    assert [jobs[name].cancel.reason for name in jobs] == ["withdrawn", "withdrawn", "timed out", None]
    assert queue.entries["fine"].text == "so far"
    end(fetcher, queue)


def test_a_late_job_is_cancelled_while_redis_is_away() -> None:
    queue, loader = InMemoryQueue(), NotedLoader()
    queue.enqueue(job_id="late", timeout_s=0.2)
    fetcher = fetcher_of(queue, loader, poll_s=0.01)
    job = loader.jobs.get(timeout=TIMEOUT_S)
    queue.away = True
    assert wait_for(lambda: job.cancel.reason) == "timed out"
    queue.away = False
    end(fetcher, queue)


def test_while_the_shared_store_is_away_only_jobs_without_memory_are_claimed() -> None:
    queue, loader, store = InMemoryQueue(), NotedLoader(), PlayedStore()
    store.away = True
    queue.enqueue(job_id="writes", agent_id="a")
    queue.enqueue(job_id="reads", agent_id="b", cache="read")
    queue.enqueue(job_id="plain")
    fetcher = fetcher_of(queue, loader, store, max_in_flight=4, poll_s=0.001)
    assert loader.jobs.get(timeout=TIMEOUT_S).job_id == "plain"
    assert (queue.state("writes"), queue.state("reads")) == ("queued", "queued")
    store.away = False
    assert {loader.jobs.get(timeout=TIMEOUT_S).job_id for _ in range(2)} == {"writes", "reads"}
    end(fetcher, queue)


def test_a_fetcher_outlives_an_outage_of_redis_and_an_entry_it_cannot_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, loader = InMemoryQueue(), NotedLoader()
    queue.away = True
    fetcher = fetcher_of(queue, loader, poll_s=0.01)
    time.sleep(0.05)
    with monkeypatch.context() as patched:
        patched.setattr(queue, "tidy", lambda: 1 / 0)
        queue.away = False
        time.sleep(0.6)
    queue.enqueue(job_id="a")
    assert loader.jobs.get(timeout=TIMEOUT_S).job_id == "a"
    end(fetcher, queue)
