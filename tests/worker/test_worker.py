"""The life of the process: what it says when it ends before it has begun."""

import threading

import pytest

from stoker_shared import build_request
from stoker_shared.errors import EngineFailed, QueueHeld
from stoker_worker.engine.scripted import ScriptedProvider
from stoker_worker.memory.store import AgentStore
from stoker_worker.ports import ClaimedJob, Delivery
from stoker_worker.settings import read_settings
from stoker_worker.worker import Worker


class TakenOverQueue:
    """A queue whose lease another worker has taken by the first heartbeat."""

    def recover(self):
        return 0

    def beat(self):
        return False


class SlowProvider:
    """A model that loads for as long as the test lasts."""

    def __init__(self):
        self.release = threading.Event()

    def load(self):
        self.release.wait(30)
        raise RuntimeError("not loaded")

    def leave_thread(self):
        pass


def test_a_worker_deposed_while_its_model_loads_says_so():
    provider = SlowProvider()
    settings = read_settings({"heartbeat_s": 0.05, "lease_ttl_s": 1.0})
    worker = Worker(settings, TakenOverQueue(), None, provider, burst=False)
    try:
        with pytest.raises(QueueHeld, match="taken over"):
            worker.run()
    finally:
        provider.release.set()


class EndlessQueue:
    """A new job for every free place, and a record of what became of each."""

    def __init__(self):
        self.claims, self.given_back = 0, 0
        self.claimed_again = threading.Event()

    def recover(self):
        return 0

    def beat(self):
        return True

    def claim(self, limit, busy):
        if not limit:
            return []
        self.claims += 1
        if self.claims > 1:
            self.claimed_again.set()
        request = build_request({"agent_id": f"agent-{self.claims}", "prompt": "p", "max_tokens": 5, "cache": "off"})
        delivery = Delivery(f"job-{self.claims}", "2026")
        return [ClaimedJob(delivery.job_id, "q", request, delivery, 1, 0.0, 0.0, self.claims, None, None)]

    def waiting_agents(self):
        return frozenset()

    def withdrawn(self, jobs, progress):
        return []

    def tidy(self):
        pass

    def announce(self, serves):
        self.serves = serves

    def is_empty(self):
        return False

    def give_back(self, jobs, *, counts_as_attempt, alone=False):
        self.given_back += len(jobs)
        return len(jobs)


class BreakingProvider(ScriptedProvider):
    """An engine that breaks in its first step, and takes its time to close."""

    def __init__(self, closing):
        super().__init__(max_batch=1, steps_per_s=1000)
        self.closing = closing

    def load(self):
        engine, loaded = super().load()

        def step():
            raise RuntimeError("out of memory")

        engine.step, engine.close = step, self.closing
        return engine, loaded


def test_a_worker_whose_engine_broke_claims_nothing_more(tmp_path):
    queue = EndlessQueue()
    provider = BreakingProvider(closing=lambda: queue.claimed_again.wait(1))
    settings = read_settings({"max_batch": 1, "poll_s": 0.001})
    store = AgentStore(tmp_path)
    try:
        with pytest.raises(EngineFailed, match="out of memory"):
            Worker(settings, queue, store, provider, burst=False).run()
    finally:
        store.close()
    assert (queue.claims, queue.given_back) == (1, 1)
