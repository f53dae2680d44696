"""EXP-010, throughput: how much of mlx-lm's own speed remains in the engine, and in the whole pipeline?

The same prompts go through `mlx_lm.batch_generate` (all inserted at once), through the product's engine, and as jobs
through a separate worker process with a private server. They take turns, in an order that changes every round, so that
the machine's other work affects all of them. Run: ``python experiments/exp_010_throughput.py``.
"""

import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import Bench, main
from common import Json, machine, note, spread
from exp_010_report import render
from prompts import text_of

from stoker import Producer
from stoker_shared import build_request
from stoker_worker.embedded_redis.server import EmbeddedServer
from stoker_worker.ports import GenerationWork

REPORT = "EXP-010-throughput.md"
ENGINE_TARGET, PIPELINE_TARGET = 0.97, 0.95
KINDS = ("English", "German", "French", "Spanish", "Python", "Portuguese")


@dataclass(frozen=True)
class Job:
    """A sequence of a load: the text, its token ids, and how many tokens to generate."""

    text: str
    ids: tuple[int, ...]
    max_tokens: int


@dataclass
class Load:
    """Sequences for a number of places, and their measurements.

    Attributes:
        seconds: of every round, by contestant.
    """

    name: str
    places: int
    jobs: list[Job]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    answers: dict[str, list[str]] = field(default_factory=dict)
    n_generated: int = 0


