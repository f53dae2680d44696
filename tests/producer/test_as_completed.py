"""Waits for many results: each end is found, in order, with few commands."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.producer.played_worker import PlayedWorker, end
from tests.support.lossy_proxy import LossyProxy

import stoker.operations
import stoker.producer
import stoker.waiting
from stoker import JobCanceled, JobFailed, JobNotFound, Producer, ResultTimeout
from stoker.job_record import JobRecord

REQUEST = {"agent_id": "a", "prompt": "x"}


def submitted(producer, count):
    return producer.submit_many([REQUEST] * count)


def test_tickets_come_as_their_jobs_end_and_know_how(producer, worker, monkeypatch):
    first, second, third, fourth = tickets = submitted(producer, 4)
    fourth.cancel()
    worker.fail(third.job_id, "ModelMismatch: x")
    worker.finish(first.job_id, text="one")
    coming = producer.as_completed(tickets, timeout_s=20)
    assert {next(coming) for _ in range(3)} == {first, third, fourth}
    worker.finish(second.job_id, text="two")
    assert list(coming) == [second]
    monkeypatch.setattr(stoker.operations, "answer_to", None)  # no further command may be sent
    assert [first.result().text, second.result().text] == ["one", "two"]
    with pytest.raises(JobFailed, match="ModelMismatch"):
        third.result()
    with pytest.raises(JobCanceled):
        fourth.result()
    assert set(producer.as_completed(tickets)) == set(tickets)


def test_results_are_in_the_order_of_the_tickets_across_queues_and_with_repetitions(producer, worker):
    tickets = [producer.submit(**REQUEST, queue=f"q{n}") for n in range(4)]
    tickets.append(producer.ticket(tickets[0].job_id))
    tickets.append(tickets[1])
    for n in (2, 0, 3, 1):
        worker.finish(tickets[n].job_id, text=str(n))
    assert [result.text for result in producer.results(tickets, timeout_s=20)] == ["0", "1", "2", "3", "0", "1"]
    assert producer.results([]) == []


def test_an_error_is_raised_without_waiting_for_the_others_or_put_in_its_place(producer, worker):
    waits, failed = submitted(producer, 2)
    missing = producer.ticket("nobody")
    worker.fail(failed.job_id, "EngineFailed: x")
    with pytest.raises(JobFailed):
        producer.results([waits, failed], timeout_s=20)
    with pytest.raises(ResultTimeout) as late:
        producer.results([waits], timeout_s=0)
    assert late.value.job_id == waits.job_id
    found = producer.results([waits, failed, missing], timeout_s=0.1, return_errors=True)
    assert [type(error) for error in found] == [ResultTimeout, JobFailed, JobNotFound]
    assert [error.job_id for error in found] == [waits.job_id, failed.job_id, "nobody"]


def test_a_time_limit_of_nothing_looks_at_every_job_once(producer, worker):
    tickets = submitted(producer, 350)
    for ticket in tickets[::50]:
        worker.finish(ticket.job_id)
    seen = []
    with pytest.raises(ResultTimeout, match="342 others"):
        seen.extend(producer.as_completed(tickets, timeout_s=0))
    for ticket in producer.as_completed(tickets[::50], timeout_s=0):
        seen.append(ticket)
    assert set(seen) == set(tickets[::50])


def test_a_cancel_is_found_by_a_look_and_by_waits_with_short_limits(producer):
    looked_at, waited_for, waits = submitted(producer, 3)
    for canceled in (looked_at, waited_for):
        producer.ticket(canceled.job_id).cancel()
    found = producer.results([looked_at, waits], timeout_s=0, return_errors=True)
    assert [type(error) for error in found] == [JobCanceled, ResultTimeout]
    found = [producer.results([waited_for], timeout_s=0.01, return_errors=True) for _ in range(2)]
    assert type(found[1][0]) is JobCanceled


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh tickets", "tickets by id"])
def test_ends_that_write_no_entry_are_found(producer, worker, connection, fresh, monkeypatch):
    monkeypatch.setattr(stoker.waiting, "_CHECK_EVERY_S", 0.01)
    monkeypatch.setattr(stoker.waiting, "_CHECKED_AT_ONCE", 3)
    monkeypatch.setattr(stoker.producer, "blocking_slice_s", lambda connection: 0.01)
    tickets = submitted(producer, 10)
    if not fresh:
        tickets = [producer.ticket(ticket.job_id) for ticket in tickets]
    coming = producer.as_completed(tickets, timeout_s=20)
    worker.finish(tickets[0].job_id)
    assert next(coming) is tickets[0]  # now the wait includes all of them
    tickets[1].cancel()
    connection.delete(f"rq:job:{tickets[2].job_id}")
    connection.hset(f"rq:job:{tickets[8].job_id}", "origin", "large")  # it went on to the next model
    tickets[8].cancel()
    connection.hset(f"rq:job:{tickets[9].job_id}", "status", "failed")  # its entry was lost
    assert {next(coming) for _ in range(4)} == {tickets[n] for n in (1, 2, 8, 9)}
    for n, error in ((1, JobCanceled), (2, JobNotFound), (8, JobCanceled), (9, JobFailed)):
        with pytest.raises(error):
            tickets[n].result()


def test_of_more_jobs_than_are_blocked_on_those_that_end_out_of_order_are_found(producer, worker, monkeypatch):
    monkeypatch.setattr(stoker.waiting, "_BLOCKED_ON", 5)
    monkeypatch.setattr(stoker.waiting, "_BESIDE", 7)
    monkeypatch.setattr(stoker.waiting, "_FIRST_LOOK", 10)
    monkeypatch.setattr(stoker.waiting, "_SLICE_BESIDE_S", 0.001)
    tickets = submitted(producer, 60)
    coming = producer.as_completed(tickets, timeout_s=60)
    order = random.Random(3).sample(tickets, 60)
    for ticket in order:
        worker.finish(ticket.job_id)
        assert next(coming) is ticket
    assert next(coming, None) is None


def test_the_ends_of_a_slow_consumers_jobs_are_read_together(producer, worker, monkeypatch):
    monkeypatch.setattr(stoker.waiting, "_CHECK_EVERY_S", 0.0)
    tickets = submitted(producer, 60)
    coming = producer.as_completed(tickets, timeout_s=20)
    worker.finish(tickets[0].job_id)
    assert next(coming) is tickets[0]  # now the wait includes all of them
    for ticket in tickets[1:]:
        worker.finish(ticket.job_id)
    asked: list[object] = []
    monkeypatch.setattr(JobRecord, "whole", lambda *args: asked.append(args))
    assert set(coming) == set(tickets[1:])
    assert not asked


# --- on a real server ---


def commands_but(server, *ours):
    stats = server.info("commandstats")
    return sum(found["calls"] for name, found in stats.items() if name.removeprefix("cmdstat_") not in ours)


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh tickets", "tickets by id"])
def test_a_result_costs_at_most_three_commands(redis_url, server, fresh, monkeypatch):
    """Each job ends alone, after the one before was seen: the most expensive case."""
    monkeypatch.setattr(stoker.waiting, "_GATHER_S_PER_JOB", 0)
    monkeypatch.setattr(stoker.waiting, "_CHECK_EVERY_S", 3600.0)  # a busy machine would do more of them for each job
    with Producer(redis_url) as producer:
        tickets = submitted(producer, 400)
        if not fresh:
            tickets = [producer.ticket(ticket.job_id) for ticket in tickets]
        seen, order = threading.Semaphore(1), random.Random(1).sample(tickets, 400)
        ours = ("hset", "xadd", "info", "multi", "exec")
        before = commands_but(server, *ours)

        def play():
            for ticket in order:
                assert seen.acquire(timeout=20)
                end(server, ticket.job_id, ticket.job_id)

        with ThreadPoolExecutor(1) as pool:
            playing = pool.submit(play)
            for ticket in producer.as_completed(tickets, timeout_s=120):
                assert ticket.result().text == ticket.job_id
                seen.release()
            playing.result()
        assert commands_but(server, *ours) - before <= 1200


@pytest.mark.server
def test_results_that_are_there_already_cost_little_more_than_one_command_each(redis_url, server, monkeypatch):
    monkeypatch.setattr(stoker.waiting, "_CHECK_EVERY_S", 3600.0)
    with Producer(redis_url) as producer:
        tickets = submitted(producer, 400)
        for ticket in tickets:
            end(server, ticket.job_id, ticket.job_id)
        before = commands_but(server, "info")
        assert [result.text for result in producer.results(tickets)] == [ticket.job_id for ticket in tickets]
        assert commands_but(server, "info") - before < 440


@pytest.mark.slow
@pytest.mark.server
def test_lost_connections_lose_no_end(redis_url, server):
    with LossyProxy(int(redis_url.rsplit(":", 1)[1])) as proxy:
        counter = iter(range(10**9))
        with Redis.from_url(proxy.url, retry=Retry(NoBackoff(), 0)) as connection:
            producer = Producer(connection)
            tickets = submitted(producer, 200)
            PlayedWorker(server).finish(tickets[0].job_id)
            coming = producer.as_completed(tickets, timeout_s=60)
            found = [next(coming)]
            proxy.lose(lambda exchange: exchange.names[0] in {"XREAD", "HMGET"} and next(counter) % 2 == 1, times=10)
            for n, ticket in enumerate(tickets[1:]):
                PlayedWorker(server).fail(ticket.job_id, "E: x") if n % 2 else end(server, ticket.job_id)
                if n % 4 == 3:
                    found += [next(coming) for _ in range(4)]
            found += list(coming)
        assert len(proxy.lost) == 10
        assert len(found) == 200
        assert set(found) == set(tickets)
