"""Workers of one queue are upgraded one after the other, under load: nothing is lost, refused, or out of order."""

import random
import signal
from collections import defaultdict

import pytest
from rq import Queue
from rq.serializers import JSONSerializer
from tests.end_to_end.macs import Macs
from tests.support.wait import wait_for

from stoker_shared.wire import REQUEST_VERSION, TASK_PATH

pytestmark = [pytest.mark.server, pytest.mark.slow]

pytest.importorskip("obstore")

NEWER = REQUEST_VERSION + 1
FOR_LONG = 100_000  # tokens: until it is stopped


@pytest.fixture
def crew(redis_url, tmp_path):
    (tmp_path / "shared").mkdir()
    options = ("--max-batch", "4", "--shared-store", f"file://{tmp_path / 'shared'}")
    crew = Macs(redis_url, tmp_path, 2, *options, env={"STOKER_LEASE_TTL_S": "2", "STOKER_GRACE_S": "60"})
    yield crew
    crew.end()


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


def test_two_workers_are_upgraded_under_load(producer, crew, load):
    agents = [f"{context} {n}" for n in range(8) for context in ("full", "append")]
    crew.wait_until_ready()
    long = producer.submit(agent_id="long", prompt="for long", max_tokens=FOR_LONG)
    wait_for(lambda: long.status().state == "started", 60, crew.logs)
    first, second = (0, 1) if "mac0" in long.status().worker else (1, 0)
    load.submit(*agents * 4, None, None)

    crew.workers[first].signal(signal.SIGTERM)
    load.submit(*agents)
    wait_for(lambda: "moved_from=" in crew.workers[second].log, 60, crew.logs)
    assert crew.workers[first].returncode is None  # its agents go on before it has left
    long.cancel()
    assert crew.workers[first].wait(60) == 0, crew.logs()
    load.submit(*agents)

    crew.replace(first, reads=NEWER)
    crew.workers[first].wait_until_ready()
    crew.workers[second].signal(signal.SIGTERM)
    load.submit(*agents)
    assert crew.workers[second].wait(60) == 0, crew.logs()
    load.submit(*agents, None, v=NEWER)  # producers are upgraded when all workers are
    crew.replace(second, reads=NEWER)
    load.submit(*agents, None, v=NEWER)
    load.check()
