"""The reply of each transaction and script of the worker is lost in turn. Order, results, and dependents are as if none
had been lost."""

import itertools
from urllib.parse import urlsplit

import pytest
from rq import Queue, Retry
from rq.job import Dependency, Job
from rq.serializers import JSONSerializer
from tests.support.lossy_proxy import LossyProxy
from tests.worker.queue.ends import drop, fail, finish, give_back, stop

from stoker_shared.errors import GenerationTimedOut, OwnershipLost, RedisUnavailable
from stoker_shared.wire import TASK_PATH
from stoker_worker.ports import Busy
from stoker_worker.queue.client import may_pass
from stoker_worker.queue.rq_queue import open_queue
from stoker_worker.settings import read_settings

pytestmark = pytest.mark.server

REGISTRIES = ("wip", "scheduled", "deferred", "ready")
ONE_AGENT = {
    "first": "finished", "second": "failed", "third": "finished", "after-first": "finished", "after-second": "finished",
}  # fmt: skip
OTHER_ENDS = {
    "stopped": "stopped", "canceled": "canceled", "refused": "failed", "given-back": "finished", "one": "finished",
    "two": "finished",
}  # fmt: skip
IN_ORDER = ("first", "second", "third")


@pytest.fixture
def proxy(redis_url):
    with LossyProxy(urlsplit(redis_url).port) as proxy:
        yield proxy


class Round:
    """One run of jobs with several kinds of ends. It calls the worker's parts in turn, so that the n-th write is the
    same one in each round. Job ids contain the round's number."""

    def __init__(self, queue, connection, number, outcomes):
        self.queue, self.connection, self.number, self.outcomes = queue, connection, number, outcomes
        self.plain = Queue("generate", connection=connection, serializer=JSONSerializer)
        self.running = {}
        self.starts = []
        self.given_back = False

    def name(self, job_id):
        return f"{job_id}-{self.number}"

    def enqueue(self, job_id, agent, **options):
        request = {"agent_id": agent, "prompt": "x"}
        self.plain.enqueue(options.pop("func", TASK_PATH), request=request, job_id=self.name(job_id), **options)

    def enqueue_all(self):
        if self.outcomes is ONE_AGENT:
            self.enqueue("first", "a")
            self.enqueue("second", "a", retry=Retry(max=1))
            self.enqueue("third", "a")
            self.enqueue("after-first", "b", depends_on=self.name("first"))
            self.enqueue("after-second", "c", depends_on=Dependency(jobs=[self.name("second")], allow_failure=True))
            return
        self.enqueue("stopped", "d")
        self.enqueue("canceled", "e")
        self.enqueue("refused", "f", func="os.getcwd")
        self.enqueue("given-back", "g")
        for job_id, agent in (("one", "h"), ("two", "i")):
            self.enqueue(job_id, agent)

    def play(self):
        self.enqueue_all()
        for _ in range(20):
            self.claim()
            for job in self.when_redis_is_there(lambda: self.queue.withdrawn({})):
                self.end(job, stop)
            for job in list(self.running.values()):
                self.go_on(job)
            self.when_redis_is_there(self.queue.tidy)
            self.when_redis_is_there(self.queue.beat)
            if not self.running and self.when_redis_is_there(self.queue.is_empty):
                return
        raise AssertionError("the jobs do not end")

    def claim(self):
        busy = Busy().beside(job.memory_use for job in self.running.values())
        try:
            claimed = self.queue.claim(8, busy)
        except RedisUnavailable:  # as the fetcher does
            self.when_redis_is_there(self.queue.recover)
            return
        for job in claimed:
            assert not busy.bars(job.memory_use)
            busy = busy.beside([job.memory_use])
            self.running[job.job_id] = job
            self.starts.append((job.request.agent_id, job.job_id.rpartition("-")[0]))

    def go_on(self, job):
        what = job.job_id.rpartition("-")[0]
        if what == "second":
            self.end(job, lambda job: fail(job, GenerationTimedOut("late")))
        elif what == "stopped":
            self.queue._registration.in_flight.ask_to_stop(job.job_id)
        elif what == "canceled":
            Job.fetch(job.job_id, self.connection, JSONSerializer).cancel()
        elif what == "given-back" and not self.given_back:
            self.given_back = True
            self.end(job, lambda job: give_back([job], counts_as_attempt=False))
        else:
            self.end(job, lambda job: finish(job, {"text": what}))

    def end(self, job, how):
        """End the job as the finisher does."""
        try:
            self.when_redis_is_there(lambda: how(job))
        except OwnershipLost:
            self.when_redis_is_there(lambda: drop(job))
        del self.running[job.job_id]

    def when_redis_is_there(self, call):
        for _ in range(5):
            try:
                return call()
            except Exception as error:
                if not may_pass(error):
                    raise
        raise AssertionError("Redis does not come back")

    def check(self):
        ids = {job_id: self.name(job_id) for job_id in self.outcomes}
        states = {job_id: self.connection.hget(f"rq:job:{name}", "status").decode() for job_id, name in ids.items()}
        assert states == self.outcomes
        results = {job_id: self.connection.xlen(f"rq:results:{name}") for job_id, name in ids.items()}
        assert results == {job_id: int(job_id != "canceled") for job_id in ids}
        order = [job_id for agent, job_id in self.starts if agent == "a"]
        assert [job_id for job_id, _ in itertools.groupby(order)] == [job_id for job_id in ids if job_id in IN_ORDER]
        entries = [entry for name in REGISTRIES for entry in self.connection.zrange(f"rq:{name}:generate", 0, -1)]
        entries += self.connection.lrange("rq:queue:generate", 0, -1)
        for pattern in ("rq:execution*", "rq:worker:*:executions"):
            entries += self.connection.scan_iter(pattern)
        assert entries == []


@pytest.mark.parametrize("in_a_row", [1, 2])
@pytest.mark.parametrize("outcomes", [ONE_AGENT, OTHER_ENDS], ids=["one agent", "other ends"])
def test_the_reply_of_each_transaction_and_script_may_be_lost(connection, proxy, outcomes, in_a_row):
    """Also the reply after it, which mostly is the check of the first one's effect."""
    settings = read_settings({"redis_url": proxy.url})
    with open_queue(settings, proxy.url) as opened:
        for number in itertools.count():
            round_ = Round(opened.rq_queue, connection, number, outcomes)
            proxy.lost.clear()
            proxy.lose(from_write(number), in_a_row)
            try:
                round_.play()
                round_.check()
            except Exception as error:
                raise AssertionError(f"write {number}, {proxy.lost}: {error}") from error
            if not proxy.lost:  # no such write: every write was tried
                break
    assert number > 30


def from_write(number):
    counter = itertools.count()
    return lambda exchange: exchange.is_write and next(counter) >= number
