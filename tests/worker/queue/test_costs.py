"""The number of round trips and commands of one job, from `submit` to its result. What is done now and then, for all
jobs together, is not counted: the least of several jobs counts."""

import pytest
from redis.connection import AbstractConnection
from tests.worker.queue.ends import finish

from stoker_shared.result import CacheReport, GenerationResult, Timing, Usage
from stoker_worker.ports import Busy

pytestmark = pytest.mark.server

MOST_ROUND_TRIPS, MOST_COMMANDS = 6, 40
"""May only fall."""

RESULT = GenerationResult(
    text="done",
    finish_reason="stop",
    job_id="job",
    usage=Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1),
    cache=CacheReport(),
    timing=Timing(queued_s=0, prefill_s=0, first_token_s=0, decode_s=0, total_s=0),
    model="m",
).model_dump(mode="json")


def test_a_job_takes_few_round_trips_and_commands(connection, producer, queue, monkeypatch):
    send, n_sent = AbstractConnection.send_packed_command, 0

    def count_and_send(*args, **options):
        nonlocal n_sent
        n_sent += 1
        return send(*args, **options)

    def n_commands():
        found = connection.info("commandstats")
        return sum(stats["calls"] for name, stats in found.items() if name != "cmdstat_info")

    def costs():
        nonlocal n_sent
        before, n_sent = n_commands(), 0
        ticket = producer.submit(prompt="x", agent_id="a")
        [job] = queue.claim(1, Busy())
        finish(job, RESULT)
        assert ticket.result(timeout_s=10).text == "done"
        sent = n_sent
        return sent, n_commands() - before

    costs()  # scripts are loaded, the queue is looked at
    monkeypatch.setattr(AbstractConnection, "send_packed_command", count_and_send)
    round_trips, commands = (min(numbers) for numbers in zip(*(costs() for _ in range(5)), strict=True))
    assert (round_trips <= MOST_ROUND_TRIPS, commands <= MOST_COMMANDS) == (True, True), (round_trips, commands)
