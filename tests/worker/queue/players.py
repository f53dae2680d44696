"""Two workers that play the same stories in this process: RQ's own SimpleWorker, and ours with the scripted engine."""

import logging
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redis import Redis
from rq import Queue, SimpleWorker
from rq.job import get_current_job
from rq.scheduler import RQScheduler
from rq.serializers import JSONSerializer
from tests.worker.queue.rq_dump import dump

import stoker_shared.task
from stoker_shared.errors import EngineFailed
from stoker_shared.wire import TASK_PATH
from stoker_worker.engine.scripted import ScriptedProvider
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.pipeline.worker import Worker
from stoker_worker.queue.rq_queue import open_queue
from stoker_worker.settings import read_settings

WAIT = "go on until somebody ends it"


class Player:
    """The actions of a story, and the recorded looks at Redis."""

    def __init__(self, redis_url: str) -> None:
        self.redis_url = redis_url
        self.connection = Redis.from_url(redis_url)
        self.connection.flushall()  # the server is the session's own
        self.queue = Queue("generate", connection=self.connection, serializer=JSONSerializer)
        self.names: dict[str, str] = {}
        self.looks: list[dict[str, Any]] = []

    def enqueue(self, prompt: str, job_id: str = "job", **options: Any) -> Any:
        request = {"agent_id": job_id, "prompt": prompt, "max_tokens": 1_000_000}
        return self.queue.enqueue(TASK_PATH, request=request, job_id=job_id, description="described", **options)

    def make_due(self) -> None:
        due: Any = self.connection.zrange("rq:scheduled:generate", 0, -1)
        for job_id in due:
            self.connection.zadd("rq:scheduled:generate", {job_id: 1})

    def look(self) -> None:
        self.looks.append(dump(self.connection, self.names))

    def when_started(self, job_id: str, act: Callable[[], None]) -> threading.Thread:
        """Start a thread that acts once the job runs."""

        def wait() -> None:
            end = time.monotonic() + 20
            while self.connection.hget(f"rq:job:{job_id}", "status") != b"started" and time.monotonic() < end:
                time.sleep(0.02)
            time.sleep(0.1)
            act()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    def name(self, worker_name: str) -> None:
        self.names[worker_name] = f"<worker {len(self.names) + 1}>"


class StockPlayer(Player):
    """RQ's SimpleWorker, and RQ's scheduler run by hand; the task behaves like the scripted engine."""

    def __init__(self, redis_url: str, monkeypatch: Any) -> None:
        super().__init__(redis_url)
        monkeypatch.setattr(stoker_shared.task, "generate", self._generate)
        self.worker: SimpleWorker | None = None

    def work(self) -> None:
        scheduler = RQScheduler(["generate"], self.connection, serializer=JSONSerializer)
        scheduler.acquire_locks()
        scheduler.enqueue_scheduled_jobs()
        scheduler.stop()
        scheduler.connection.close()
        self.worker = SimpleWorker([self.queue], connection=self.connection, serializer=JSONSerializer)
        self.name(self.worker.name)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        logging.getLogger("rq.worker").setLevel(logging.CRITICAL)
        try:
            self.worker.work(burst=True, logging_level="CRITICAL")
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _generate(self, request: dict[str, Any]) -> dict[str, Any]:
        verb, _, rest = request["prompt"].partition(" ")
        if verb == "say":
            return {"text": rest}
        if verb == "fail":
            raise EngineFailed(rest)
        assert self.worker is not None
        job = get_current_job()
        assert job is not None
        while self.worker._stopped_job_id != job.id:  # RQ's SimpleWorker only records the stop
            time.sleep(0.01)
        raise EngineFailed("stopped")


class OurPlayer(Player):
    """The worker as `stoker-worker run --engine scripted --burst` wires it."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        super().__init__(redis_url)
        self.folder = folder

    def work(self) -> None:
        settings = read_settings({"redis_url": self.redis_url, "burst": True, "poll_s": 0.01})
        provider = ScriptedProvider(max_batch=16, steps_per_s=400)
        with open_queue(settings, self.redis_url) as opened:
            self.name(opened.registration.name)
            store = AgentCacheStore(self.folder)
            try:
                Worker(settings, opened.rq_queue, store, provider).run()
            finally:
                store.close()
