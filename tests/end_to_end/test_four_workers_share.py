"""Four workers with a shared store, while they are killed, put to sleep beyond their leases and stopped, and the shared
store goes away: no conversation is lost, no version is made twice, every job ends once.

``CHAOS=long`` (`make chaos`): 5,000 jobs of 300 agents.
"""

import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import pytest
from tests.end_to_end.macs import LEASE_S, Macs
from tests.forked_worker import wait_for
from tests.store_reader import StoreReader
from tests.worker.memory.shared_store.sharing import Machine, Share

from stoker import GenerationResult, Producer, Ticket
from stoker_shared.errors import JobFailed

pytestmark = [pytest.mark.server, pytest.mark.slow]

pytest.importorskip("obstore")

LONG = os.environ.get("CHAOS") == "long"
N_AGENTS, N_JOBS, N_EPISODES = (300, 5000, 60) if LONG else (40, 300, 5)
CALM_S = 600 if LONG else 60
N_WORKERS: Final = 4
AWAY: Final = ("SharedStoreAway", "AgentTranscriptUnreadable", "AgentElsewhere")
"""An `append` job fails so elsewhere while the shared store, or the worker with turns that it lacks, is away."""


@dataclass
class Sent:
    """A job. `result`: ``None``: it failed because the shared store was away."""

    agent_id: str
    prompt: str
    answer: str
    ticket: Ticket
    result: GenerationResult | None = None
    reason: str = ""
    ended_at: tuple[int, int] = (0, 0)

    @property
    def said(self) -> str:
        return self.prompt + self.answer


class Traffic:
    """A quarter of the agents send whole conversations, the others go on with what is stored."""

    def __init__(self, producer: Producer, chance: random.Random) -> None:
        self._producer, self._random = producer, chance
        self.sent: list[Sent] = []

    def send(self, n_jobs: int) -> None:
        for _ in range(n_jobs):
            self.send_one(len(self.sent) % N_AGENTS)

    def send_one(self, n: int) -> None:
        number = len(self.sent)
        context: Literal["full", "append"] = "full" if n % 4 == 0 else "append"
        answer = f"{number}." * self._random.randint(1, 12)
        prompt = f"\n{'x' * self._random.randint(0, 200)}\nsay {answer}"
        agent_id = f"{context} {n}"
        ticket = self._producer.submit(agent_id=agent_id, prompt=prompt, context=context, max_tokens=200)
        self.sent.append(Sent(agent_id, prompt, answer, ticket))

    def wait(self, connection: Any) -> None:
        """Until each job has ended, and once."""
        for job in self.sent:
            try:
                job.result = job.ticket.result(timeout_s=CALM_S)
                assert job.result.text == job.answer
            except JobFailed as failed:
                if job.agent_id.startswith("full") or failed.kind not in AWAY:
                    raise
                job.reason = failed.reason
            ((stamp, _),) = connection.xrange(f"rq:results:{job.ticket.job_id}")
            milliseconds, _, number = stamp.decode().partition("-")
            job.ended_at = int(milliseconds), int(number)

    def by_agent(self) -> dict[str, list[Sent]]:
        found = defaultdict(list)
        for job in self.sent:
            found[job.agent_id].append(job)
        return found


