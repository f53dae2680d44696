"""Many agents' conversations while the worker is killed again and again: every turn happens once, in its order.

`make deep` runs 200 agents, 5 turns each, and 20 kills.
"""

import os
import random
import subprocess
import sys
import time

import pytest
from redis import Redis
from rq.registry import FinishedJobRegistry
from rq.serializers import JSONSerializer
from tests.support.store_reader import StoreReader
from tests.support.worker_process import running_worker

from stoker import Producer
from stoker_shared.errors import JobFailed

pytestmark = pytest.mark.server

AGENTS, TURNS, KILLS = (200, 5, 20) if os.environ.get("DEEP") else (60, 4, 10)
ANSWER_TOKENS = 4
BRIEF = "All of us begin in this way, which is longer than a block of the cache. " * 5


@pytest.mark.timeout(900)
def test_every_turn_is_in_its_agents_transcript_once_and_in_order_whatever_is_killed(redis_url, tmp_path):
    rng, store, producer = random.Random(AGENTS), tmp_path / "store", Producer(redis_url)
    tickets = {f"agent {n}": [] for n in range(AGENTS)}
    for turn in range(TURNS):
        for agent_id, theirs in tickets.items():
            prompt = f"{BRIEF}I am {agent_id}." if turn == 0 else f" {turn}"
            theirs.append(producer.submit(agent_id=agent_id, prompt=prompt, context="append", max_tokens=ANSWER_TOKENS))
    with Redis.from_url(redis_url) as connection:
        finished = FinishedJobRegistry("generate", connection=connection, serializer=JSONSerializer)
        for kill in range(1, KILLS + 1):
            with running_worker(redis_url, store, log_name=f"{kill}.log") as worker:
                goal = AGENTS * TURNS * (kill - rng.random()) / (KILLS + 1)
                worker.wait_for(lambda goal=goal: finished.get_job_count(cleanup=False) >= goal)  # type: ignore[misc]
                time.sleep(rng.random() * 0.05)  # anywhere between two steps, not only after a finish
                worker.kill()
    with running_worker(redis_url, store, "--burst", log_name="last.log") as worker:
        assert worker.wait(300) == 0, worker.log

    verify = [sys.executable, "-m", "stoker_worker", "memory", "verify", "--store", str(store)]
    found = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    lost, attempts = [], set()
    for agent_id, theirs in tickets.items():
        made, n_tokens = [], 0
        for turn, ticket in enumerate(theirs):
            try:
                result = ticket.result(timeout_s=1)
            except JobFailed as error:  # in flight at each kill: then it never took effect
                lost.append(str(error))
                continue
            new = len(f"{BRIEF}I am {agent_id}.") if turn == 0 else 2
            assert result.usage.prompt_tokens == n_tokens + new
            n_tokens += new + ANSWER_TOKENS
            made.append(ticket.job_id)
            attempts.add(result.attempt)
        assert StoreReader(store).turns(agent_id) == made
    assert all("WorkerLostTooOften" in error for error in lost)
    assert attempts > {1}  # otherwise no kill hit a running job
    assert len(lost) <= AGENTS * TURNS // 50
