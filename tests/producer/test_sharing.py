"""A producer in other processes: pickled, or used after a fork."""

import fcntl
import multiprocessing
import os
import pickle
from typing import Any

import pytest
from fakeredis import FakeAsyncRedis, FakeRedis
from tests.producer.played_worker import PlayedWorker

from stoker import AsyncProducer, JobCanceled, JobFailed, JobNotFound, Producer, ResultTimeout
from stoker_shared.environment import publish

REQUEST: dict[str, Any] = {"agent_id": "a", "prompt": "x"}


@pytest.mark.parametrize("kind", [Producer, AsyncProducer])
def test_a_producer_made_from_a_url_can_be_pickled_and_shows_no_password(kind):
    copy = pickle.loads(pickle.dumps(kind("redis://:hunter2@example.org:1/3", queue="high")))
    assert repr(copy) == f"{kind.__name__}(redis at example.org:1/3, queue='high')"
    assert copy._connection.connection_pool.connection_kwargs["password"] == "hunter2"


@pytest.mark.parametrize("kind", [Producer, AsyncProducer])
def test_without_a_url_a_producer_finds_the_server_as_the_command_does_and_so_does_its_pickle(
    kind, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("STOKER_REDIS_URL", "")
    assert "redis at 127.0.0.1:6379/0" in repr(kind())
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        publish("redis://:hunter2@127.0.0.1:7001", tmp_path / "lock")
        found = kind()
    monkeypatch.setenv("STOKER_REDIS_URL", "redis://example.org:1/3")
    assert "redis at example.org:1/3" in repr(kind())
    assert "redis at 127.0.0.1:7001" in repr(pickle.loads(pickle.dumps(found)))


def test_the_error_of_an_object_that_cannot_be_pickled_has_advice():
    tickets = [kind("redis://localhost").ticket("j") for kind in (Producer, AsyncProducer)]
    for one, helps in (
        (Producer(FakeRedis()), "from a URL"),
        (AsyncProducer(FakeAsyncRedis()), "from a URL"),
        *((ticket, "job_id") for ticket in tickets),
    ):
        with pytest.raises(TypeError, match=helps):
            pickle.dumps(one)


def test_an_error_is_the_same_in_another_process():
    failed = JobFailed("j", "GenerationTimedOut: x", "so far")
    for error in (failed, JobCanceled("j", "canceled"), JobNotFound("j"), ResultTimeout("j", "still queued")):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


@pytest.mark.server
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_parent_and_forked_child_use_one_producer_and_its_tickets_at_a_time(redis_url):
    with Producer(redis_url) as producer:
        tickets = producer.submit_many([REQUEST] * 20)
        for ticket in tickets:
            PlayedWorker(producer._connection).finish(ticket.job_id, text=ticket.job_id)
        context = multiprocessing.get_context("fork")
        answers = context.SimpleQueue()

        def read():
            ids = [ticket.result(10).text for ticket in tickets]
            ids += [result.text for result in producer.results(tickets)]
            answers.put((ids, producer.submit(**REQUEST).job_id))

        children = [context.Process(target=read) for _ in range(3)]
        for child in children:
            child.start()
        for _ in range(20):
            assert [ticket.result(10).text for ticket in tickets] == [ticket.job_id for ticket in tickets]
        found = [answers.get() for _ in children]
        for child in children:
            child.join(20)
            assert child.exitcode == 0
        assert all(ids == [ticket.job_id for ticket in tickets] * 2 for ids, _ in found)
        assert {producer.ticket(job_id).status().state for _, job_id in found} == {"queued"}