def loads(bench: Bench, *, quick: bool) -> tuple[list[Load], list[Load]]:
    """The loads for all three contestants, by batch size, and the longer loads for the engine alone."""
    dice = random.Random(10)

    def jobs(lengths: Sequence[int]) -> list[Job]:
        made = []
        for number, max_tokens in enumerate(lengths):
            text = text_of(bench.encode, KINDS[number % len(KINDS)], dice.randrange(12, 40))
            made.append(Job(text, tuple(bench.encode(text)), max_tokens))
        return made

    sizes, tokens = ((1, 3), 3) if quick else ((1, 2, 4, 8, 16, 32), 24)
    by_size = [Load(f"batch of {n}", n, jobs([tokens] * n)) for n in sizes]
    steady, most, rows = (3, 6, 6) if quick else (16, 64, 32)
    churn = [dice.randint(min(8, most // 2), most) for _ in range(rows)]
    return by_size, [
        Load(f"{steady} rows of {most} tokens", steady, jobs([most] * steady)),
        Load(f"{rows} rows of {min(8, most // 2)} to {most} tokens, {steady} places", steady, jobs(churn)),
    ]


def bare(bench: Bench, load: Load) -> list[list[int]]:
    """mlx-lm's own loop over `BatchGenerator`, at its own settings for as many places."""
    from mlx_lm import batch_generate

    answer = batch_generate(
        bench.network,
        bench.tokenizer,
        [list(job.ids) for job in load.jobs],
        max_tokens=[job.max_tokens for job in load.jobs],
        return_token_ids=True,
        completion_batch_size=load.places,
        prefill_batch_size=min(8, load.places),
    )
    assert answer.token_ids is not None
    return answer.token_ids


class Engines:
    """The product's engine, one for each number of places; resident, as in a worker."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._by_places: dict[int, Any] = {}

    def run(self, load: Load) -> list[list[int]]:
        engine = self._by_places.get(load.places) or self._make(load.places)
        rows = [engine.submit(self._work(job)) for job in load.jobs]
        ids: dict[int, list[int]] = {}
        eos = self._bench.model.tokenizer.eos_ids
        while engine.in_flight:
            for completion in engine.step():
                ids[completion.uid] = [i for i in completion.generated_ids if i not in eos]
        return [ids[uid] for uid in rows]

    def close(self) -> None:
        for engine in self._by_places.values():
            engine.close()

    def _make(self, places: int) -> Any:
        from stoker_worker.engine.assembly import assemble

        spec = self._bench.model.spec
        engine = assemble(
            self._bench.network,
            self._bench.model,
            max_bytes=2000 * spec.bytes_per_block,
            max_batch=places,
            prefill_tokens=1024 if self._bench.on_gpu else 256,  # the worker's own
            max_step_s=0.5,
        )
        self._by_places[places] = engine
        return engine

    def _work(self, job: Job) -> GenerationWork:
        """The caches of its sequences are handed over, as for a job with an agent."""
        request = build_request({"agent_id": "a", "prompt": job.text, "max_tokens": job.max_tokens})
        return GenerationWork(request, job.ids, prefix=None, save_from=0)


class Pipeline:
    """Jobs through Redis and a worker process; agents are new every time."""

    def __init__(self, url: str, *, saves: bool) -> None:
        """
        Args:
            saves: whether the agents' turns are saved.
        """
        self._producer = Producer(url)
        self._cache = "readwrite" if saves else "off"
        self._rounds = 0

    def run(self, load: Load) -> list[str]:
        self._rounds += 1
        agents = f"{self._cache}-{self._rounds}"
        tickets = self._producer.submit_many(
            [
                {"agent_id": f"{agents}-{n}", "cache": self._cache, "prompt": job.text, "max_tokens": job.max_tokens}
                for n, job in enumerate(load.jobs)
            ]
        )
        results = [ticket.result(timeout_s=600) for ticket in tickets]
        is_saved = self._cache != "off"
        if any(result.usage.cached_tokens or result.cache.saved != is_saved for result in results):
            raise RuntimeError("a job had a cache, or its own was saved against the plan")
        return [result.text for result in results]


@contextmanager
def worker(bench: Bench, folder: Path, places: int, dtype: str) -> Iterator[str]:
    """A private server and worker; yields the server's URL."""
    with EmbeddedServer(folder / "redis") as server:
        options = ["--redis", server.url, "--store", str(folder / "store"), "--max-batch", str(places)]
        command = [sys.executable, "-m", "stoker_worker", "run", *options, "--model", bench.source, "--dtype", dtype]
        log = folder / "worker.log"
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            until = time.monotonic() + 300
            while "ready: model" not in log.read_text():
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the worker did not start:\n{log.read_text()[-2000:]}")
                time.sleep(0.1)
            yield server.url
        finally:
            process.terminate()
            process.wait(60)


def take_turns(load: Load, contestants: dict[str, Callable[[Load], Any]], texts: Any, rounds: int) -> None:
    """Run every contestant once a round, after a few tokens of each sequence as a warm-up."""
    names = list(contestants)
    for name in names:
        contestants[name](replace(load, jobs=[replace(job, max_tokens=2) for job in load.jobs]))
    for number in range(rounds):
        note(f"{load.name}, round {number + 1} of {rounds}")
        for name in names[number % len(names) :] + names[: number % len(names)]:
            begin = time.perf_counter()
            answer = contestants[name](load)
            load.seconds.setdefault(name, []).append(time.perf_counter() - begin)
            load.answers[name] = [one if isinstance(one, str) else texts(one) for one in answer]
            if name == "bare":
                load.n_generated = sum(map(len, answer))


def measured(load: Load) -> Json:
    """Ratios are taken within a round: both were measured within seconds of each other."""
    found: Json = {"name": load.name, "places": load.places, "rows": len(load.jobs), "generated": load.n_generated,
                   "prompt_tokens": sum(len(job.ids) for job in load.jobs)}  # fmt: skip
    for name, seconds in load.seconds.items():
        found[f"{name}_tokens_per_s"] = spread([load.n_generated / took for took in seconds], digits=1)
        if name != "bare":
            ratios = [b / took for b, took in zip(load.seconds["bare"], seconds, strict=True)]
            found[f"{name}_ratio"] = spread(ratios)
            found[f"{name}_same_text"] = load.answers[name] == load.answers["bare"]
    return found


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    facts = machine(bench.facts)
    rounds = 1 if quick else 5
    by_size, long = loads(bench, quick=quick)
    engines = Engines(bench)
    texts = bench.model.tokenizer.decode
    alone: dict[str, Callable[[Load], Any]] = {"bare": lambda load: bare(bench, load), "engine": engines.run}
    with worker(bench, folder, max(load.places for load in by_size), bench.dtype) as url:
        pipelines = {"pipeline": Pipeline(url, saves=True).run, "unsaved": Pipeline(url, saves=False).run}
        everybody = {**alone, **pipelines}
        for load in by_size:
            take_turns(load, everybody, texts, rounds)
    for load in long:
        take_turns(load, alone, texts, rounds)
    engines.close()
    rows = [measured(load) for load in (*by_size, *long)]
    sized, steady, churning = rows[: len(by_size)], rows[-2], rows[-1]
    criteria = {
        "engine_097_at_every_batch_size": all(row["engine_ratio"]["median"] >= ENGINE_TARGET for row in sized),
        "pipeline_095_at_every_batch_size": all(row["pipeline_ratio"]["median"] >= PIPELINE_TARGET for row in sized),
        "engine_097_with_steady_rows": steady["engine_ratio"]["median"] >= ENGINE_TARGET,
        "engine_097_with_churning_rows": churning["engine_ratio"]["median"] >= ENGINE_TARGET,
        "all_texts_equal": all(row[key] for row in rows for key in row if key.endswith("_same_text")),
    }
    return {
        "machine": facts,
        "verdict": {"passed": all(criteria.values()), **criteria},
        "loads": rows,
        "worst_engine_ratio": min(row["engine_ratio"]["median"] for row in rows),
        "worst_pipeline_ratio": min(row["pipeline_ratio"]["median"] for row in sized),
        "median_engine_ratio": round(statistics.median(row["engine_ratio"]["median"] for row in rows), 3),
        "load_average_at_end": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    main(__doc__ or "", "010", REPORT, run, render)
