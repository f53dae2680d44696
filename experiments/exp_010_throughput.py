"""EXP-010, throughput: how much of mlx-lm's own speed remains in the engine, and in the whole pipeline?

The same prompts go through `mlx_lm.batch_generate` (all inserted at once), through the product's engine, and as jobs
through a separate worker process with a private server. They take turns, in an order that changes every round, so that
the machine's other work affects all of them. Run: ``python experiments/exp_010_throughput.py``.
"""

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import Bench, main
from common import Json, in_turn, note, ratios, spread
from prompts import SIX_KINDS, text_of
from report import Report, columns, figure, lines, say, short
from worker_process import WorkerProcess
from works import answers, work

from stoker import Producer
from stoker_worker.embedded_redis import EmbeddedServer


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
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    texts: dict[str, list[str]] = field(default_factory=dict)
    n_generated: int = 0


Contestants = dict[str, Callable[[Load], Sequence[Any]]]
"""By name; each returns the texts or the tokens of a load's answers."""


def loads(bench: Bench, dice: random.Random, sizes: Sequence[int], n_tokens: int) -> list[Load]:
    """A load for each batch size, whose sequences generate so many tokens."""
    return [Load(f"batch of {n}", n, _jobs(bench, dice, [n_tokens] * n)) for n in sizes]