def rage(crew: Macs, share: Share, traffic: Traffic, chance: random.Random) -> None:
    """The shared store is away in two of five episodes, also while workers die and start."""
    for number in range(N_EPISODES):
        if number % 5 == 1:
            share.go_away()
        n = chance.randrange(N_WORKERS)
        act = [crew.kill, crew.sleep, crew.kill, crew.stop][number % 4]
        act(n)
        traffic.send(N_JOBS // 2 // N_EPISODES)
        time.sleep(chance.choice((0, 0.3, 2 * LEASE_S)))
        crew.replace(n)
        crew.see_to_all()
        if number % 5 == 2:
            share.come_back()


def calm(crew: Macs, traffic: Traffic, producer: Producer, connection: Any) -> None:
    """All machines and the shared store are back: each agent goes on. The last of its jobs is one that has finished."""
    left, until = list(range(N_AGENTS)), time.monotonic() + CALM_S

    def is_calm() -> bool:
        crew.see_to_all()
        time.sleep(1)  # some heartbeats; and a look takes time, which the workers need
        return is_written_through(producer)

    while left:
        wait_for(is_calm, CALM_S, crew.logs)
        n_before = len(traffic.sent)
        for n in left:
            traffic.send_one(n)
        traffic.wait(connection)
        sent = traffic.sent[n_before:]
        # On a busy machine the shared store may not answer in time.
        left = [n for n, job in zip(left, sent, strict=True) if not (job.result and job.result.cache.saved)]
        assert time.monotonic() < until or not left, [(job.agent_id, job.reason) for job in sent if job.reason]


def is_written_through(producer: Producer) -> bool:
    """As `stoker status` shows it."""
    shown = [worker.live and worker.live.now for worker in producer.overview().workers]
    shared = [now.shared_store for now in shown if now and now.shared_store]
    return len(shared) == N_WORKERS and not any(one.away_s for one in shared)


def check_conversation(agent_id: str, jobs: Sequence[Sent], text: str | None) -> Counter[str]:
    """The conversation is that of the finished jobs, in order, each once, and each made one version.

    A job that failed elsewhere, when nobody could know that its first worker had saved its turn in an outage, may have
    its turn there too.
    """
    seen: Counter[str] = Counter()
    said, version = text or "", 0
    for job in jobs:
        is_there = said.startswith(job.said)
        assert is_there or job.result is None, (agent_id, job, said[:300])
        if is_there:
            said, version = said.removeprefix(job.said), version + 1
            seen["failed and saved" if job.result is None else "finished"] += 1
        else:
            seen["failed"] += 1
        if job.result is not None:
            assert (job.result.cache.agent_version, job.result.cache.saved) == (version, True), (agent_id, job)
    assert said == "", (agent_id, said[:300])
    return seen


@pytest.mark.timeout(3600 if LONG else 180)
def test_no_conversation_is_lost_and_no_version_made_twice_whatever_happens(
    share: Share, producer, redis_url, connection, tmp_path
):
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(1_000_000))
    print(f"CHAOS_SEED={seed}, everything in {tmp_path}")
    chance = random.Random(seed)
    crew = Macs(redis_url, tmp_path, N_WORKERS, "--shared-store", share.url)
    traffic = Traffic(producer, chance)
    try:
        crew.wait_until_ready()
        traffic.send(N_JOBS // 2)
        rage(crew, share, traffic, chance)
        crew.wait_until_ready()
        traffic.wait(connection)
        calm(crew, traffic, producer, connection)
    finally:
        crew.end()
    reader, seen = Machine(tmp_path / "reader", share), Counter[str]()
    for agent_id, jobs in traffic.by_agent().items():
        ends = [job.ended_at for job in jobs]
        assert ends == sorted(ends), agent_id
        transcript = reader.store.open_agent(agent_id).transcript
        text = transcript.text if transcript else None
        if agent_id.startswith("append"):
            seen += check_conversation(agent_id, jobs, text)
        else:
            saved = [job.result.cache for job in jobs if job.result and job.result.cache.saved]
            versions = [cache.agent_version or 0 for cache in saved]
            assert versions == sorted(set(versions)), agent_id
            assert text == jobs[-1].said, agent_id
    reader.store.close()
    print(dict(seen))
    for n in range(N_WORKERS):
        # A worker that missed a version when an agent came to it knows that until the agent is there again.
        problems = StoreReader(crew.store(n)).problems()
        assert [problem for problem in problems if not problem.endswith("is missing")] == []
    leases = ("stoker:holder:*", "stoker:lease:*")
    for pattern in ("stoker:claimed:*", *leases, "stoker:ended:*", "rq:wip:*", "rq:execution*"):
        assert connection.keys(pattern) == [], pattern
