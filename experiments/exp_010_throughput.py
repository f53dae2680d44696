"""EXP-010, throughput: how much of mlx-lm's own speed remains in the engine, and in the whole pipeline?

The same prompts go through `mlx_lm.batch_generate` (all inserted at once), through the product's engine, and as jobs
through a separate worker process with a private server. They take turns, in an order that changes every round, so that
the machine's other work affects all of them. Run: ``python experiments/exp_010_throughput.py``.
"""

import random
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
from report import Report, columns, say, short
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


Contestant = Callable[[Load], Sequence[Any]]
"""Returns the texts or the tokens of a load's answers."""


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
        # The number keeps beginnings apart: tokens in common would be prefilled once, which mlx-lm's loop does not do.
        text = f"{number}: " + text_of(bench.encode, SIX_KINDS[number % len(SIX_KINDS)], dice.randrange(12, 40))
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


def through_worker(producer: Producer, load: Load) -> list[str]:
    """Jobs through Redis and a worker process; agents are new every time, and their turns are saved."""
    agents = f"{time.monotonic_ns()}"
    results = producer.results(
        producer.submit_many(
            {"agent_id": f"{agents}-{n}", "prompt": job.text, "max_tokens": job.max_tokens}
            for n, job in enumerate(load.jobs)
        ),
        timeout_s=600,
    )
    if any(result.usage.cached_tokens or not result.cache.saved for result in results):
        raise RuntimeError("a job had a cache, or its own was not saved")
    return [result.text for result in results]


@contextmanager
def pipeline(bench: Bench, folder: Path, places: int) -> Iterator[Contestant]:
    """Through a private server and worker."""
    options = ("--max-batch", str(places), "--model", bench.source, "--dtype", bench.dtype)
    with (
        EmbeddedServer(folder / "redis") as server,
        Producer(server.url) as producer,
        WorkerProcess(server.url, folder / "store", *options),
    ):
        yield partial(through_worker, producer)


def compare(bench: Bench, load: Load, contestants: dict[str, Contestant], rounds: int) -> None:
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


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    dice = random.Random(10)
    by_size = loads(bench, dice, (1, 3) if quick else (1, 4, 32), 3 if quick else 24)
    longer = longer_loads(bench, dice, *((3, 6, 6) if quick else (16, 48, 20)))
    alone: dict[str, Contestant] = {"bare": partial(bare, bench)}
    with closing(Engines(bench)) as engines, pipeline(bench, folder, by_size[-1].places) as through:
        alone["engine"] = engines.run
        for load in by_size:
            compare(bench, load, {**alone, "pipeline": through}, 1 if quick else 5 if load.places < 16 else 3)
        for load in longer:
            compare(bench, load, alone, 1 if quick else 3)
    rows = [measured(load) for load in (*by_size, *longer)]
    sized, steady, churning = rows[: len(by_size)], rows[-2], rows[-1]
    verdict = {
        "engine_097_at_every_batch_size": all(row["engine_ratio"]["median"] >= TARGETS["engine"] for row in sized),
        "pipeline_095_at_every_batch_size": all(
            row["pipeline_ratio"]["median"] >= TARGETS["pipeline"] for row in sized
        ),
        "engine_097_with_steady_rows": steady["engine_ratio"]["median"] >= TARGETS["engine"],
        "engine_097_with_churning_rows": churning["engine_ratio"]["median"] >= TARGETS["engine"],
        "all_texts_equal": all(map(same_text, rows)),
    }
    return {
        "verdict": verdict,
        "loads": rows,
        "worst_engine_ratio": min(row["engine_ratio"]["median"] for row in rows),
        "worst_pipeline_ratio": min(row["pipeline_ratio"]["median"] for row in sized),
    }


def short_form(bench: Bench, folder: Path) -> Iterator[Json]:
    """A full batch and one sequence: the engine, and then a worker too. A CPU's full batch has eight places."""
    sizes, n_tokens = ((32, 1), 96) if bench.on_gpu else ((8, 1), 16)

    def rows(name: str, contestant: Contestant) -> Iterator[Json]:
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
    with pipeline(bench, folder, sizes[0]) as through:
        yield from rows("pipeline", through)


TARGETS = {"engine": 0.97, "pipeline": 0.95}
RATIOS = {
    "load": "{name}", "tokens": "{generated}", "bare, tokens/s": "{bare_tokens_per_s:.3g}",
    "engine, tokens/s": "{engine_tokens_per_s:.3g}", "pipeline, tokens/s": "{pipeline_tokens_per_s:.3g}",
    "engine / bare": "{engine_ratio:.3g}", "pipeline / bare": "{pipeline_ratio:.3g}",
    "rounds": "{engine_ratio[n]}", "same text": "{same}",
}  # fmt: skip


def render(content: Json, results: Path) -> Report:
    rows = [{**row, "same": same_text(row)} for row in content["loads"]]
    number = say(content, "at worst engine {worst_engine_ratio}, pipeline {worst_pipeline_ratio} of a bare loop")
    parts = {"summary": _summary(rows), "ratios": columns(rows, RATIOS)}
    return Report("throughput against a bare loop", number, parts)


def same_text(load: Json) -> bool:
    return all(load[key] for key in load if key.endswith("_same_text"))


def _summary(rows: list[Json]) -> str:
    told = []
    for who, target in TARGETS.items():
        found = {row["name"]: row[f"{who}_ratio"] for row in rows if f"{who}_ratio" in row}
        met = [ratio for ratio in found.values() if ratio["median"] >= target]
        name, least = min(found.items(), key=lambda item: item[1]["median"])
        told.append(
            f"The {who} reaches its {target} in {len(met)} of {len(found)} loads; the least is {short(least)} ({name})."
        )
    return "\n".join(told)


if __name__ == "__main__":
    main(__doc__ or "", "010", run, render)
