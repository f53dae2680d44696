"""Waits for many results: each end is found, in order, with few commands."""

import pytest

import stoker.operations
import stoker.producer
import stoker.waiting
from stoker import JobCanceled, JobFailed, JobNotFound, ResultTimeout

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


def test_jobs_that_were_canceled_in_another_queue_are_found_in_a_few_looks(producer, connection, monkeypatch):
    tickets, looks = submitted(producer, 300), []
    for ticket in tickets:  # they went on to the next model
        connection.hset(f"rq:job:{ticket.job_id}", "origin", "large")
        ticket.cancel()
    check = stoker.waiting.Waiter._check

    def counted(self):
        looks.append(1)
        return check(self)

    monkeypatch.setattr(stoker.waiting, "_CHECK_EVERY_S", (0.0, 0.0))
    monkeypatch.setattr(stoker.waiting.Waiter, "_check", counted)
    assert set(producer.as_completed(tickets, timeout_s=300)) == set(tickets)
    assert len(looks) < 30


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
