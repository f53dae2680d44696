"""Jobs through a worker process for a long time, across restarts, and whether they were served right. For EXP-021 and
EXP-024; no MLX.

Owns the loop that keeps jobs waiting, stops the worker and starts it again, and the cut of a run into slices. The
worker's own figures come from `watched_worker.py`.
"""

import bisect
import json
import math
import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from signal import Signals
from typing import Any

from common import Json, note
from redis import Redis
from rq.job import Job
from rq.results import Result
from rq.utils import utcparse
from worker_process import WorkerProcess, watched

from stoker import Producer
from stoker_shared import GenerationResult
from stoker_shared.errors import JobError, ResultTimeout
from stoker_worker.embedded_redis import EmbeddedServer

PATIENCE_S = 300.0
_CHUNKS = 4


@dataclass(frozen=True)
class Restart:
    """Unix times: of the signal, and of the worker's being ready again."""

    signal: str
    at: float
    ready_at: float


@dataclass
class Served:
    """
    Attributes:
        results: of all jobs, in the order of their submission.
        ends: Unix time of each job's end.
        n_results: how many results Redis has of each job.
    """

    began_at: float
    results: list[GenerationResult | JobError] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    n_results: list[int] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)

    @property
    def answered(self) -> list[tuple[GenerationResult, float]]:
        """Results with their ends, in the order of submission, without errors and those that were not saved."""
        pairs = zip(self.results, self.ends, strict=True)
        return [(one, end) for one, end in pairs if isinstance(one, GenerationResult) and one.cache.saved]

    @property
    def unanswered(self) -> list[str]:
        """Of the others, the reasons."""
        return [
            f"{one.cache.save_error} (not saved)" if isinstance(one, GenerationResult) else str(one)
            for one in self.results
            if not (isinstance(one, GenerationResult) and one.cache.saved)
        ]

    @property
    def lives(self) -> list[tuple[float, float]]:
        """When the worker was ready, and when it was stopped or the last job ended."""
        begins = [self.began_at, *(restart.ready_at for restart in self.restarts)]
        return list(zip(begins, [*(restart.at for restart in self.restarts), max(self.ends)], strict=True))