def longer_loads(bench: Bench, dice: random.Random, places: int, most: int, rows: int) -> list[Load]:
    """A steady batch, and sequences that come and go; for the engine alone."""
    least = min(8, most // 2)
    steady, churn = [most] * places, [dice.randint(least, most) for _ in range(rows)]
    return [
        Load(f"{places} rows of {most} tokens", places, _jobs(bench, dice, steady)),
        Load(f"{rows} rows of {least} to {most} tokens, {places} places", places, _jobs(bench, dice, churn)),
    ]


def _jobs(bench: Bench, dice: random.Random, lengths: Sequence[int]) -> list[Job]:
    made = []
    for number, max_tokens in enumerate(lengths):
        text = text_of(bench.encode, SIX_KINDS[number % len(SIX_KINDS)], dice.randrange(12, 40))
        made.append(Job(text, tuple(bench.encode(text)), max_tokens))
    return made


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
        if load.places not in self._by_places:
            self._by_places[load.places] = self._bench.worker_engine(load.places, max_step_s=0.5)
        engine = self._by_places[load.places]
        works = [work(job.ids, job.max_tokens, is_saved=True) for job in load.jobs]  # caches are handed over
        eos = self._bench.model.tokenizer.eos_ids
        return [[i for i in end.generated_ids if i not in eos] for end in answers(engine, works)]

    def close(self) -> None:
        for engine in self._by_places.values():
            engine.close()


def through_worker(producer: Producer, cache: str, load: Load) -> list[str]:
    """Jobs through Redis and a worker process; agents are new every time. `cache`: of the jobs."""
    agents = f"{time.monotonic_ns()}"
    results = producer.results(
        producer.submit_many(
            {"agent_id": f"{agents}-{n}", "cache": cache, "prompt": job.text, "max_tokens": job.max_tokens}
            for n, job in enumerate(load.jobs)
        ),
        timeout_s=600,
    )
    if any(result.usage.cached_tokens or result.cache.saved == (cache == "off") for result in results):
        raise RuntimeError("a job had a cache, or its own was saved against the plan")
    return [result.text for result in results]


@contextmanager
def pipelines(bench: Bench, folder: Path, places: int) -> Iterator[Contestants]:
    """A private server and worker, for agents whose turns are saved and for jobs without memory."""
    options = ("--max-batch", str(places), "--model", bench.source, "--dtype", bench.dtype)
    with (
        EmbeddedServer(folder / "redis") as server,
        Producer(server.url) as producer,
        WorkerProcess(server.url, folder / "store", *options),
    ):
        ways = {"pipeline": "readwrite", "unsaved": "off"}
        yield {name: partial(through_worker, producer, cache) for name, cache in ways.items()}


def compare(bench: Bench, load: Load, contestants: Contestants, rounds: int) -> None:
    """Run every contestant once a round, after a few tokens of each sequence as a warm-up."""
    note(f"{load.name}, {rounds} rounds")
    for contestant in contestants.values():
        contestant(replace(load, jobs=[replace(job, max_tokens=2) for job in load.jobs]))
    decode = bench.model.tokenizer.decode
    for _, name in in_turn(list(contestants), rounds):
        begin = time.perf_counter()
        answer = contestants[name](load)
        load.seconds[name].append(time.perf_counter() - begin)
        load.texts[name] = [one if isinstance(one, str) else decode(one) for one in answer]
        if name == "bare":
            load.n_generated = sum(map(len, answer))


def measured(load: Load) -> Json:
    """Ratios are taken within a round: both were measured within seconds of each other."""
    found: Json = {"name": load.name, "places": load.places, "rows": len(load.jobs), "generated": load.n_generated,
                   "prompt_tokens": sum(len(job.ids) for job in load.jobs)}  # fmt: skip
    for name, seconds in load.seconds.items():
        found[f"{name}_tokens_per_s"] = spread([load.n_generated / took for took in seconds], digits=1)
        if name != "bare":
            found[f"{name}_ratio"] = ratios(load.seconds["bare"], seconds)
            found[f"{name}_same_text"] = load.texts[name] == load.texts["bare"]
    return found


def _kept(loads: Sequence[Load], before: str, after: str) -> Json:
    """The share of the speed of `before` that `after` keeps, over all rounds of all loads."""
    pairs = (zip(load.seconds[before], load.seconds[after], strict=True) for load in loads)
    shares = [one / other for pair in pairs for one, other in pair]
    return spread(shares) | {"middle_half": [round(share, 3) for share in statistics.quantiles(shares)[::2]]}


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    dice = random.Random(10)
    by_size = loads(bench, dice, (1, 3) if quick else (1, 2, 4, 8, 16, 32), 3 if quick else 24)
    longer = longer_loads(bench, dice, *((3, 6, 6) if quick else (16, 64, 32)))
    engines = Engines(bench)
    alone: Contestants = {"bare": partial(bare, bench), "engine": engines.run}
    with pipelines(bench, folder, by_size[-1].places) as others:
        for load in by_size:
            # Short loads are disturbed most by the machine's other work, and cost least.
            compare(bench, load, {**alone, **others}, 1 if quick else 11 if load.places <= 8 else 5)
    for load in longer:
        compare(bench, load, alone, 1 if quick else 5)
    engines.close()
    rows = [measured(load) for load in (*by_size, *longer)]
    sized, steady, churning = rows[: len(by_size)], rows[-2], rows[-1]
    engine, pipeline = TARGETS.values()
    verdict = {
        "engine_097_at_every_batch_size": all(row["engine_ratio"]["median"] >= engine for row in sized),
        "pipeline_095_at_every_batch_size": all(row["pipeline_ratio"]["median"] >= pipeline for row in sized),
        "engine_097_with_steady_rows": steady["engine_ratio"]["median"] >= engine,
        "engine_097_with_churning_rows": churning["engine_ratio"]["median"] >= engine,
        "all_texts_equal": all(map(same_text, rows)),
    }
    return {
        "verdict": verdict,
        "loads": rows,
        "kept_by": {
            "process_and_server": _kept(by_size, "engine", "unsaved"),
            "saves": _kept(by_size, "unsaved", "pipeline"),
        },
        "worst_engine_ratio": min(row["engine_ratio"]["median"] for row in rows),
        "worst_pipeline_ratio": min(row["pipeline_ratio"]["median"] for row in sized),
    }


def short_form(bench: Bench, folder: Path) -> Iterator[Json]:
    """A full batch and one sequence: the engine, and then a worker too. A CPU's full batch has eight places."""
    sizes, n_tokens = ((32, 1), 96) if bench.on_gpu else ((8, 1), 16)

    def rows(name: str, contestant: Callable[[Load], Sequence[Any]]) -> Iterator[Json]:
        for load in loads(bench, random.Random(10), sizes, n_tokens):
            compare(bench, load, {"bare": partial(bare, bench), name: contestant}, 5)
            found = measured(load)
            is_first = load.places == sizes[0] and name == "engine"
            yield {"what": f"{name} / a bare mlx-lm loop, in speed: {load.name}", "ratio": found[f"{name}_ratio"],
                   "asked": f"at least {TARGETS[name]}", "first": found[f"{name}_tokens_per_s"],
                   "second": found["bare_tokens_per_s"], "unit": "tokens/s",
                   "equal": found[f"{name}_same_text"], "headline": "full batch" if is_first else ""}  # fmt: skip

    with closing(Engines(bench)) as engines:
        yield from rows("engine", engines.run)
    with pipelines(bench, folder, sizes[0]) as others:
        yield from rows("pipeline", others["pipeline"])


TARGETS = {"engine": 0.97, "pipeline": 0.95}
RATIOS = {
    "load": "{name}", "tokens": "{generated}", "bare, tokens/s": "{bare_tokens_per_s:.3g}",
    "engine, tokens/s": "{engine_tokens_per_s:.3g}", "pipeline, tokens/s": "{pipeline_tokens_per_s:.3g}",
    "engine / bare": "{engine_ratio:.3g}", "pipeline / bare": "{pipeline_ratio:.3g}",
    "pipeline without saves / bare": "{unsaved_ratio:.3g}", "same text": "{same}",
}  # fmt: skip
KEPT = {
    "process_and_server": "Process, server and wire keep {median} of the engine's speed",
    "saves": "Saves keep {median} of the speed without them",
}


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    rows = [{**row, "same": same_text(row)} for row in content["loads"]]
    number = say(content, "at worst engine {worst_engine_ratio}, pipeline {worst_pipeline_ratio} of a bare loop")
    parts = {"summary": _summary(content, rows), "ratios": columns(rows, RATIOS)}
    return Report("throughput against a bare loop", number, parts)


def same_text(load: Json) -> bool:
    return all(load[key] for key in load if key.endswith("_same_text"))


def _summary(content: Json, rows: list[Json]) -> str:
    told = []
    for who, target in TARGETS.items():
        found = {row["name"]: row[f"{who}_ratio"] for row in rows if f"{who}_ratio" in row}
        met = [ratio for ratio in found.values() if ratio["median"] >= target]
        name, least = min(found.items(), key=lambda item: item[1]["median"])
        told.append(
            f"The {who} reaches its {target} in {len(met)} of {len(found)} loads; the least is {short(least)} ({name})."
        )
    middle = " (the middle half of {n} rounds: {middle_half[0]} to {middle_half[1]})."
    return "\n".join([*told, *(say(content["kept_by"][name], said + middle) for name, said in KEPT.items())])


def plot(content: Json, results: Path) -> None:
    rows = [row for row in content["loads"] if "pipeline_ratio" in row]
    places = [row["places"] for row in rows]
    with figure(content, results, "throughput", (11, 4.2), panels=(1, 2)) as (speed, ratio):
        lines(speed, places, {who: [row[f"{who}_tokens_per_s"] for row in rows] for who in ("bare", *TARGETS)})
        lines(ratio, places, {f"{who} (asked: {asked})": [row[f"{who}_ratio"] for row in rows]
                              for who, asked in TARGETS.items()})  # fmt: skip
        speed.set_ylabel("generated tokens/s")
        ratio.set_ylabel("of a bare loop's speed")
        for axes in (speed, ratio):
            axes.set(xscale="log", xlabel="rows in the batch")
            axes.set_xticks(places, [str(n) for n in places], minor=False)
            axes.minorticks_off()


if __name__ == "__main__":
    main(__doc__ or "", "010", run, render)
