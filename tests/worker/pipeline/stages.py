"""Single stages for tests: jobs from an in-memory queue, a store of the product that a test can cut off, and neighbours
that only record the jobs they get."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from tests.support.in_memory.queue import InMemoryQueue
from tests.worker.memory.agents import FastDisk

from stoker_shared.errors import SharedStoreAway
from stoker_worker.engine.scripted import ScriptedProvider
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.pipeline.engine_thread import EngineThread
from stoker_worker.pipeline.finisher import Finisher
from stoker_worker.pipeline.job import Failed, Finished, Job, Outcome
from stoker_worker.pipeline.loader import Loader
from stoker_worker.pipeline.prompt import Prompt
from stoker_worker.ports import (
    AgentVersion,
    Busy,
    ClaimedJob,
    CompletedGeneration,
    LastVersion,
    LoadedModel,
    Restored,
    SequenceCache,
    TextSoFar,
    Turn,
)

MODEL = ScriptedProvider(max_batch=4, steps_per_s=1000).load()[1]
TIMEOUT_S = 30
NO_STORE: Any = None
"""Of a stage that only records."""


def loaded_model() -> "Future[LoadedModel]":
    loaded: Future[LoadedModel] = Future()
    loaded.set_result(MODEL)
    return loaded


def claimed(
    queue: InMemoryQueue, agent_id: str | None = None, *, entry: Mapping[str, Any] | None = None, **fields: Any
) -> ClaimedJob:
    """A claimed job named `job-<agent>`, with these attributes of its `Entry`."""
    if agent_id is not None:
        fields["agent_id"] = agent_id
    job_id = fields.pop("job_id", f"job-{agent_id}")
    queue.enqueue(job_id=job_id, **fields)
    for name, value in (entry or {}).items():
        setattr(queue.entries[job_id], name, value)
    (job,) = queue.claim(1, Busy())
    assert job.job_id == job_id
    return job


def loaded_job(queue: InMemoryQueue, agent_id: str, *, has_next: bool = False, **fields: Any) -> Job:
    """A job as the loader passes it on."""
    job = Job(claimed(queue, agent_id, **fields), AgentVersion(agent_id, 0, None), Prompt((1, 2), None, "p"))
    job.has_next = has_next
    return job


def error_in(outcome: Outcome) -> Exception | None:
    """Of a job that failed."""
    return outcome.error if isinstance(outcome, Failed) else None


def generated(**fields: Any) -> Finished:
    values: dict[str, Any] = {"generated_ids": (3,), "text": "x", "ended_by": "length", "kept": 1, **fields}
    return Finished(CompletedGeneration(0, "finished", **values))


class PlayedStore(AgentCacheStore):
    """The product's store, in a folder of its own. It stays open when its worker has closed it, until the test ends.

    Attributes:
        before_write: called before anything is saved, with the agent's id (``None``: no agent's).
        away: whether it is a shared store that does not answer.
        is_certain: whether `look` asks although the agent's newest version is from here.
        looks: the calls of `look`, in order.
        closed: the agents of each call of `close_number`.
        restores: the arguments of each restore.
        read_ahead_for: the agents of each call, and the models loaded.
    """

    open_ones: ClassVar["list[PlayedStore]"] = []

    def __init__(self) -> None:
        self._temporary = TemporaryDirectory()
        super().__init__(Path(self._temporary.name) / "store", files=FastDisk())
        self.open_ones.append(self)
        self.before_write: Callable[[str | None], None] = lambda agent_id: None
        self.away, self.is_certain = False, True
        self.looks: list[tuple[str, LastVersion | None]] = []
        self.closed: list[str] = []
        self.restores: list[dict[str, Any]] = []
        self.read_ahead_for: list[tuple[str, ...] | str] = []

    def look(self, agent_id: str, last: LastVersion | None = None) -> bool:
        self.looks.append((agent_id, last))
        self._ask()
        return self.is_certain or last is None

    def restore(self, prompt_ids: Sequence[int], **options: Any) -> Restored:
        self.restores.append({"prompt_ids": prompt_ids, **options})
        return super().restore(prompt_ids, **options)

    def save(self, turn: Turn) -> Mapping[str, Any]:
        self._ask()
        self.before_write(turn.agent_id)
        return super().save(turn)

    def save_blocks(self, token_ids: tuple[int, ...], cache: SequenceCache, **options: Any) -> None:
        self.before_write(None)
        super().save_blocks(token_ids, cache, **options)

    def close_number(self, agent_id: str) -> None:
        self.closed.append(agent_id)

    def is_away(self) -> bool:
        return self.away

    def read_ahead(self, agents: Sequence[str]) -> None:
        self.read_ahead_for.append(tuple(agents))

    def model_loaded(self, model: LoadedModel) -> None:
        self.read_ahead_for.append(model.name)

    def close(self) -> None:
        pass

    @classmethod
    def close_all(cls) -> None:
        while cls.open_ones:
            store = cls.open_ones.pop()
            super(PlayedStore, store).close()
            store._temporary.cleanup()

    def _ask(self) -> None:
        if self.away:
            raise SharedStoreAway("the shared store is away (played)")


class NotedFinisher(Finisher):
    """Ends nothing."""

    def __init__(self) -> None:
        super().__init__(NO_STORE, loaded_model())
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
        super().__init__(NO_STORE, loaded_model(), self.engine, finisher)
        self.jobs: Queue[Job] = Queue()

    def put(self, job: Job) -> None:
        self.jobs.put(job)
