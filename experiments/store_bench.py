"""Fills stores: through the worker with its scripted engine, or through `AgentCacheStore` alone, by the calls that the
loader and the finishers make. Experiments only; no MLX.

Run as a script it fills a store in a process of its own, and prints its samples.
"""

import gc
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import rss_mib
from redis import Redis

from stoker import Producer
from stoker_worker.engine.scripted import ScriptedProvider, cache_of
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import AgentVersion, Delivery, LoadedModel, SequenceCache, Transcript, Turn

ANSWER_TOKENS = 16
N_THREADS = 4
"""As many as the worker has finishers."""


def scripted_model() -> LoadedModel:
    return ScriptedProvider(max_batch=1, steps_per_s=1).load()[1]


def take_turn(
    store: AgentCacheStore, model: LoadedModel, name: str, prompt: str, *, with_cache: bool = True
) -> AgentVersion:
    """A turn as the loader and a finisher take it; returns the version before it."""
    agent = store.open_agent(name)
    delivery = Delivery(f"job {name} {agent.number}", "2026-01-01T00:00:00Z")
    assert store.answer(name, delivery) is None
    before = agent.transcript
    tokens = (*(before.token_ids if before else ()), *prompt.encode())
    cache: SequenceCache | None = None
    if with_cache:
        store.restore(tokens, agent=agent, model=model, salt=None)
        cache = cache_of(tokens)
    text = (before.text or "" if before else "") + prompt
    transcript = Transcript(tokens, model.tokenizer_fingerprint, None, text, "eos")
    result = {"job_id": delivery.job_id, "agent_id": name, "text": prompt[:40], "metadata": {"filling": "-" * 400}}
    store.save(Turn(agent, delivery, transcript, model, None, cache, result))
    store.ended(name, delivery, remember_s=86_400.0)
    return agent


def prompt_of(number: int) -> str:
    return f"Question {number}: what is the capital of the country with number {number}?"


def fill(folder: Path, samples_at: list[int]) -> None:
    """Prints a line of JSON for each sample: so many agents, seconds since the start, memory and sizes."""
    model, start = scripted_model(), time.perf_counter()
    store = AgentCacheStore(folder)
    store.start_upkeep()
    done = 0
    for goal in samples_at:
        _in_threads(store, model, range(done, goal))
        done = goal
        rate_s = time.perf_counter() - start
        time.sleep(2.0)
        gc.collect()
        sample = {"agents": done, "s": round(rate_s, 1), "rss_mb": round(rss_mib(os.getpid()), 1), **sizes(folder)}
        sample["total_bytes"] = store.budget.total_bytes
        print(json.dumps(sample), flush=True)
        start += time.perf_counter() - start - rate_s
    store.close()


def _in_threads(store: AgentCacheStore, model: LoadedModel, numbers: range) -> None:
    def run(share: range) -> None:
        for number in share:
            take_turn(store, model, f"agent {number}", prompt_of(number))

    with ThreadPoolExecutor(N_THREADS) as threads:
        list(threads.map(run, [numbers[n::N_THREADS] for n in range(N_THREADS)]))  # raises what a turn has raised


def sizes(folder: Path) -> dict[str, int]:
    """Files, their allocated bytes with the folders', the bytes of the database with its log, and those of its log."""
    n_files, n_bytes = 0, 0
    for path, _, names in os.walk(folder):
        n_files += len(names)
        for name in ("", *names):
            with suppress(FileNotFoundError):  # of a worker that runs
                n_bytes += os.lstat(os.path.join(path, name)).st_blocks * 512
    database = {path.name: path.stat().st_size for path in folder.glob("agents.db*")}
    return {
        "files": n_files, "du_bytes": n_bytes, "database_bytes": sum(database.values()),
        "wal_bytes": database.get("agents.db-wal", 0),
    }  # fmt: skip


def submit(producer: Producer, numbers: range) -> list[str]:
    """A job of each of these agents; the jobs' ids."""
    request, ids = {"max_tokens": ANSWER_TOKENS, "context": "append"}, []
    for first in range(0, len(numbers), 1000):
        some = numbers[first : first + 1000]
        jobs = [{"agent_id": f"agent {n}", "prompt": prompt_of(n), **request} for n in some]
        ids += [ticket.job_id for ticket in producer.submit_many(jobs)]
    return ids


def wait_for(connection: "Redis[Any]", count: int) -> None:
    """Until so many jobs have finished."""
    while (finished := connection.zcard("rq:finished:generate")) < count:
        if connection.zcard("rq:failed:generate"):
            raise RuntimeError("a job has failed")
        time.sleep(0.05 if count - finished < 100 else 0.5)


if __name__ == "__main__":
    fill(Path(sys.argv[1]), json.loads(sys.argv[2]))
