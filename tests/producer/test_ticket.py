"""Tickets see the end of a job, on jobs that RQ's own code ends."""

import base64
import json
import tracemalloc
import zlib

import pytest
from tests.producer.played_worker import WORKER

from stoker import JobCanceled, JobFailed, JobNotFound, Producer, ResultTimeout, TicketStatus
from stoker.operations import Watched


@pytest.fixture
def ticket(producer):
    return producer.submit(agent_id="a", prompt="hi")


@pytest.fixture(params=["alone", "with others"])
def end_of(request, producer):
    """Waits for a job as a program does that has one ticket, or as one does that has many."""
    if request.param == "alone":
        return lambda ticket, timeout_s=None: ticket.result(timeout_s)
    return lambda ticket, timeout_s=None: producer.results([producer.ticket(ticket.job_id)], timeout_s)[0]


def test_a_result_can_be_read_by_another_process_and_more_than_once(ticket, worker, connection):
    worker.finish(ticket.job_id)
    other = Producer(connection)
    assert other.ticket(ticket.job_id).result(1) == other.ticket(ticket.job_id).result(1) == ticket.result()


@pytest.mark.parametrize(
    ("written", "reason", "kind", "retryable"),
    [
        ("ContextLimitExceeded: 9000 + 256 tokens > 8192", None, "ContextLimitExceeded", False),
        ("EngineFailed: MemoryError: no more", None, "EngineFailed", True),
        ("AgentVersionNotSaved: disk full", None, "AgentVersionNotSaved", True),
        ("GenerationTimedOut: after 3600 s", None, "GenerationTimedOut", False),
        ("ZeroDivisionError: division by zero", None, "Other", False),
        ("Any: a name of the module that is no error", None, "Other", False),
        ("no name at all", None, "Other", False),
        ("Traceback (most recent call last):\n  File\nWrongWorker: no\n\n", "WrongWorker: no", "WrongWorker", False),
        ("", "the worker gave no reason", "Other", False),
    ],
)
def test_a_failed_job_raises_the_workers_own_line(end_of, ticket, worker, written, reason, kind, retryable):
    worker.fail(ticket.job_id, written, partial="so far")
    with pytest.raises(JobFailed) as caught:
        end_of(ticket)
    error = caught.value
    assert (error.reason, error.kind, error.retryable) == (reason or written, kind, retryable)
    assert error.partial_text == "so far"


def test_a_failure_that_is_not_base64_is_a_failed_job(ticket, worker, connection):
    worker.fail(ticket.job_id, "E: x")
    stream = f"rq:results:{ticket.job_id}"
    [(entry_id, fields)] = connection.xrange(stream)
    connection.delete(stream)
    connection.xadd(stream, fields | {b"exc_string": b"abc"}, entry_id)
    with pytest.raises(JobFailed, match="gave no reason"):
        ticket.result()


def test_meta_written_by_other_clients_does_no_harm(producer, ticket, worker, connection):
    worker.fail(ticket.job_id, "E: x")
    for meta in (b"\x80\x04\x95", b"[]", b'{"partial": 3}', b"nonsense"):
        connection.hset(f"rq:job:{ticket.job_id}", "meta", meta)
        with pytest.raises(JobFailed) as caught:
            producer.ticket(ticket.job_id).result()  # its own ticket keeps the end that it has read
        assert caught.value.partial_text is None


def test_no_such_job_is_not_found(producer):
    ticket = producer.ticket("nope")
    for call in (ticket.result, ticket.status, ticket.cancel):
        with pytest.raises(JobNotFound, match="nope"):
            call()


def test_a_job_that_is_stopped_or_whose_result_is_gone_or_another_jobs_has_an_error_of_its_own(
    end_of, producer, worker, connection
):
    stopped, gone, foreign = producer.submit_many([{"agent_id": "a", "prompt": "hi"}] * 3)
    worker.stop(stopped.job_id)  # RQ writes a failure for it
    with pytest.raises(JobCanceled, match="stopped"):
        end_of(stopped)
    worker.finish(gone.job_id)
    connection.delete(f"rq:results:{gone.job_id}")
    with pytest.raises(JobNotFound, match="expired"):
        end_of(gone)
    worker.finish(foreign.job_id, value={"something": "else"})
    with pytest.raises(JobFailed, match="UnreadableResult"):
        end_of(foreign)


