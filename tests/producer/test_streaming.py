"""Reading a stream: the events made from its entries, and a job that ends without entries."""

import threading

import pytest
from redis import Redis

from stoker import JobCanceled, JobFailed, JobNotFound, Restarted, ResultTimeout, TextChunk
from stoker.operations import run
from stoker.streaming import StreamReader
from stoker_shared.answer_parts import Edge, Markers

pytestmark = pytest.mark.server


@pytest.fixture
def ticket(producer):
    return producer.submit(agent_id="a", prompt="x")


@pytest.fixture
def say(connection, ticket):
    def say(run, kind, text="", **fields):
        connection.xadd(f"stoker:stream:{ticket.job_id}", {"run": run, "kind": kind, "text": text, **fields})

    return say


def test_a_request_for_the_stream_marks_the_job_and_makes_no_missing_job(producer, connection, ticket):
    key = f"rq:job:{ticket.job_id}"
    assert not connection.hexists(key, "stoker_stream")
    with pytest.raises(ResultTimeout, match="still queued"):
        list(ticket.stream(timeout_s=0))
    assert connection.hget(key, "stoker_stream") == b"1"
    connection.delete(key)
    with pytest.raises(JobNotFound):
        list(ticket.stream())
    with pytest.raises(JobNotFound):
        list(producer.ticket("never").stream())
    assert not connection.exists(key)


def test_entries_read_together_are_one_chunk_and_the_rest_comes_from_the_result(worker, ticket, say):
    say("1", "whole", "he")
    say("1", "more", "ll")
    reading = ticket.stream(timeout_s=30)
    assert next(reading) == TextChunk("hell")
    say("1", "whole", "hell")  # text that was read is not repeated
    worker.finish(ticket.job_id, text="hello")
    say("1", "end")
    assert list(reading) == [TextChunk("o")]


def test_another_run_restarts_the_text_also_if_it_was_not_streamed(worker, ticket, say):
    say("1", "whole", "one")
    reading = ticket.stream(timeout_s=30)
    assert next(reading) == TextChunk("one")
    say("1", "end")  # of a run that failed and is retried
    say("2", "whole", "")
    say("2", "more", "two")
    assert next(reading) == Restarted()
    assert next(reading) == TextChunk("two")
    worker.finish(ticket.job_id, text="three")
    assert list(reading) == [Restarted(), TextChunk("three")]


def test_text_has_the_markers_of_its_run_as_far_as_they_are_known(worker, ticket, say):
    markers = Markers(first="reasoning", edges=(Edge("reasoning", "</think>", "normal"),))
    reading = ticket.stream(timeout_s=30)
    for kind, text, told in (
        ("whole", "a", markers.model_dump_json()),
        ("more", "b", None),
        ("whole", "abc", '{"first": "normal", "edges": [["normal", "", "normal"]]}'),
        ("whole", "abcd", '{"first": "dreaming"}'),
        ("whole", "abcde", markers.model_dump_json()),
    ):
        say("1", kind, text, **({"markers": told} if told else {}))
        chunk = next(reading)
        assert (chunk.text, chunk.markers) == (text[-1], None if chunk.text in "cd" else markers)
    worker.finish(ticket.job_id, text="abcdef")
    assert list(reading) == [TextChunk("f")]


def test_a_job_that_has_ended_is_read_from_its_result(connection, worker, ticket):
    worker.finish(ticket.job_id, text="hello")
    assert list(ticket.stream()) == [TextChunk("hello")]
    assert not connection.hexists(f"rq:job:{ticket.job_id}", "stoker_stream")


def test_a_short_answer_that_never_was_in_the_stream_wakes_its_reader(connection, redis_url, worker, ticket):
    reader = StreamReader(ticket.job_id, timeout_s=None, slice_s=60)
    events = []

    def read():
        with Redis.from_url(redis_url, socket_timeout=None) as patient:
            while not reader.is_over:
                events.extend(run(patient, reader.read()))

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    while not connection.info("clients")["blocked_clients"]:
        pass
    worker.fail(ticket.job_id, "EngineFailed: a try of several", status="queued")
    worker.finish(ticket.job_id, text="hello")
    reading.join(30)
    assert events == [TextChunk("hello")]


def test_a_job_that_fails_raises_where_its_text_ends(worker, ticket, say):
    say("1", "whole", "so f")
    reading = ticket.stream(timeout_s=30)
    assert next(reading) == TextChunk("so f")
    worker.fail(ticket.job_id, "GenerationTimedOut: late", partial="so far")
    with pytest.raises(JobFailed) as failed:
        list(reading)
    assert failed.value.partial_text == "so far"


def test_the_stream_of_a_job_that_is_canceled_ends(ticket, say):
    say("1", "whole", "so f")
    reading = ticket.stream(timeout_s=30)
    assert next(reading) == TextChunk("so f")
    assert ticket.cancel()
    with pytest.raises(JobCanceled):
        list(reading)
