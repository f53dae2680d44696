"""Runs jobs under our worker with the scripted engine, and under RQ's SimpleWorker, in this process. No MLX."""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis import Redis
from rq import Queue, SimpleWorker
from rq.serializers import JSONSerializer

from stoker import Producer
from stoker_worker.engine.scripted import ScriptedEngine, ScriptedProvider
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.pipeline.worker import Worker
from stoker_worker.ports import CompletedGeneration, LoadedModel
from stoker_worker.queue.rq_queue import open_queue
from stoker_worker.settings import read_settings

RESULT = {"text": "hello"}


def no_op(request: dict[str, Any]) -> dict[str, Any]:
    """The task that RQ's worker runs. It does nothing."""
    return RESULT


@dataclass
class TimedEngine:
    """The scripted engine, with the time at which each step ended."""

    engine: ScriptedEngine
    ends: list[float] = field(default_factory=list)
    kv: None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def step(self) -> list[CompletedGeneration]:
        ended = self.engine.step()
        self.ends.append(time.perf_counter())
        return ended


class TimedProvider:
    def __init__(self, *, max_batch: int, steps_per_s: float) -> None:
        self._provider = ScriptedProvider(max_batch=max_batch, steps_per_s=steps_per_s)
        self.engine: TimedEngine | None = None

    def load(self) -> tuple[TimedEngine, LoadedModel]:
        engine, loaded = self._provider.load()
        self.engine = TimedEngine(engine)
        return self.engine, loaded

    def leave_thread(self) -> None:
        """Nothing here belongs to a thread."""


@contextmanager
def our_worker(url: str, folder: Path, provider: Any, *, burst: bool) -> Iterator[threading.Thread]:
    """The thread of a running worker, which stops at once when the context is left."""
    settings = read_settings({"redis_url": url, "grace_s": 0.0, "burst": burst})
    with open_queue(settings, url) as opened:
        store = AgentCacheStore(folder)
        worker = Worker(settings, opened.rq_queue, store, provider)
        thread = threading.Thread(target=worker.run, name="worker")
        thread.start()
        try:
            yield thread
        finally:
            if not burst:
                worker.request_stop()
                worker.request_stop()
            thread.join()
            store.close()


def jobs_per_s(connection: Redis, job_ids: list[str]) -> float:
    """The rate from the start of the first job to the end of the last, by the jobs' own times."""
    from rq.job import Job

    jobs = Job.fetch_many(job_ids, connection, JSONSerializer)
    times = [(job.started_at, job.ended_at) for job in jobs if job is not None]
    if len(times) != len(job_ids) or any(None in pair for pair in times):
        raise RuntimeError("not all jobs have run")
    took = max(end for _, end in times) - min(start for start, _ in times)  # type: ignore[type-var,operator]
    return len(job_ids) / took.total_seconds()


def ours(url: str, folder: Path, count: int) -> float:
    """Jobs per second under our worker."""
    with Redis.from_url(url) as connection, Producer(connection) as producer:
        request = {"prompt": "say ", "max_tokens": 1, "cache": "off"}
        tickets = producer.submit_many([{"agent_id": f"agent {n}", **request} for n in range(count)])
        provider = ScriptedProvider(max_batch=16, steps_per_s=100_000)
        with our_worker(url, folder, provider, burst=True) as thread:
            thread.join()
        return jobs_per_s(connection, [ticket.job_id for ticket in tickets])


def stock(url: str, count: int) -> float:
    """Jobs per second under RQ's SimpleWorker without its log lines. Call it on the main thread."""
    with Redis.from_url(url) as connection:
        queue = Queue("stock", connection=connection, serializer=JSONSerializer)
        request = {"agent_id": "agent", "prompt": "say ", "max_tokens": 1, "cache": "off"}
        data = [
            Queue.prepare_data("queue_bench.no_op", kwargs={"request": request}, description="-", result_ttl=600)
            for _ in range(count)
        ]
        jobs = queue.enqueue_many(data)
        for name in ("rq.worker", "rq.queue", "rq.job"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        worker = SimpleWorker([queue], connection=connection, serializer=JSONSerializer)
        worker.work(burst=True, logging_level="CRITICAL")
        return jobs_per_s(connection, [job.id for job in jobs])


class Feeder:
    """Another process that submits jobs at a steady rate, so that enqueueing costs the worker's process nothing."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), url]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def feed(self, count: int, per_s: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([count, per_s]) + "\n")
        self._process.stdin.flush()
        self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ok\n":
            raise RuntimeError("the feeder has died")


def _feed(url: str, chunk: int = 5) -> None:
    producer = Producer(url)
    producer.ping()
    print("ok", flush=True)
    for line in sys.stdin:
        count, per_s = json.loads(line)
        start = time.perf_counter()
        for done in range(0, count, chunk):
            time.sleep(max(0.0, start + done / per_s - time.perf_counter()))
            request = {"prompt": "x", "max_tokens": 5, "cache": "off"}
            producer.submit_many([{"agent_id": f"agent {done + n}", **request} for n in range(chunk)])
        print("ok", flush=True)
    producer.close()


if __name__ == "__main__":
    _feed(sys.argv[1])
