"""A scrape's look at Redis: the queues that no live worker listens to."""

import pytest

from stoker_worker.queue.depths import QueueDepths


@pytest.fixture
def depths(connection):
    return QueueDepths(connection, ["generate"])


def test_jobs_wait_without_a_worker_until_one_listens_and_again_once_it_was_killed(depths, submit, join, connection):
    connection.rpush("rq:queue:misspelt", "a", "b")
    connection.rpush(b"rq:queue:\xff", "c")
    connection.sadd("rq:queues", "rq:queue:misspelt", b"rq:queue:\xff", "rq:queue:empty")
    submit("x")
    assert depths.without_worker() == {"generate": 1, "misspelt": 2, "\ufffd": 1}
    join("one")
    assert depths.without_worker() == {"misspelt": 2, "\ufffd": 1}
    [worker] = connection.smembers("rq:workers:generate")
    connection.delete(worker)  # as its time to live does after a kill
    assert "generate" in depths.without_worker()


def test_only_the_100_queues_with_most_jobs_become_series(depths, connection):
    with connection.pipeline() as pipeline:
        for n in range(150):
            pipeline.rpush(f"rq:queue:q{n}", *range(n + 1)).sadd("rq:queues", f"rq:queue:q{n}")
        pipeline.execute()
    found = depths.without_worker()
    assert len(found) == 100
    assert min(found.values()) == 51


def test_a_queue_or_a_set_of_workers_of_another_type_is_left_out(depths, connection):
    connection.set("rq:queue:odd", "x")
    connection.rpush("rq:queue:odder", "a")
    connection.set("rq:workers:odder", "x")
    connection.sadd("rq:queues", "rq:queue:odd", "rq:queue:odder", "foreign")
    assert depths.without_worker() == {}
    connection.delete("rq:queues")
    connection.set("rq:queues", "x")
    assert depths.without_worker() == {}
