"""Redis loses its data under a worker: all of it, or what was written since a replica was copied."""

import pytest
from tests.worker.queue.ends import finish
from tests.worker.queue.members import claim

from stoker_shared.errors import JobLost, OwnershipLost, QueueHeld
from stoker_shared.wire import FENCE_KEY, LEASE_KEY, RENEWALS_KEY
from stoker_worker.queue.lease import Lease

pytestmark = pytest.mark.server


class Replica:
    """All keys as they were when it was made; they expire as if no time had passed since."""

    def __init__(self, connection):
        self._connection = connection
        self._keys = {key: (connection.dump(key), connection.pttl(key)) for key in connection.scan_iter()}

    def is_promoted(self):
        self._connection.flushall()
        for key, (value, ttl_ms) in self._keys.items():
            self._connection.restore(key, max(0, ttl_ms), value)


@pytest.fixture
def worker(join):
    return join("m")


def test_each_flush_of_the_server_is_noticed_once_with_the_number_of_jobs_in_flight(worker, connection, submit, caplog):
    submit("a", "b")
    assert len(claim(worker)) == 2
    assert worker.beat()
    assert worker.data_loss().times == 0
    connection.flushall()
    assert worker.beat()
    assert worker.beat()
    loss = worker.data_loss()
    assert (loss.times, loss.jobs) == (1, 2)
    assert loss.ago_s < 60
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "Redis has lost data" in line.message
    assert "2 jobs were in flight" in line.message
    connection.flushall()
    assert worker.beat()
    assert worker.data_loss().times == 2


def test_an_old_replica_is_noticed_and_does_not_depose_its_worker(worker, connection, join):
    worker.beat()
    old = Replica(connection)
    worker.beat()
    worker.beat()
    old.is_promoted()
    assert worker.beat()
    assert worker.data_loss().times == 1


def test_a_replica_from_before_the_worker_took_its_name_does_not_depose_it(connection):
    before = Lease(connection, "m", ["q"], worker_name="before", ttl_s=30)
    before.acquire()
    old = Replica(connection)
    before.release()
    mine = Lease(connection, "m", ["q"], worker_name="mine", ttl_s=30)
    mine.acquire()
    assert mine.renew()
    old.is_promoted()
    assert connection.get(LEASE_KEY.format(member="m")) == before.value.encode()
    assert mine.renew()
    assert not before.renew()
    assert int(connection.get(FENCE_KEY.format(member="m"))) == 2


def test_of_two_with_one_name_after_a_loss_one_goes_on(connection):
    first = Lease(connection, "m", ["q"], worker_name="first", ttl_s=30)
    first.acquire()
    first.release()
    first.acquire()
    connection.flushall()
    second = Lease(connection, "m", ["q"], worker_name="second", ttl_s=30)
    second.acquire()  # with a lower number: Redis has forgotten the others
    assert first.renew()
    assert not second.renew()
    with pytest.raises(QueueHeld):
        Lease(connection, "m", ["q"], worker_name="third", ttl_s=30).acquire()


def test_an_outage_of_any_length_and_lost_replies_are_no_loss(worker, connection):
    worker.beat()
    connection.delete(LEASE_KEY.format(member="m"))  # it ran out
    worker._registration.register_death()
    assert worker.beat()
    connection.hincrby(RENEWALS_KEY, "m", 3)  # carried out, and the replies got lost
    assert worker.beat()
    assert worker.data_loss().times == 0


def test_jobs_in_flight_end_as_lost_before_any_heartbeat(worker, connection, submit):
    submit("a", "b", "c")
    ending, failing, withdrawn = claim(worker)
    worker.beat()
    connection.flushall()
    assert set(worker.withdrawn({})) == {ending, failing, withdrawn}
    for end in (ending.begin_save, lambda: ending.finish({}), lambda: failing.fail(ValueError()), withdrawn.stop):
        with pytest.raises(JobLost):
            end()
    assert worker.data_loss().jobs == 3
    ending.drop()
    assert not connection.keys("rq:job:*")


def test_an_id_that_is_enqueued_again_after_the_loss_waits_for_the_lost_run_to_end(worker, connection, producer):
    """Its producer repeats what Redis has lost, under the same id."""
    producer.submit(prompt="x", job_id="j")
    [lost] = claim(worker)
    worker.beat()
    connection.flushall()
    worker.beat()
    producer.submit(prompt="x", job_id="j")
    assert claim(worker) == []
    assert worker.withdrawn({}) == [lost]
    with pytest.raises(JobLost):
        lost.stop()
    lost.release()
    assert [job.job_id for job in claim(worker)] == ["j"]


@pytest.mark.parametrize("there_was_a_loss", [False, True])
def test_a_job_that_was_deleted_is_not_lost(worker, connection, submit, there_was_a_loss):
    worker.beat()
    if there_was_a_loss:
        connection.flushall()
        worker.beat()
    (job_id,) = submit("a")
    (job,) = claim(worker)
    worker.beat()
    connection.delete(f"rq:job:{job_id}")
    assert worker.withdrawn({}) == [job]
    job.stop()
    with pytest.raises(OwnershipLost) as raised:
        job.finish({})
    assert not isinstance(raised.value, JobLost)


def test_a_job_that_an_old_replica_has_goes_on_and_can_be_canceled(worker, connection, producer, submit):
    kept, canceled = submit("a", "b")
    jobs = {job.job_id: job for job in claim(worker)}
    old = Replica(connection)
    worker.beat()
    old.is_promoted()
    worker.beat()
    assert worker.withdrawn({}) == []
    finish(jobs[kept], {"text": "x"})
    producer.ticket(canceled).cancel()
    assert worker.withdrawn({}) == [jobs[canceled]]
    jobs[canceled].stop()
