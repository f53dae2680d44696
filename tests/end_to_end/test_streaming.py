"""A job's text as it is generated, from a worker process to a reader, also over a kill."""

import asyncio
import threading

import pytest
from tests.support.worker_process import SHORT, running_worker

from stoker import AsyncProducer, Restarted, TextChunk
from stoker_worker.engine.scripted import SCRIPTED_ANSWERS

pytestmark = pytest.mark.server


def text_of(events):
    """The text since the last restart."""
    text = ""
    for event in events:
        text = "" if isinstance(event, Restarted) else text + event.text
    return text


def test_readers_who_join_late_get_the_whole_text_and_all_get_the_same(producer, redis_url, connection, store):
    ticket = producer.submit(agent_id="a", prompt="x", max_tokens=300)
    with running_worker(redis_url, store, "--scripted-steps-per-s", "100") as worker:
        worker.wait_for(lambda: (ticket.status().tokens or 0) > 50)
        reading = ticket.stream(timeout_s=30)
        first = next(reading)
        assert len(first.text) > 50
        assert ticket.status().state == "started"

        async def read():
            async with AsyncProducer(redis_url) as other:
                return [event async for event in other.ticket(ticket.job_id).stream(timeout_s=30)]

        others = asyncio.run(read())
        text = ticket.result(timeout_s=30).text
        events = [first, *reading]
        assert text_of(events) == text_of(others) == text
        assert text_of(ticket.stream()) == text  # the job has ended
        assert 0 < connection.ttl(f"stoker:stream:{ticket.job_id}") <= 60
    assert all(isinstance(event, TextChunk) and event.text for event in events)
    assert first.markers == SCRIPTED_ANSWERS.markers("normal", with_calls=False)


def test_a_reader_of_a_recovered_job_gets_a_restart_event(producer, redis_url, store):
    ticket = producer.submit(agent_id="a", prompt="x", max_tokens=200, stream=True)
    events = []
    reader = threading.Thread(target=lambda: events.extend(ticket.stream(timeout_s=60)))
    reader.start()
    with running_worker(redis_url, store, "--scripted-steps-per-s", "50", env=SHORT, log_name="1.log") as worker:
        worker.wait_for(lambda: len(events) > 3)
        worker.kill()
    with running_worker(redis_url, store, "--scripted-steps-per-s", "200", env=SHORT, log_name="2.log"):
        result = ticket.result(timeout_s=30)
        reader.join(30)
    assert result.attempt == 2
    assert sum(isinstance(event, Restarted) for event in events) == 1
    assert text_of(events) == result.text
