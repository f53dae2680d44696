"""A job's progress in its `meta`: beside the producer's own values, and only while the job runs."""

import json

import pytest
from rq import Retry
from rq.job import Job
from rq.serializers import JSONSerializer
from tests.worker.queue.ends import finish
from tests.worker.queue.members import claim

from stoker_shared.errors import EngineFailed, GenerationTimedOut
from stoker_worker.ports import SequenceProgress

pytestmark = pytest.mark.server

RESULT = {"text": "done"}


def meta_of(connection, job):
    return json.loads(connection.hget(f"rq:job:{job.job_id}", "meta"))


@pytest.mark.parametrize("end", ["finish", "fail", "time out", "retry"])
def test_progress_comes_and_goes_beside_the_producers_own_values_in_meta(connection, enqueue, queue, end):
    job_id = enqueue("job", meta={"mine": [], "n": 2**60}, retry=Retry(max=1)).id
    (job,) = claim(queue)
    queue.withdrawn({})
    assert meta_of(connection, job)["progress"] == {"stage": "loading", "tokens": 0, "tokens_per_s": 0.0}
    theirs = Job.fetch(job_id, connection, JSONSerializer)
    theirs.meta["later"] = "é"
    theirs.save_meta()
    queue.withdrawn({job_id: SequenceProgress("decode", 7, 3.14159)})
    kept = {"mine": [], "n": 2**60, "later": "é"}
    progress = {"stage": "decode", "tokens": 7, "tokens_per_s": 3.1}
    assert meta_of(connection, job) == {**kept, "progress": progress}
    if end == "finish":
        job.finish(RESULT)
    else:
        error = EngineFailed("no") if end != "time out" else GenerationTimedOut("late")
        job.fail(error, partial_text="so far" if end == "time out" else None, may_retry=end == "retry")
    queue.withdrawn({job_id: SequenceProgress("decode", 8, 3.0)})  # it is not released yet
    if end == "time out":
        kept["partial"] = "so far"
    assert meta_of(connection, job) == kept


@pytest.mark.parametrize("meta", [b"\x80pickle", b"[1]", b'{"progress": "50 %"}', b'{"x": "' + b"y" * 20_000 + b'"}'])
def test_a_meta_that_cannot_hold_progress_is_left_unchanged(connection, submit, queue, meta):
    (job_id,) = submit("a")
    connection.hset(f"rq:job:{job_id}", "meta", meta)
    (job,) = claim(queue)
    queue.withdrawn({job_id: SequenceProgress("decode", 7, 3.0)})
    assert connection.hget(f"rq:job:{job_id}", "meta") == meta
    finish(job, RESULT)
    assert connection.hget(f"rq:job:{job_id}", "meta") == meta


def test_progress_never_overwrites_a_newer_meta_of_the_producer(connection, submit, queue, monkeypatch):
    (job_id,) = submit("a")
    (_job,) = claim(queue)
    note = queue._progress.note

    def overtaken(*args):
        note(*args)
        connection.hset(f"rq:job:{job_id}", "meta", '{"mine": 1}')

    monkeypatch.setattr(queue._progress, "note", overtaken)
    queue.withdrawn({job_id: SequenceProgress("decode", 7, 3.0)})
    assert connection.hget(f"rq:job:{job_id}", "meta") == b'{"mine": 1}'


def test_a_meta_that_grew_to_megabytes_while_the_job_ran_stays_and_is_not_read_twice_a_second(
    connection, submit, queue
):
    (job_id,) = submit("a")
    (job,) = claim(queue)
    queue.withdrawn({job_id: SequenceProgress("decode", 7, 3.0)})
    grown = json.dumps({"mine": "x" * 2**22})
    connection.hset(f"rq:job:{job_id}", "meta", grown)
    before = connection.info("stats")["total_net_output_bytes"]
    assert queue.withdrawn({job_id: SequenceProgress("decode", 8, 3.0)}) == []
    assert connection.info("stats")["total_net_output_bytes"] - before < 100_000
    finish(job, RESULT)
    assert connection.hget(f"rq:job:{job_id}", "meta") == grown.encode()
