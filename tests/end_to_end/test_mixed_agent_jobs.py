"""A mix of turns, questions and jobs about agents, while the worker is killed and stopped again and again.

A model of the agents predicts the state that each job finds. Every job is enqueued before the first worker starts, in
one queue, so there is one order; a job that finds another state reveals a wrong order or a double effect.
"""

import os
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer
from tests.support.store_reader import StoreReader
from tests.support.worker_process import burst, running_worker

from stoker_shared.wire import AGENT_TASK_PATH

pytestmark = pytest.mark.server

AGENTS = ("a", "../b", "c c", "😀" * 200, "None")
JOBS, ENDS = 150, 8
SEEDS = [int(seed) for seed in os.environ.get("MIXED_SEEDS", "1").split()]
KINDS = {
    "append": 40,
    "full": 8,
    "question": 20,
    "off": 6,
    "nobody": 6,
    "info": 10,
    "rollback": 8,
    "fork": 6,
    "forget": 4,
}
BRIEF = "All of us begin in this way, which is longer than a block of the cache. " * 4


@dataclass
class Conversations:
    """The expected agents: for each, the length of its conversation at each version."""

    lengths: dict[str, list[int]] = field(default_factory=dict)

    def of(self, agent):
        return self.lengths.get(agent, [])

    def now(self, agent):
        return self.of(agent)[-1] if self.of(agent) else 0

    def add(self, agent, length):
        self.lengths.setdefault(agent, []).append(length)


class Plan:
    """Enqueues jobs, and records the expected results."""

    def __init__(self, rng, producer, connection):
        self.rng, self.producer = rng, producer
        self.queue = Queue("generate", connection=connection, serializer=JSONSerializer)
        self.agents = Conversations()
        self.wanted = {}
        self.n_forks = 0

    def enqueue(self, number):
        kind = self.rng.choices(list(KINDS), list(KINDS.values()))[0]
        agent = self.rng.choice(AGENTS)
        job_id = f"{number:04}-{kind}"
        if kind in ("append", "full", "question", "off", "nobody"):
            self.turn(kind, agent, job_id)
        else:
            self.agent_job(kind, agent, job_id)

    def turn(self, kind, agent, job_id):
        before = self.agents.now(agent) if kind in ("append", "question") else 0
        said = f"{job_id} " * self.rng.randrange(1, 4)
        prompt = f"{'' if before else BRIEF}{job_id}\nsay {said}"
        fields = {
            "append": {"context": "append"},
            "full": {},
            "question": {"context": "append", "cache": "read"},
            "off": {"cache": "off"},
            "nobody": {},
        }[kind]
        whose = {} if kind == "nobody" else {"agent_id": agent}
        self.producer.submit(prompt=prompt, max_tokens=1000, job_id=job_id, **whose, **fields)
        wanted = {"text": said, "prompt_tokens": before + len(prompt)}
        if kind in ("append", "full"):
            replaced = len(self.agents.of(agent)) if kind == "full" and self.agents.of(agent) else None
            self.agents.add(agent, before + len(prompt) + len(said) + 1)
            wanted |= {"agent_version": len(self.agents.of(agent)), "replaced_version": replaced}
        elif kind == "question":
            wanted |= {"agent_version": len(self.agents.of(agent)) or None}
        self.wanted[job_id] = wanted

    def agent_job(self, kind, agent, job_id):
        request, lengths = {"agent_id": agent, "action": kind}, self.agents.of(agent)
        version = len(lengths)
        wanted: dict[str, Any]
        if kind == "info":
            wanted = {"exists": bool(lengths), "version": version}
            wanted |= {"tokens": lengths[-1]} if lengths else {}
        elif kind == "forget":
            wanted = {"existed": bool(lengths), "version": version}
            self.agents.lengths.pop(agent, None)
        elif kind == "rollback":
            to = self.rng.randrange(1, version + 1) if lengths else 1
            request["version"] = to
            wanted = {"fails": "AgentNotFound"}
            if lengths:
                wanted = {"version": version + 1, "to_version": to, "from_version": version, "tokens": lengths[to - 1]}
                self.agents.add(agent, lengths[to - 1])
        else:
            self.n_forks += 1
            request["target"] = target = f"fork {self.n_forks}"
            wanted = {"fails": "AgentNotFound"}
            if lengths:
                wanted = {"target": target, "version": 1, "from_version": version, "tokens": lengths[-1]}
                self.agents.add(target, lengths[-1])
        self.queue.enqueue(AGENT_TASK_PATH, request=request, job_id=job_id, result_ttl=-1)
        self.wanted[job_id] = wanted


def found(connection, job_id):
    job = Job.fetch(job_id, connection, JSONSerializer)
    status = job.get_status()
    if status == "failed":
        reason = job.latest_result().exc_string
        return {"fails": reason.split(":")[0], "reason": reason}
    assert status == "finished", (job_id, status)
    result: Any = job.return_value()
    return {**result, **result.get("usage", {}), **result.get("cache", {})}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
def test_each_job_finds_the_state_its_predecessors_left_whatever_is_killed(
    producer, redis_url, connection, store, seed
):
    rng = random.Random(seed)
    plan = Plan(rng, producer, connection)
    for number in range(JOBS):
        plan.enqueue(number)
    queue = plan.queue
    for end in range(ENDS):
        speed = "--scripted-steps-per-s=3000"
        with running_worker(redis_url, store, speed, "--grace-s", "0", log_name=f"{end}.log") as worker:
            goal = JOBS * (1 - (end + rng.random()) / ENDS)
            worker.wait_for(lambda goal=goal: len(queue) <= goal)  # type: ignore[misc]
            time.sleep(rng.random() * 0.05)
            if end % 3 == 2:
                worker.wait_until_ready()
                worker.signal(signal.SIGTERM)
                assert worker.wait(30) == 0
            else:
                worker.kill()
    burst(redis_url, store, timeout_s=200)
    wrong = {}
    for job_id, wanted in plan.wanted.items():
        have = found(connection, job_id)
        if {name: have.get(name) for name in wanted} != wanted:
            wrong[job_id] = (wanted, have)
    assert wrong == {}
    assert any(found(connection, job_id).get("attempt", 1) > 1 for job_id in plan.wanted)
    with running_worker(redis_url, store, log_name="after.log") as worker:
        worker.wait_until_ready()
        for agent, lengths in plan.agents.lengths.items():
            result = producer.submit(agent_id=agent, prompt="\nsay x", context="append").result(timeout_s=30)
            assert result.usage.prompt_tokens == lengths[-1] + 6
            assert result.cache.miss_reason is None
    assert StoreReader(store).problems() == []
