"""Workers of one queue are upgraded one after the other, under load: nothing is lost, refused, or out of order."""

import random
import signal
from collections import defaultdict

import pytest
from rq import Queue
from rq.serializers import JSONSerializer
from tests.support.wait import wait_for
from tests.support.worker_process import fork_server

from stoker_shared.wire import REQUEST_VERSION, TASK_PATH

pytestmark = [pytest.mark.server, pytest.mark.slow]

pytest.importorskip("obstore")

SHORT = {
    "STOKER_HEARTBEAT_S": "0.2",
    "STOKER_LEASE_TTL_S": "2",
    "STOKER_RECOVER_S": "0.3",
    "STOKER_POLL_S": "0.02",
    "STOKER_KEEP_VERSIONS": "1000",
}
NEWER = REQUEST_VERSION + 1
FOR_LONG = 100_000  # tokens: until it is stopped


class Workers:
    """By name, each with a store that stays; of the release, and with the model, that it was started with last."""

    def __init__(self, redis_url, folder):
        self._redis_url, self._folder = redis_url, folder
        (folder / "shared").mkdir()
        self._n_started = 0
        self._workers = {}

    def __getitem__(self, name):
        return self._workers[name]

    def start(self, name, **hooks):
        self._n_started += 1
        options = ["--redis", self._redis_url, "--store", str(self._folder / name), "--name", name]
        options += ["--engine", "scripted", "--max-batch", "4", "--scripted-steps-per-s", "400"]
        options += ["--shared-store", f"file://{self._folder / 'shared'}"]
        log = self._folder / f"{name}-{self._n_started}.log"
        self._workers[name] = fork_server().run(["run", *options], log, env=SHORT, hooks=hooks).wait_until_ready()

    def drain(self, name):
        self[name].signal(signal.SIGTERM)

    def left(self, name):
        assert self[name].wait(60) == 0, self[name].log

    def end(self):
        for name, worker in self._workers.items():
            for _ in range(2):  # the second signal ends what runs
                self.drain(name)
            worker.wait(60)


@pytest.fixture
def workers(redis_url, tmp_path):
    workers = Workers(redis_url, tmp_path)
    yield workers
    workers.end()


class Load:
    """Jobs of agents in the order in which they were submitted."""

    def __init__(self, producer, connection):
        self._producer, self._connection = producer, connection
        self._plain = Queue("generate", connection=connection, serializer=JSONSerializer)
        self._chance = random.Random(1)
        self.jobs = []

    def submit(self, *agents, **fields):
        for agent_id in agents:
            context = "append" if agent_id and agent_id.startswith("append") else "full"
            request = {"prompt": f"say {len(self.jobs)}", "context": context, **fields}
            request |= {"max_tokens": self._chance.randint(4, 40)} | ({"agent_id": agent_id} if agent_id else {})
            self.jobs.append((agent_id, request, self._enqueue(request)))

    def _enqueue(self, request):
        if request.get("v") == NEWER:  # our producer does not know it yet
            return self._plain.enqueue(TASK_PATH, request=request).id
        return self._producer.submit(**request).job_id

    def check(self):
        """All have finished, once, each agent's in their order and by a worker that serves them."""
        by_agent = defaultdict(list)
        for agent_id, request, job_id in self.jobs:
            result = self._producer.ticket(job_id).result(timeout_s=90)
            assert request["context"] == "append" or result.text == request["prompt"].removeprefix("say ")
            assert request.get("model") in (None, result.model)
            if agent_id is not None:
                by_agent[agent_id].append((self._ended_at(job_id), result.cache.agent_version))
        for agent_id, ends in by_agent.items():
            assert ends == sorted(ends, key=lambda end: end[0]), agent_id
            if agent_id.startswith("append"):
                assert [version for _, version in ends] == list(range(1, len(ends) + 1)), agent_id

    def _ended_at(self, job_id):
        [(stamp, _)] = self._connection.xrange(f"rq:results:{job_id}")
        milliseconds, _, number = stamp.decode().partition("-")
        return int(milliseconds), int(number)


@pytest.fixture
def load(producer, connection):
    return Load(producer, connection)


def until(condition, workers):
    wait_for(condition, 60, lambda: "\n".join(workers[name].log for name in ("mac1", "mac2")))


def test_two_workers_are_upgraded_under_load(producer, workers, load):
    agents = [f"{context} {n}" for n in range(8) for context in ("full", "append")]
    for name in ("mac1", "mac2"):
        workers.start(name)
    long = producer.submit(agent_id="long", prompt="for long", max_tokens=FOR_LONG)
    until(lambda: long.status().state == "started", workers)
    first, second = ("mac1", "mac2") if "mac1" in long.status().worker else ("mac2", "mac1")
    load.submit(*agents * 4, None, None)

    workers.drain(first)
    load.submit(*agents)
    until(lambda: "moved_from=" in workers[second].log, workers)
    assert workers[first].returncode is None  # its agents go on before it has left
    long.cancel()
    workers.left(first)
    load.submit(*agents)

    workers.start(first, reads=NEWER)
    workers.drain(second)
    load.submit(*agents)
    workers.left(second)
    load.submit(*agents, None, v=NEWER)  # producers are upgraded when all workers are
    workers.start(second, reads=NEWER)
    load.submit(*agents, None, v=NEWER)
    load.check()