def serve(
    folder: Path, worker: Sequence[str], requests: Iterable[dict[str, Any]], *, ahead: int,
    restarts: Sequence[tuple[float, Signals]], progress: Callable[[int], float],
    look: Callable[[int, Redis], None], **options: Any,
) -> tuple[Served, list[Json], str]:  # fmt: skip
    """Keep up to `ahead` jobs waiting or running at a worker process until all requests have ended; returns the
    worker's samples of itself and its log, too.

    Args:
        folder: has the worker's ``store``.
        worker: options of the worker.
        restarts: at which progress it is stopped, and with which signal; it is started again at once.
        progress: of the run, from 0 to 1, from the number of jobs that have ended.
        look: called every few jobs with that number, and a connection to the server.
        options: the jobs' options, as for `Producer.submit_many`.
    """
    samples = folder / "samples"
    with (
        EmbeddedServer(folder / "redis") as server,
        Redis.from_url(server.url) as connection,
        Producer(server.url) as producer,
        WorkerProcess(server.url, folder / "store", *worker, program=watched(samples)) as process,
    ):
        served, coming, stops = Served(time.time()), iter(requests), deque(restarts)
        waiting: deque[list[Any]] = deque()
        while True:
            while len(waiting) < _CHUNKS and (some := list(islice(coming, -(-ahead // _CHUNKS)))):
                waiting.append(producer.submit_many(some, **options))
            look(len(served.results), connection)
            if not waiting:
                break
            if stops and progress(len(served.results)) >= stops[0][0]:
                served.restarts.append(_restarted(process, stops.popleft()[1]))
            tickets = waiting.popleft()
            ended: dict[str, list[Any]] = {}
            with suppress(ResultTimeout):
                for ticket in producer.as_completed(tickets, PATIENCE_S):  # at once: a result stays for a while only
                    with connection.pipeline(transaction=False) as pipeline:
                        pipeline.xlen(Result.get_key(ticket.job_id)).hget(Job.key_for(ticket.job_id), "ended_at")
                        ended[ticket.job_id] = pipeline.execute()
            served.results += producer.results(tickets, 0, return_errors=True)
            for n_results, end in (ended.get(ticket.job_id, [0, None]) for ticket in tickets):
                served.n_results.append(n_results)
                served.ends.append(utcparse(end.decode()).timestamp() if end else time.time())
    return served, [json.loads(line) for line in samples.read_text().splitlines()], process.log.read_text()


def _restarted(worker: WorkerProcess, with_signal: Signals) -> Restart:
    note(f"{with_signal.name}: the worker is stopped and started again")
    at = time.time()
    worker.restart(with_signal)
    return Restart(with_signal.name, at, time.time())


def long_tailed(dice: random.Random, median: float, sigma: float, least: int, most: int) -> int:
    return min(most, least + int(dice.lognormvariate(math.log(median), sigma)))


# --- what it shows ---


def out_of_order(answered: Iterable[tuple[GenerationResult, float]]) -> int:
    """Turns that do not continue the one submitted before them."""
    wrong = 0
    last: dict[str, tuple[GenerationResult, float]] = {}
    for result, end in answered:
        assert result.agent_id is not None
        before, before_end = last.get(result.agent_id, (None, 0.0))
        n_before = before.usage.prompt_tokens + before.usage.completion_tokens if before else 0
        version = (before.cache.agent_version or 0) + 1 if before else 1
        wrong += result.cache.agent_version != version or result.usage.prompt_tokens <= n_before or end < before_end
        last[result.agent_id] = (result, end)
    return wrong


def prefilled_again(results: Iterable[GenerationResult]) -> int:
    """Most tokens of an agent's saved conversation that a turn had to prefill."""
    saved: dict[str, int] = {}
    most = 0
    for result in results:
        assert result.agent_id is not None
        most = max(most, saved.get(result.agent_id, 0) - result.usage.cached_tokens)
        saved[result.agent_id] = result.usage.prompt_tokens + result.usage.completion_tokens
    return most


def slices(served: Served, samples: Sequence[Json], n_jobs: int) -> list[Json]:
    """Equal numbers of jobs, in the order of their ends, with the work they made and the worker's figures meanwhile."""
    order = sorted(served.answered, key=lambda pair: pair[1])
    began, found = served.began_at, []
    for first in range(0, len(order), n_jobs):
        members = order[first : first + n_jobs]
        ended = members[-1][1]
        seconds = max(0.001, ended - began)  # jobs may end together
        usages = [result.usage for result, _ in members]
        cpu_s = nearest(samples, ended)["cpu"] - nearest(samples, began)["cpu"]
        inside = [one for one in samples if began < one["at"] <= ended] or [nearest(samples, ended)]
        found.append({
            "jobs": first + len(members),
            "ended_s": round(ended - served.began_at, 1),
            "s": round(seconds, 3),
            "jobs_per_s": round(len(members) / seconds, 2),
            "cpu_s": round(cpu_s, 2),
            "life": 1 + sum(restart.at < ended for restart in served.restarts),
            "has_restart": any(one.at < ended and began < one.ready_at for one in served.restarts) or cpu_s < 0,
            "prefilled": sum(usage.prompt_tokens - usage.cached_tokens for usage in usages),
            "generated": sum(usage.completion_tokens for usage in usages),
            "attended": sum(usage.completion_tokens * usage.prompt_tokens for usage in usages),
            "cached": sum(usage.cached_tokens for usage in usages),
            **{f"{name}_mb": mb(statistics.median(one[name] for one in inside)) for name in ("rss", "active", "kept")},
            "peak_mb": mb(max(one["peak"] for one in inside)),
            "sources": dict(Counter(result.cache.source for result, _ in members)),
        })  # fmt: skip
        began = ended
    return found


def nearest(samples: Sequence[Json], at: float) -> Json:
    """The sample closest to a Unix time; samples are in the order of theirs."""
    index = bisect.bisect(samples, at, key=lambda one: one["at"])
    return min(samples[max(0, index - 1) : index + 1], key=lambda one: abs(one["at"] - at))


def mb(n_bytes: float) -> float:
    return round(n_bytes / 1e6, 1)
