"""The stream of a job's text: only for readers, bounded, and written only by the job's own run."""

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.worker.queue.ends import drop, finish, give_back
from tests.worker.queue.looking import taken_over

from stoker_shared.answer_parts import Edge, Markers
from stoker_shared.errors import RedisUnavailable
from stoker_worker.ports import Busy, TextSoFar
from stoker_worker.queue import progress as streams
from stoker_worker.queue.rq_queue import open_queue
from stoker_worker.settings import read_settings

pytestmark = pytest.mark.server

RESULT = {"text": "done"}
MARKERS = Markers(first="reasoning", edges=(Edge("reasoning", "</think>", "normal"),))
TELLS = 800  # past the bound in bytes, then past that in entries


def claim(queue):
    (job,) = queue.claim(8, Busy())
    return job


@pytest.fixture
def job(submit, queue):
    """A running job with a reader."""
    submit("a", stream=True)
    return claim(queue)


def tell(queue, job, text):
    queue.tell({job.claim_number: TextSoFar(text, MARKERS)})


def entries(connection, job):
    found = connection.xrange(f"stoker:stream:{job.job_id}")
    assert all(fields[b"run"].decode() == job.run.execution.id for _, fields in found)
    for _, fields in found:
        told = {Markers.model_validate_json(fields[b"markers"])} if b"markers" in fields else set()
        assert told == ({MARKERS} if fields[b"kind"] == b"whole" else set())
    return [(fields[b"kind"].decode(), fields[b"text"].decode()) for _, fields in found]


def test_a_stream_has_the_whole_text_first_then_the_additions_then_the_end(connection, queue, job):
    assert queue.listened_to() == {job.claim_number}
    for text in ("", "one", "one", "one two"):
        tell(queue, job, text)
    assert entries(connection, job) == [("whole", ""), ("more", "one"), ("more", " two")]
    finish(job, RESULT)
    assert entries(connection, job)[-1] == ("end", "")
    assert 0 < connection.ttl(f"stoker:stream:{job.job_id}") <= 60
    assert queue.listened_to() == frozenset()


def test_a_job_that_ends_before_its_text_was_looked_at_has_an_end_in_its_stream(connection, queue, job):
    finish(job, RESULT)
    assert entries(connection, job) == [("end", "")]
    assert 0 < connection.ttl(f"stoker:stream:{job.job_id}") <= 60


def test_a_job_without_a_reader_has_no_stream_and_costs_no_command(connection, submit, queue):
    submit("a")
    job = claim(queue)
    connection.config_resetstat()
    for _ in range(10):
        assert queue.listened_to() == frozenset()
        tell(queue, job, "text")
    assert connection.info("commandstats").keys() <= {"cmdstat_config|resetstat", "cmdstat_info"}
    finish(job, RESULT)
    assert not connection.keys("stoker:stream:*")


def test_a_reader_may_come_at_any_time(connection, submit, queue):
    (job_id,) = submit("a")
    job = claim(queue)
    connection.hset(f"rq:job:{job_id}", "stoker_stream", 1)
    assert queue.withdrawn({}) == []
    tell(queue, job, "so far")
    assert entries(connection, job) == [("whole", "so far")]


@pytest.mark.slow
def test_a_stream_is_bounded_in_entries_and_bytes_and_always_begins_with_the_whole_text(connection, queue, job):
    text, written, longest = "", 0, 0
    for n in range(TELLS):
        text += str(n % 10) * (1 + n % 40)
        tell(queue, job, text)
        found = entries(connection, job)
        written += len(found[-1][1])
        assert found[0][0] == "whole"
        longest = max(longest, len(found))
        assert "".join(part for _, part in found) == text
        assert sum(len(part) for _, part in found) == len(text)
    assert longest == streams.MAX_ENTRIES
    assert written < len(text) * TELLS / streams.MAX_ENTRIES


def test_a_text_over_the_limit_is_streamed_up_to_it(connection, queue, job, monkeypatch):
    monkeypatch.setattr(streams, "MAX_TEXT_BYTES", 100)
    for n in range(0, 200, 10):
        tell(queue, job, "é" * n)
    assert "".join(part for _, part in entries(connection, job)) == "é" * 50


def test_a_deposed_worker_writes_nothing_into_the_stream_of_the_next_run(connection, queue, job, redis_url):
    tell(queue, job, "old")
    taken_over(connection, and_left=True)
    with open_queue(read_settings({"redis_url": redis_url}), redis_url) as opened:
        opened.rq_queue.recover()
        again = claim(opened.rq_queue)
        tell(opened.rq_queue, again, "n")
        tell(queue, job, "old and late")
        drop(job)
        assert entries(connection, again) == [("whole", "n")]


def test_after_a_lost_reply_the_whole_text_is_written_again(connection, queue, job, monkeypatch):
    tell(queue, job, "one")
    real = queue._streams._tell

    def lost(**options):
        real(**options)
        raise RedisConnectionError("the reply is lost")

    monkeypatch.setattr(queue._streams, "_tell", lost)
    with pytest.raises(RedisUnavailable):
        tell(queue, job, "one two")
    monkeypatch.setattr(queue._streams, "_tell", real)
    tell(queue, job, "one two")
    assert entries(connection, job) == [("whole", "one two")]


def test_a_key_that_is_no_stream_affects_only_its_own_reader(connection, submit, queue, caplog):
    bad, good = submit("a", "b", stream=True)
    connection.set(f"stoker:stream:{bad}", "text")
    jobs = {job.job_id: job for job in queue.claim(8, Busy())}
    for _ in range(2):
        queue.tell({jobs[name].claim_number: TextSoFar("one", MARKERS) for name in (bad, good)})
        assert queue.withdrawn({}) == []
    assert entries(connection, jobs[good]) == [("whole", "one")]
    assert caplog.text.count("cannot be read along") == 1
    finish(jobs[bad], RESULT)
    assert connection.get(f"stoker:stream:{bad}") == b"text"


def test_a_deleted_stream_begins_again_with_the_whole_text(connection, queue, job):
    tell(queue, job, "one")
    connection.delete(f"stoker:stream:{job.job_id}")
    tell(queue, job, "one two")
    tell(queue, job, "one two")
    assert entries(connection, job) == [("whole", "one two")]


def test_a_job_that_is_given_back_has_no_end_in_its_stream(connection, queue, job):
    tell(queue, job, "one")
    give_back([job], counts_as_attempt=False)
    assert entries(connection, job) == [("whole", "one")]
    again = claim(queue)
    tell(queue, again, "")
    assert entries(connection, again) == [("whole", "")]


def test_a_job_that_ends_while_its_reader_is_noticed_leaves_no_open_stream(connection, submit, queue, monkeypatch):
    (job_id,) = submit("a")
    job = claim(queue)
    connection.hset(f"rq:job:{job_id}", "stoker_stream", 1)
    real = queue._streams.open

    def open_late(claim_number, run):
        finish(job, RESULT)  # which a finisher thread does at any moment, then releases the job
        real(claim_number, run)

    monkeypatch.setattr(queue._streams, "open", open_late)
    queue.withdrawn({})
    assert queue.listened_to() == frozenset()
