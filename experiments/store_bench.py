"""Fills stores: through the worker with its scripted engine, or through `AgentCacheStore` alone, by the calls that the
loader and the finishers make. Experiments only; no MLX.

Run as a script it fills a store in a process of its own, and prints its samples.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis import Redis

from stoker import Producer
from stoker_worker.engine.scripted import ScriptedProvider
from stoker_worker.engine.scripted_cache import cache_of
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import AgentVersion, CacheSlice, Delivery, LoadedModel, Transcript, Turn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
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
    cache: CacheSlice | None = None
    if with_cache:
        store.restore(tokens, agent=agent, model=model, salt=None)
        cache = cache_of(tokens, 0)
    text = (before.text or "" if before else "") + prompt
    transcript = Transcript(tokens, model.tokenizer_fingerprint, None, text, "eos")
    result = {"job_id": delivery.job_id, "agent_id": name, "text": prompt[:40], "metadata": {"filling": "-" * 400}}
    store.save(Turn(agent, delivery, transcript, model, None, cache, result))
    store.ended(name, delivery, remember_s=86_400.0)
    return agent


def prompt_of(number: int) -> str:
    return f"Question {number}: what is the capital of the country with number {number}?"


def fill(folder: Path, count: int, samples_at: list[int]) -> None:
    """Prints a line of JSON for each sample: so many agents, seconds since the start, memory and sizes."""
    model, start = scripted_model(), time.perf_counter()
    store = AgentCacheStore(folder)
    store.start_upkeep()
    done = 0
    for goal in samples_at:
        _in_threads(store, model, range(done, min(goal, count)))
        done = min(goal, count)
        rate_s = time.perf_counter() - start
        time.sleep(2.0)
        gc.collect()
        sample = {"agents": done, "s": round(rate_s, 1), "rss_mb": rss_mb(os.getpid()), **sizes(folder)}
        sample["total_bytes"] = store.budget.total_bytes
        print(json.dumps(sample), flush=True)
        start += time.perf_counter() - start - rate_s
    store.close()


def _in_threads(store: AgentCacheStore, model: LoadedModel, numbers: range) -> None:
    def run(share: range) -> None:
        for number in share:
            take_turn(store, model, f"agent {number}", prompt_of(number))

    threads = [threading.Thread(target=run, args=(numbers[n::N_THREADS],)) for n in range(N_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def sizes(folder: Path) -> dict[str, int]:
    """Files, their allocated bytes with the folders', and the bytes of the database."""
    n_files, n_bytes = 0, 0
    for path, _, names in os.walk(folder):
        n_bytes += os.lstat(path).st_blocks * 512
        for name in names:
            n_files += 1
            n_bytes += os.lstat(os.path.join(path, name)).st_blocks * 512
    database = sum(path.stat().st_size for path in folder.glob("agents.db*"))
    return {"files": n_files, "du_bytes": n_bytes, "database_bytes": database}


def rss_mb(pid: int) -> float:
    seen = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return round(int(seen.stdout) / 1024, 1)


@contextmanager
def worker(url: str, folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """The worker's own command in a process of its own."""
    command = [
        sys.executable, "-c", "from stoker_worker.cli.main import main; main()", "run", "--engine", "scripted",
        "--scripted-steps-per-s", "100000", "--redis", url, "--store", str(folder), *options,
    ]  # fmt: skip
    with open(folder.with_suffix(".log"), "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def environment() -> dict[str, str]:
    paths = [str(ROOT / name) for name in ("shared", "producer", "worker")]
    return os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}


def submit(producer: Producer, numbers: range, **fields: Any) -> None:
    request = {"max_tokens": ANSWER_TOKENS, "context": "append", **fields}
    for first in range(0, len(numbers), 1000):
        some = numbers[first : first + 1000]
        producer.submit_many([{"agent_id": f"agent {n}", "prompt": prompt_of(n), **request} for n in some])


def wait_for(connection: "Redis[Any]", count: int) -> None:
    """Until so many jobs have finished."""
    while (finished := connection.zcard("rq:finished:generate")) < count:
        if connection.zcard("rq:failed:generate"):
            raise RuntimeError("a job has failed")
        time.sleep(0.05 if count - finished < 100 else 0.5)


if __name__ == "__main__":
    fill(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
