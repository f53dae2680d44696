"""The first documents' test of concurrent requests to one agent, through Redis and a worker process."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.worker_process import running_worker

pytestmark = pytest.mark.server

THREADS, TURNS = 4, 3


def test_lock_starvation(producer, redis_url, tmp_path):
    """Sprint 2 plan: "concurrent requests to same agent should not deadlock".

    They run one after the other, each thread's own in their order, and an agent beside them is not kept waiting.
    """

    def converse(number):
        return [
            producer.submit(agent_id="one", prompt=f" {number}", context="append", max_tokens=2) for _ in range(TURNS)
        ]

    with ThreadPoolExecutor(THREADS) as threads:
        by_thread = list(threads.map(converse, range(THREADS)))
    beside = producer.submit(agent_id="another", prompt="x", max_tokens=2)
    with running_worker(redis_url, tmp_path / "store", "--burst", "--scripted-steps-per-s", "40") as worker:
        assert worker.wait() == 0, worker.log
    assert beside.result(timeout_s=1).cache.agent_version == 1
    made = [[ticket.result(timeout_s=1) for ticket in tickets] for tickets in by_thread]
    versions = [[result.cache.agent_version for result in results] for results in made]
    assert all(of_thread == sorted(of_thread) for of_thread in versions)
    ordered = sorted((result for results in made for result in results), key=lambda result: result.cache.agent_version)
    assert [result.cache.agent_version for result in ordered] == list(range(1, THREADS * TURNS + 1))
    assert [result.usage.prompt_tokens for result in ordered] == [2 + 4 * n for n in range(THREADS * TURNS)]
