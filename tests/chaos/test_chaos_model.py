"""The same with the real model: killed workers change no answer. `make chaos` only."""

import os
import signal

import pytest
from redis import Redis
from tests.worker_process import running_worker

from stoker import Producer

pytestmark = [
    pytest.mark.server,
    pytest.mark.model,
    pytest.mark.skipif(os.environ.get("CHAOS") != "long", reason="takes minutes: make chaos"),
]

OPENINGS = [
    "The longest river in South America is",
    "To tie a bowline, first make",
    "Bees make honey from",
    "The capital of Norway is",
    "A good loaf of bread needs",
]
JOBS = [
    {
        "agent_id": f"{context} {number % 10}",
        "prompt": f" {OPENINGS[number % 5]}" if context == "append" else f"{number}. {OPENINGS[number % 5]}",
        "context": context,
        "max_tokens": 8 + number % 9,
    }
    for number in range(50)
    for context in ("full", "append")
]


@pytest.mark.timeout(900)
def test_answers_are_those_of_a_run_that_nobody_disturbed(redis_url, tmp_path, smollm2):
    producer = Producer(redis_url)
    options = ("--model", str(smollm2), "--max-batch", "8")

    def texts(tickets):
        results = [ticket.result(timeout_s=1) for ticket in tickets]
        return [result.text for result in results], [result.attempt for result in results]

    quiet = producer.submit_many(JOBS)
    with running_worker(redis_url, tmp_path / "quiet", "--burst", *options) as worker:
        assert worker.wait(400) == 0, worker.log
    expected, _ = texts(quiet)

    tickets = producer.submit_many(JOBS)
    with Redis.from_url(redis_url) as connection:
        for number, end in enumerate((signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL)):
            before = connection.zcard("rq:finished:generate")
            with running_worker(
                redis_url, tmp_path / "store", *options, "--grace-s", "0", log_name=f"{number}.log"
            ) as worker:
                worker.wait_for(lambda: connection.zcard("rq:finished:generate") >= before + 12, 120)  # noqa: B023
                worker.wait_for(lambda: any((ticket.status().tokens or 0) > 2 for ticket in tickets), 60)
                worker.signal(end)
                worker.wait()
        with running_worker(redis_url, tmp_path / "store", "--burst", *options, log_name="last.log") as worker:
            assert worker.wait(400) == 0, worker.log
        assert all(connection.xlen(f"rq:results:{ticket.job_id}") == 1 for ticket in tickets)
    found, attempts = texts(tickets)
    assert found == expected
    assert max(attempts) > 1
