"""Single stages for tests: jobs from an in-memory queue, and neighbours that only record the jobs they get."""

from collections.abc import Iterator
from concurrent.futures import Future
from queue import Queue
from typing import Any

from tests.support.in_memory.agent_store import InMemoryAgentStore
from tests.support.in_memory.queue import InMemoryQueue

from stoker_worker.engine.scripted import ScriptedProvider
from stoker_worker.pipeline.engine_thread import EngineThread
from stoker_worker.pipeline.finisher import Finisher
from stoker_worker.pipeline.job import Finished, Job, Outcome
from stoker_worker.pipeline.loader import Loader
from stoker_worker.pipeline.prompt import Prompt
from stoker_worker.ports import AgentVersion, Busy, ClaimedJob, CompletedGeneration, LoadedModel, TextSoFar

MODEL = ScriptedProvider(max_batch=4, steps_per_s=1000).load()[1]
TIMEOUT_S = 30


def loaded_model() -> "Future[LoadedModel]":
    loaded: Future[LoadedModel] = Future()
    loaded.set_result(MODEL)
    return loaded


def claimed(queue: InMemoryQueue, agent_id: str | None = None, **fields: Any) -> ClaimedJob:
    """A claimed job named `job-<agent>`."""
    if agent_id is not None:
        fields["agent_id"] = agent_id
    job_id = fields.pop("job_id", f"job-{agent_id}")
    queue.enqueue(job_id=job_id, **fields)
    (job,) = queue.claim(1, Busy())
    assert job.job_id == job_id
    return job


def loaded_job(queue: InMemoryQueue, agent_id: str, *, has_next: bool = False, **fields: Any) -> Job:
    """A job as the loader passes it on."""
    job = Job(claimed(queue, agent_id, **fields), AgentVersion(agent_id, 0, None), Prompt((1, 2), None, "p"))
    job.has_next = has_next
    return job


def generated(**fields: Any) -> Finished:
    values: dict[str, Any] = {"generated_ids": (3,), "text": "x", "ended_by": "length", "kept": 1, **fields}
    return Finished(CompletedGeneration(0, "finished", **values))


class NotedFinisher(Finisher):
    """Ends nothing."""

    def __init__(self) -> None:
        super().__init__(InMemoryAgentStore(), loaded_model())
        self.ended: Queue[tuple[Job, Outcome]] = Queue()

    def put(self, job: Job, outcome: Outcome) -> None:
        self.ended.put((job, outcome))

    def next(self) -> tuple[Job, Outcome]:
        return self.ended.get(timeout=TIMEOUT_S)


class NotedEngine(EngineThread):
    """Generates nothing."""

    def __init__(self, finisher: Finisher) -> None:
        super().__init__(ScriptedProvider(max_batch=4, steps_per_s=1000), loaded_model(), finisher)
        self.jobs: Queue[Job] = Queue()
        self.busy: Iterator[bool] = iter(())
        self.generated: dict[int, TextSoFar] = {}

    def put(self, job: Job) -> None:
        self.jobs.put(job)

    def is_busy(self) -> bool:
        return next(self.busy, False)

    def texts(self, claim_numbers: frozenset[int]) -> dict[int, TextSoFar]:
        return self.generated

    def next(self) -> Job:
        return self.jobs.get(timeout=TIMEOUT_S)


class NotedLoader(Loader):
    """Loads nothing."""

    def __init__(self) -> None:
        finisher = NotedFinisher()
        self.engine = NotedEngine(finisher)
        super().__init__(InMemoryAgentStore(), loaded_model(), self.engine, finisher)
        self.jobs: Queue[Job] = Queue()

    def put(self, job: Job) -> None:
        self.jobs.put(job)
