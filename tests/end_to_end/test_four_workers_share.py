"""Four workers with a shared store, while they are killed, put to sleep beyond their leases and stopped, and the shared
store goes away: every job finishes, once and in its agent's order, and every conversation is that of its jobs.

``CHAOS=long`` (`make chaos`): 5,000 jobs of 300 agents.
"""

import os
import random
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Final, Literal

import pytest
from tests.end_to_end.macs import LEASE_S, Macs
from tests.support.store_reader import StoreReader
from tests.support.wait import wait_for
from tests.worker.memory.replica.sharing import Machine, Share

from stoker import Producer, Ticket

pytestmark = [pytest.mark.server, pytest.mark.slow]

pytest.importorskip("obstore")

LONG = os.environ.get("CHAOS") == "long"
N_AGENTS, N_JOBS, N_EPISODES = (300, 5000, 60) if LONG else (40, 300, 5)
CALM_S = 600 if LONG else 60
N_WORKERS: Final = 4


@dataclass
class Sent:
    """A job."""

    agent_id: str
    prompt: str
    answer: str
    ticket: Ticket
    version: int = 0
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
        """Until each job has finished, and once."""
        for job in self.sent:
            result = job.ticket.result(timeout_s=CALM_S)
            assert (result.text, result.cache.saved) == (job.answer, True)
            ((stamp, _),) = connection.xrange(f"rq:results:{job.ticket.job_id}")
            milliseconds, _, number = stamp.decode().partition("-")
            job.version, job.ended_at = result.cache.agent_version or 0, (int(milliseconds), int(number))

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


@pytest.mark.timeout(3600 if LONG else 180)
@pytest.mark.parametrize("share", ["folder", "bucket"] if LONG else ["bucket"], indirect=True)
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
        traffic.send(N_AGENTS)  # everybody goes on, and nobody's turn is lost
        wait_for(crew.are_ready, CALM_S, crew.logs)
        traffic.wait(connection)
    finally:
        crew.end()
    reader = Machine(tmp_path / "reader", share)
    for agent_id, jobs in traffic.by_agent().items():
        ends = [job.ended_at for job in jobs]
        assert ends == sorted(ends), agent_id
        reader.store.look(agent_id)
        transcript = reader.store.open_agent(agent_id).transcript
        assert [job.version for job in jobs] == list(range(1, len(jobs) + 1)), agent_id
        said = "".join(job.said for job in jobs) if agent_id.startswith("append") else jobs[-1].said
        assert (transcript and transcript.text) == said, agent_id
    reader.store.close()
    for n in range(N_WORKERS):
        assert StoreReader(crew.store(n)).problems() == []
    leases = ("stoker:holder:*", "stoker:lease:*")
    for pattern in (*leases, "rq:wip:*", "rq:execution*"):
        assert connection.keys(pattern) == [], pattern
