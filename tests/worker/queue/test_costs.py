"""The number of round trips and commands of one job, from `submit` to its result, and of round trips of a heartbeat.
What is done now and then, for all jobs together, is not counted: the least of several jobs counts."""

import pytest
from redis.connection import AbstractConnection
from tests.producer.played_worker import result_fields
from tests.worker.queue.ends import finish

from stoker_worker.ports import Busy

pytestmark = pytest.mark.server

MOST_ROUND_TRIPS, MOST_COMMANDS = 6, 40
"""May only fall."""

RESULT = result_fields("job", "done")


@pytest.fixture
def sent(monkeypatch):
    """Grows by one with each round trip."""
    send, sent = AbstractConnection.send_packed_command, []

    def note_and_send(*args, **options):
        sent.append(None)
        return send(*args, **options)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", note_and_send)
    return sent


def test_a_job_takes_few_round_trips_and_commands(connection, producer, queue, sent):
    def n_commands():
        found = connection.info("commandstats")
        return sum(stats["calls"] for name, stats in found.items() if name != "cmdstat_info")

    def costs():
        before = n_commands()
        sent.clear()
        ticket = producer.submit(prompt="x", agent_id="a")
        [job] = queue.claim(1, Busy())
        finish(job, RESULT)
        assert ticket.result(timeout_s=10).text == "done"
        n_sent = len(sent)
        return n_sent, n_commands() - before

    costs()  # scripts are loaded, the queue is looked at
    round_trips, commands = (min(numbers) for numbers in zip(*(costs() for _ in range(5)), strict=True))
    assert (round_trips <= MOST_ROUND_TRIPS, commands <= MOST_COMMANDS) == (True, True), (round_trips, commands)


def test_a_heartbeat_takes_as_many_round_trips_for_many_jobs_as_for_one(queue, submit, sent):
    """With one for each job, it would take longer than the lease lasts where the server is far away."""

    def cost():
        sent.clear()
        assert queue.beat()
        return len(sent)

    def least_cost(n_jobs):
        submit(*(f"{n_jobs} {n}" for n in range(n_jobs)))
        assert len(queue.claim(n_jobs, Busy())) == n_jobs
        return min(cost() for _ in range(5))  # the first one loads scripts

    assert least_cost(1) == least_cost(9)
