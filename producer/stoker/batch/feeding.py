"""Sends the lines of an input file, in order and once. Owns the number of lines sent at a time, the condition under
which none may be sent, and the models that a line may ask."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis import Redis

from stoker.api.fields import BodyOptions, keep_apart
from stoker.batch.input_file import BadLine, InputFile, Line, answer_id_for, job_id_for, refused_request
from stoker.batch.output_file import not_run_line
from stoker.batch.record import BatchRecord, send
from stoker.cascade.routing import Models, Routing
from stoker.new_job import JobOptions, NewJob
from stoker.operations import Operation, ask, run
from stoker.presence import live_workers
from stoker.submitting import queue_of
from stoker_shared.errors import RequestError
from stoker_shared.request import GenerationRequest, build_request

_LEAST_WINDOW: Final = 100


@dataclass(frozen=True)
class ModelChoice:
    """The models and the check of a batch; `models` and `min_trust` as for `Routing.routed`."""

    routing: Routing
    models: Models
    check: Mapping[str, Any]
    min_trust: float | None

    def routed(self, request: GenerationRequest) -> Operation[GenerationRequest]:
        """A line's request with the check and its route.

        Raises:
            NobodyServes: no live worker serves one of the models.
            InvalidRequest: this line cannot have the check or a route.
        """
        checked = build_request({**request.as_payload(), "check": self.check})
        return (yield from self.routing.routed(checked, self.models, self.min_trust))

    def window(self, queues: Sequence[str]) -> Operation[int]:
        """Lines to have in Redis at a time: no more than keep the workers busy, because a line begins with the model
        that was trusted when it was sent."""
        workers = yield from live_workers()
        places = sum(worker.max_batch or 0 for worker in workers if not set(queues).isdisjoint(worker.queues))
        return max(_LEAST_WINDOW, 2 * places)

    def queues(self) -> Operation[list[str]]:
        """The queues in which the lines may be, the cheapest model's first. Raises `NobodyServes`: no live worker
        serves one of the models."""
        steps = yield from self.routing.steps(self.models)
        return list(dict.fromkeys(step.queue for step in steps))


CHUNK_LINES: Final = 250
_WINDOW: Final = 1000
_CHUNK_BYTES: Final = 8 * 2**20
_DEFAULT_MAX_BYTES: Final = 2**30
_PART_OF_MAXMEMORY: Final = 0.8


@dataclass(frozen=True)
class Feeder:
    """
    Attributes:
        choice: the models that the lines may ask; ``None`` if the queue decides.
        max_redis_bytes: nothing is sent while the server uses more than this; ``None`` for 1 GiB, or for 80 % of the
            server's own limit if that is less.
        name: the name of the token with whose calls the lines share caches; ``None`` if only their salts decide.
    """

    connection: Redis
    input: InputFile
    line_options: BodyOptions
    job_options: JobOptions
    max_redis_bytes: int | None
    choice: ModelChoice | None = None
    name: str | None = None

    def feed(self, record: BatchRecord, room: int, done: Container[int] = ()) -> bool:
        """Send the next lines, at most `room`, in at most one transaction; returns whether any were sent.

        Args:
            done: numbers of lines that are answered already.

        Raises:
            RedisUnavailable: whether they were sent is unknown; the record in Redis shows it.
            NobodyServes: none were sent, because no live worker serves one of the models.
            InputChanged: the input file was changed.
        """
        jobs: list[tuple[Line, NewJob]] = []
        bad: dict[int, dict[str, Any]] = {}
        number, n_bytes, n_requests = record.next_line, 0, 0
        while number <= self.input.n_lines and len(jobs) + len(bad) < min(room, CHUNK_LINES) and n_bytes < _CHUNK_BYTES:
            if not self.input.is_blank(number):
                n_requests += 1
                if number not in done:
                    try:
                        line, job = self._job(record, number)
                        jobs.append((line, job))
                        n_bytes += job.size_bytes
                    except BadLine as error:
                        job_id = job_id_for(record.batch, number, error.custom_id)
                        bad[number] = not_run_line(answer_id_for(job_id), error)
            number += 1
        if number == record.next_line:
            return False
        return run(self.connection, send(record, jobs, bad, upto=number, n=n_requests))

    def usual_window(self, record: BatchRecord) -> int:
        """Lines to have in Redis at a time, unless the user sets a number. Raises `RedisUnavailable`."""
        return _WINDOW if self.choice is None else run(self.connection, self.choice.window(record.queues))

    def is_held_back(self) -> str | None:
        """The reason why nothing may be sent now, as a message; ``None`` if lines may be sent. Raises
        `RedisUnavailable`."""
        memory = run(self.connection, ask("INFO", "memory"))
        used, limit = int(memory["used_memory"]), int(memory.get("maxmemory", 0))  # 0: no limit
        allowed = self.max_redis_bytes
        if allowed is None:
            allowed = min(_DEFAULT_MAX_BYTES, int(_PART_OF_MAXMEMORY * limit) if limit else _DEFAULT_MAX_BYTES)
        if used <= allowed:
            return None
        return f"held back: Redis holds {used / 2**20:,.0f} MiB, and --max-redis-bytes is {allowed / 2**20:,.0f} MiB"

    def _job(self, record: BatchRecord, number: int) -> tuple[Line, NewJob]:
        line = self.input.line(number, self.line_options)
        try:
            job_id = job_id_for(record.batch, number, line.custom_id)
            request = line.request
            if self.name is not None:
                fields = request.as_payload()
                keep_apart(fields, self.name)
                request = build_request(fields)
            if self.choice is not None:
                request = run(self.connection, self.choice.routed(request))
            return line, NewJob(request, self.job_options, queue_of(request, record.queue), job_id)
        except RequestError as error:
            raise refused_request(number, line.custom_id, error) from None