def retried(worker, job_id):
    worker.start(job_id)
    worker.retry(job_id)


def requeued(worker, job_id):
    worker.fail(job_id, "EngineFailed: x")
    worker.job(job_id).requeue()


@pytest.mark.parametrize("again", [retried, requeued])
def test_an_end_after_which_the_job_runs_again_is_none(end_of, ticket, worker, again):
    again(worker, ticket.job_id)
    with pytest.raises(ResultTimeout):
        end_of(ticket, timeout_s=0)
    worker.finish(ticket.job_id, text="second try")
    assert end_of(ticket).text == "second try"


def test_a_job_written_and_ended_in_another_language_is_read_like_our_own(producer, connection, worker):
    data = json.dumps(["stoker_shared.task.generate", None, [], {"request": {"agent_id": "a", "prompt": "x"}}])
    connection.hset("rq:job:polyglot", mapping={"status": "queued", "origin": "generate", "data": data})
    connection.rpush("rq:queue:generate", "polyglot")
    assert producer.ticket("polyglot").status() == TicketStatus("queued", position=0)
    error = base64.b64encode(b"TemplateError: uncompressed").decode()
    connection.hset("rq:job:polyglot", "status", "failed")
    connection.xadd("rq:results:polyglot", {"type": 2, "exc_string": error})
    with pytest.raises(JobFailed, match="TemplateError: uncompressed"):
        producer.ticket("polyglot").result()


def test_what_would_unpack_to_gigabytes_costs_a_producer_little(ticket, worker, connection):
    bomb = zlib.compress(bytes(2**28))
    worker.fail(ticket.job_id, "old")
    many = b"[" + b"[]," * 5_000_000 + b"0]"
    connection.hset(f"rq:job:{ticket.job_id}", mapping={"meta": many, "exc_info": bomb})
    connection.xadd(f"rq:results:{ticket.job_id}", {"type": 2, "exc_string": base64.b64encode(bomb)})
    tracemalloc.start()
    try:
        assert ticket.status().state == "failed"
        with pytest.raises(JobFailed):
            ticket.result()
        assert tracemalloc.get_traced_memory()[1] < 150 * 2**20
    finally:
        tracemalloc.stop()


def test_status_tells_the_place_in_the_queue_then_worker_and_tokens_then_the_end(producer, worker):
    producer.submit(agent_id="a", prompt="first")
    ticket = producer.submit(agent_id="a", prompt="second")
    assert ticket.status() == TicketStatus("queued", position=1)
    worker.start(ticket.job_id)
    assert ticket.status() == TicketStatus("started", worker=WORKER)
    worker.start(ticket.job_id, tokens=17)
    assert ticket.status() == TicketStatus("started", worker=WORKER, stage="decode", tokens=17, tokens_per_s=8.5)
    worker.finish(ticket.job_id)
    assert ticket.status() == TicketStatus("finished")


def test_an_impossible_job_id_is_a_value_error(producer):
    for job_id in ("", "a\nb", "\ud800"):
        with pytest.raises(ValueError, match="job id"):
            producer.ticket(job_id)


# --- cancel ---


def test_a_job_that_has_ended_cannot_be_canceled(producer, worker):
    finished, failed, stopped, canceled = tickets = producer.submit_many([{"agent_id": "a", "prompt": "hi"}] * 4)
    worker.finish(finished.job_id)
    worker.fail(failed.job_id, "E: x")
    worker.stop(stopped.job_id)
    canceled.cancel()
    before = [ticket.status() for ticket in tickets]
    assert [ticket.cancel() for ticket in tickets] == [False] * 4
    assert [ticket.status() for ticket in tickets] == before


def test_a_job_that_ends_while_it_is_being_canceled_stays_finished(ticket, worker, connection, each_step, monkeypatch):
    def lose_the_race(step):
        if isinstance(step, Watched):
            monkeypatch.undo()
            worker.finish(ticket.job_id)

    each_step(lose_the_race)
    assert ticket.cancel() is False
    assert ticket.status() == TicketStatus("finished")
    assert connection.zcard("rq:canceled:generate") == 0
