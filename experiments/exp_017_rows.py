"""EXP-017, rows: what does a batch of unequal sequences gain when each costs its own length only?

The same rows go through mlx-lm's `BatchGenerator`, which keeps a batch as one rectangle, and through the product's
`RowsGenerator`. They take turns, in an order that changes every round. Then a long restored row joins seven decoding
ones, through the whole engine. Run: ``python experiments/exp_017_rows.py``.
"""

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from bench import Bench, main
from common import Json, note, ratios, spread, take_turns, timed
from prompts import SIX_KINDS, text_of
from report import Report, columns, figure, say, short, table
from rows_bench import CONTESTANTS, Contexts, Job, Load, run_once, same_tokens
from stopwatch import Stopwatch
from works import let_decode, work

from stoker_worker.ports import GenerationWork, SequenceCache
from stoker_worker.ports.model import Batching, ServingMode

# --- where the time of a batch's steps goes: model, attention, sampling, joins, leaves, Python ---
# MLX computes later than Python asks, and beside it. Here each part is computed before the next begins, so the parts of
# a run add up to it, and the run takes longer than one that is not watched.

PARTS = ("model", "attention", "sampling", "prefill", "join", "leave", "python")
"""The model's decode passes without attention; attention, with the writing of keys and values; a prompt's passes; the
copies of rows that join or leave; the rest."""


class Parts(Stopwatch):
    """All of one run; what is in no other part is Python's. Implements `rows_bench.Watch`."""

    def __init__(self) -> None:
        super().__init__()
        self._stack.append("python")

    @property
    def now(self) -> str:
        return self._stack[-1]

    def model(self, model: Any) -> Any:
        return _WatchedModel(model, self)

    def sampler(self) -> Any:
        """mlx-lm's greedy sampler."""
        import mlx.core as mx

        return self._timed(lambda logprobs: mx.argmax(logprobs, axis=-1), "sampling", lambda drawn, *_: drawn)

    @contextmanager
    def during(self, network: Any) -> Iterator[None]:
        """Watch what runs inside the block."""
        from mlx_lm.models.cache import BatchKVCache

        from stoker_worker.engine.rows import attention, decode_batch
        from stoker_worker.engine.rows.attention import StepCache

        with ExitStack() as stack:

            def watch(owner: Any, name: str, timed: Callable[..., Any]) -> None:
                stack.enter_context(patch.object(owner, name, timed))

            for owner, name, part, results in _watched_methods():
                watch(owner, name, self._timed(getattr(owner, name), part, results))
            watch(decode_batch, "drawn", self._timed(decode_batch.drawn, "sampling", lambda drawn, *_: drawn))
            for module in list(attention._modules_of(network)):
                name = attention._NAME
                watch(module, name, self._attention(getattr(module, name), lambda out: out))
            watch(BatchKVCache, "update_and_fetch", self._attention(BatchKVCache.update_and_fetch, lambda kv: kv))
            of_rows = self._attention(StepCache.update_and_fetch, lambda kv: [x.arrays for x in kv])
            watch(StepCache, "update_and_fetch", of_rows)
            self._since = time.perf_counter()
            yield
            self._tick()

    def _timed(self, call: Callable[..., Any], part: str, results: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, as `part`, until its `results` are computed."""
        import mlx.core as mx

        def timed(*args: Any, **options: Any) -> Any:
            with self.part(part):
                out = call(*args, **options)
                mx.eval(results(out, *args))
                return out

        return timed

    def _attention(self, call: Callable[..., Any], results: Callable[[Any], Any]) -> Callable[..., Any]:
        """`call`, as attention, in the model's decode passes; its inputs are the model's work."""
        import mlx.core as mx

        def timed(*args: Any, **options: Any) -> Any:
            if self.now != "model":
                return call(*args, **options)
            mx.eval([x for x in args if isinstance(x, mx.array)])
            with self.part("attention"):
                out = call(*args, **options)
                mx.eval(results(out))
                return out

        return timed


class _WatchedModel:
    """A model whose decode passes are computed when it is called."""

    def __init__(self, model: Any, parts: Parts) -> None:
        self._model = model
        self._parts = parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        import mlx.core as mx

        if self._parts.now != "python":
            return self._model(*args, **options)
        with self._parts.part("model"):
            logits = self._model(*args, **options)
            mx.eval(logits)
            return logits


def _watched_methods() -> list[tuple[Any, str, str, Callable[..., Any]]]:
    """Classes, methods, their parts, and what they leave to be computed."""
    from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch

    from stoker_worker.engine.rows.decode_batch import DecodeBatch
    from stoker_worker.engine.rows.rows_generator import PrefillRows, RowsGenerator

    def caches(_: Any, batch: Any, *__: Any) -> Any:
        return [x for cache in batch.prompt_cache for x in (cache.keys, cache.values) if x is not None]

    def both(apart: Any, batch: Any, *_: Any) -> Any:
        return [caches(None, batch), caches(None, apart)]

    def groups(_: Any, batch: Any, *__: Any) -> Any:
        return [(group._keys, group._values) for group in batch._groups.groups]

    def newest(_: Any, generator: Any, *__: Any) -> Any:
        return [x for cache in generator._prefill.rows[-1].caches for x in (cache.keys, cache.values)]

    def nothing(*_: Any) -> Any:
        return []

    return [
        (DecodeBatch, "join", "join", groups),
        (DecodeBatch, "_drop", "leave", groups),
        (PrefillRows, "next", "prefill", nothing),
        (RowsGenerator, "insert", "join", newest),
        (GenerationBatch, "extend", "join", caches),
        (PromptProcessingBatch, "split", "join", both),
        (PromptProcessingBatch, "extend", "join", caches),
        (BatchGenerator, "_make_batch", "join", nothing),
        (PromptProcessingBatch, "prompt", "prefill", nothing),
        (GenerationBatch, "filter", "leave", caches),
    ]


# --- the loads: rows that are unequal, that come and go, or that are alike, and what was asked for in each ---

SIZES = (1, 2, 4, 8, 32)
MIXED, RESTORED, COMING, EQUAL = 2.5, 1.4, 1.1, 1.0
"""Times mlx-lm's speed."""


@dataclass(frozen=True)
class Sizes:
    """
    Attributes:
        long, medium: rows and tokens of each, in the unequal load, with `said` tokens generated.
        rows, places, context: of the restored rows that come and go; the short ones are as many.
        few, some, most: tokens generated by rows that come and go: `few` to `some` if restored, to `most` if short.
        steady: rows of `most` tokens.
        equal: batch sizes of rows with `each` tokens.
    """

    long: tuple[int, int]
    medium: tuple[int, int]
    said: int
    rows: int
    places: int
    context: int
    few: int
    some: int
    most: int
    steady: int
    equal: tuple[int, ...]
    each: int


FULL = Sizes((2, 3000), (14, 200), 32, 40, 16, 1024, 8, 32, 64, 16, SIZES, 24)
SHORT = Sizes((2, 1000), (14, 100), 16, 24, 12, 256, 8, 16, 32, 8, (1, 8), 16)
QUICK = Sizes((1, 300), (3, 40), 4, 5, 3, 300, 2, 4, 6, 3, (1, 2), 3)


def loads(bench: Bench, sizes: Sizes) -> list[Load]:
    dice = random.Random(17)

    def ids(n_tokens: int, seed: int) -> tuple[int, ...]:
        return tuple(bench.encode(text_of(bench.encode, SIX_KINDS[seed % len(SIX_KINDS)], n_tokens, seed=seed)))

    def short(n_rows: int, least: int, most: int) -> list[Job]:
        return [Job((), ids(dice.randint(20, 60), n), dice.randint(least, most)) for n in range(n_rows)]

    rows, places, said, few, most = sizes.rows, sizes.places, sizes.said, sizes.few, sizes.most
    unequal = [ids(n_tokens, n) for count, n_tokens in (sizes.long, sizes.medium) for n in range(count)]
    named = "{} x {} + {} x {} tokens, {} generated".format(*sizes.long, *sizes.medium, said)
    contexts = [ids(sizes.context, seed) for seed in range(2)]
    restored = [Job(contexts[n % 2], ids(32, n), dice.randint(few, sizes.some)) for n in range(rows)]
    return [
        Load("mixed", f"{named}, fresh", len(unequal), MIXED, [Job((), one, said) for one in unequal]),
        Load("mixed_restored", f"{named}, restored", len(unequal), MIXED,
             [Job(one[:-1], one[-1:], said) for one in unequal]),
        Load("restored", f"{rows} rows of {sizes.context} restored and 32 new tokens, {few} to {sizes.some} generated, "
             f"{places} places", places, RESTORED, restored),
        Load("short", f"{rows} rows of 20 to 60 tokens, {few} to {most} generated, {places} places", places, COMING,
             short(rows, few, most)),
        Load("steady", f"{sizes.steady} rows of {most} tokens", sizes.steady, EQUAL, short(sizes.steady, most, most)),
        *(Load(f"batch_{n}", f"{n} rows of {sizes.each} tokens", n, EQUAL, short(n, sizes.each, sizes.each))
          for n in sizes.equal),
    ]  # fmt: skip


ROUNDS = {"mixed": 1, "mixed_restored": 3, "restored": 5, "short": 5, "steady": 5, **{f"batch_{n}": 5 for n in SIZES}}
IN_PARTS = ("mixed_restored", "restored", "short")
LEAST = 0.97
MOST_LONGEST, MOST_JOIN, MOST_MEMORY = 1.5, 1.3, 1.15


# --- rows against the rectangle ---


def measured(bench: Bench, contexts: Contexts, load: Load, rounds: int) -> Json:
    """Let the contestants take turns; ratios are taken within a round."""
    note(f"{load.name}, {rounds} rounds")
    load.runs = take_turns({one.name: partial(run_once, bench, contexts, load, one) for one in CONTESTANTS}, rounds)
    mlx_lm, rows = load.runs.values()
    bytes_of_rows = sum(job.n_tokens for job in load.jobs) * bench.model.spec.bytes_per_token
    return {
        "key": load.key,
        "name": load.name,
        "places": load.places,
        "n_rows": len(load.jobs),
        "generated": sum(job.max_tokens for job in load.jobs),
        "target": load.target,
        "ratio": ratios([run.seconds for run in mlx_lm], [run.seconds for run in rows]),
        "same_rows": same_tokens([*mlx_lm, *rows]),
        "mb_of_rows": round(bytes_of_rows / 1e6),
        **{
            name: {
                "s": spread([run.seconds for run in runs]),
                "steps": len(runs[0].memory),
                "peak_mb": spread([run.peak / 1e6 for run in runs], digits=1),
                "peak_to_rows": round(statistics.median(run.peak for run in runs) / bytes_of_rows, 3),
            }
            for name, runs in load.runs.items()
        },
    }


def memory_over_time(load: Load) -> Json:
    """MB after some of the steps of each contestant's last round."""
    found = {}
    for name, runs in load.runs.items():
        memory = runs[-1].memory
        kept = memory[:: max(1, len(memory) // 150)]
        found[name] = {"s": [round(s, 2) for s, _ in kept], "mb": [round(n / 1e6, 1) for _, n in kept]}
    return {"load": load.name, **found}


def parts(bench: Bench, contexts: Contexts, load: Load) -> Json:
    """Seconds of each part of a run, in which every part is waited for."""
    found: Json = {"load": load.name}
    for contestant in CONTESTANTS:
        watch = Parts()
        done = run_once(bench, contexts, load, contestant, watch)
        note(f"parts of {load.name}: {contestant.name} {done.seconds:.1f} s")
        seconds = {name: round(watch.seconds[name], 3) for name in PARTS}
        found[contestant.name] = {"steps": len(done.memory), "s": round(done.seconds, 3), "parts": seconds}
    return found


# --- a long restored row joins, through the engine ---


def joining(bench: Bench, batching: Batching, *, rows: int, n_tokens: int, repeats: int) -> Json:
    """Times of steps to a quiet one, from a long row's submission to its first token."""
    bench = replace(bench, model=replace(bench.model, mode=ServingMode(batching))).endless()
    engine = bench.worker_engine(16, max_step_s=0.5)
    for n in range(rows):
        engine.submit(work(bench.encode(f"Count on from {n}:"), 4000))
    let_decode(engine, 4)
    found: dict[str, list[float]] = defaultdict(list)
    steps = []
    for number in range(repeats):
        for _ in range(2):
            engine.step()
        quiet = statistics.median(timed(engine.step) for _ in range(8))
        asked, entered = _restored(bench, n_tokens), 0
        begin = time.perf_counter()
        uid = engine.submit(asked)  # the decoding rows wait meanwhile
        del asked
        taken = [1000 * (time.perf_counter() - begin) + timed(engine.step)]
        while engine.progress()[uid].tokens == 0:
            entered += engine.progress()[uid].stage == "waiting"
            taken.append(timed(engine.step))
        beside = statistics.median(timed(engine.step) for _ in range(3))
        engine.cancel(uid)
        of_quiet = [ms / quiet for ms in taken]
        note(f"{batching}, {n_tokens} tokens join, {number + 1} of {repeats}: {[round(x, 2) for x in of_quiet]}")
        found["quiet_ms"].append(quiet)
        found["longest"].append(max(of_quiet))
        found["join"].append(max(of_quiet[entered : entered + 2]))  # the pass of a step is waited for in the next one
        found["beside"].append(beside / quiet)
        steps.append([round(x, 3) for x in of_quiet])
    engine.close()
    return {"tokens": n_tokens, "mb": round(n_tokens * bench.model.spec.bytes_per_token / 1e6), "beside_rows": rows,
            **{name: spread(values) for name, values in found.items()}, "steps": steps}  # fmt: skip


def _restored(bench: Bench, n_tokens: int) -> GenerationWork:
    """A row with `n_tokens` restored tokens, in the memory that the loader reads them into, and a prompt of one more.
    Its contents make no difference here."""
    from stoker_worker.engine.transfer import MlxRoom

    rng = np.random.default_rng(17)
    room = MlxRoom(bench.model.spec, n_tokens + 1, 8)
    for keys, values in room.layers():
        for array in (keys, values):
            array[:, :n_tokens] = rng.standard_normal((array.shape[0], n_tokens, array.shape[2]), np.float32)
    del keys, values, array
    return work(rng.integers(1000, 9000, n_tokens + 1).tolist(), 8, SequenceCache(n_tokens, (), room=room))


# --- all of it ---


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    contexts = Contexts(bench)
    found, split, memory = [], [], {}
    warm_up(bench, contexts)
    for load in loads(bench, QUICK if quick else FULL):
        found.append(measured(bench, contexts, load, 1 if quick else ROUNDS[load.key]))
        if load.key in IN_PARTS:
            split.append(parts(bench, contexts, load))
        if load.key == "short":
            memory = memory_over_time(load)
    sizes = {"rows": 2, "n_tokens": 600, "repeats": 1} if quick else {"rows": 7, "n_tokens": 8192, "repeats": 5}
    joins = {str(batching): joining(bench, batching, **sizes) for batching in (Batching.ROWS, Batching.BATCHED)}
    return {"verdict": verdict(found, joins[str(Batching.ROWS)]), "loads": found, "joins": joins, "parts": split,
            "memory": memory}  # fmt: skip


def short_form(bench: Bench, folder: Path) -> Iterator[Json]:
    """The loads that tell most, in small."""
    contexts = Contexts(bench)
    warm_up(bench, contexts)
    for load in loads(bench, SHORT):
        if load.key in {"mixed_restored", "short"}:
            found = measured(bench, contexts, load, 3)
            yield {
                "what": f"rows / mlx-lm's rectangle, in speed: {load.name}", "ratio": found["ratio"],
                "asked": f"at least {load.target}", "first": found["rows"]["s"], "second": found["mlx-lm"]["s"],
                "unit": "s", "equal": found["same_rows"] == found["n_rows"],
            }  # fmt: skip


def warm_up(bench: Bench, contexts: Contexts) -> None:
    job = Job((), tuple(bench.encode("One and two")), 2)
    for contestant in CONTESTANTS:
        run_once(bench, contexts, Load("warm", "warm", 2, 0, [job, job]), contestant)


def verdict(found: list[Json], join: Json) -> Json:
    by_key = {load["key"]: load for load in found}
    ratio = {key: load["ratio"]["median"] for key, load in by_key.items()}
    same_length = [value for key, value in ratio.items() if key == "steady" or key.startswith("batch_")]
    mixed = [by_key["mixed"], by_key["mixed_restored"]]
    return {
        "unequal_rows_2_5_times_as_fast": min(ratio["mixed"], ratio["mixed_restored"]) >= MIXED,
        "restored_rows_come_and_go_1_4_times_as_fast": ratio["restored"] >= RESTORED,
        "short_rows_come_and_go_1_1_times_as_fast": ratio["short"] >= COMING,
        "rows_of_similar_length_as_fast": statistics.median(same_length) >= EQUAL,
        "none_of_them_under_0_97": min(same_length) >= LEAST,
        "longest_step_at_most_1_5_quiet_ones": join["longest"]["median"] <= MOST_LONGEST,
        "a_join_takes_at_most_1_3_quiet_steps": join["join"]["median"] <= MOST_JOIN,
        "peak_memory_at_most_1_15_times_the_rows": max(load["rows"]["peak_to_rows"] for load in mixed) <= MOST_MEMORY,
        "all_tokens_equal": all(load["same_rows"] == load["n_rows"] for load in found),
    }


# --- the report, from the results alone ---


COLORS = {"mlx-lm": "grey", "rows": "C0"}


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    loads, joins = content["loads"], content["joins"]
    number = (
        f"with restored caches {loads[1]['ratio']['median']} times mlx-lm's speed; the longest step "
        f"{joins['in rows']['longest']['median']} quiet ones"
    )
    return Report("rows against one rectangle", number, {
        "summary": _summary(loads, joins["in rows"]), "ratios": columns(loads, RATIOS),
        "memory": columns(loads, MEMORY), "joins": _joins(joins),
        "parts": "\n\n".join(_parts(split) for split in content["parts"]),
    })  # fmt: skip


def _summary(loads: list[Json], join: Json) -> str:
    met = [load for load in loads if load["ratio"]["median"] >= load["target"]]
    least = min(loads, key=lambda load: load["ratio"]["median"] / load["target"])
    same = all(load["same_rows"] == load["n_rows"] for load in loads)
    return "\n".join((
        f"Rows reach the speed asked for in {len(met)} of {len(loads)} loads. The furthest from it is "
        f"{least['name']}: {short(least['ratio'])} times mlx-lm's speed (asked: {least['target']}).",
        say(join, "While {tokens} restored tokens ({mb} MB) join {beside_rows} decoding rows, the longest step takes "
            "{longest:.3g} quiet ones (asked: at most 1.5), the step in which they join {join:.3g} (asked: at most "
            "1.3)."),
        f"{'Every' if same else 'NOT every'} row has the same tokens in all runs.",
    ))  # fmt: skip


RATIOS = {
    "load": "{name}", "mlx-lm, s": "{mlx-lm[s][median]:.3g}", "rows, s": "{rows[s][median]:.3g}",
    "rows / mlx-lm, in speed": "{ratio:.3g}", "rounds": "{ratio[n]}", "asked": "{target}",
    "steps: mlx-lm, rows": "{mlx-lm[steps]}, {rows[steps]}", "same rows": "{same_rows} of {n_rows}",
}  # fmt: skip
MEMORY = {
    "load": "{name}", "all rows, MB": "{mb_of_rows}", "peak, MB: mlx-lm": "{mlx-lm[peak_mb][median]:.0f}",
    "peak, MB: rows": "{rows[peak_mb][median]:.0f}", "of all rows: mlx-lm": "{mlx-lm[peak_to_rows]}",
    "of all rows: rows": "{rows[peak_to_rows]}",
}  # fmt: skip


def _joins(joins: Json) -> str:
    names = {
        "quiet_ms": "quiet step, ms",
        "longest": "longest step until its first token, in quiet ones",
        "join": "the step in which it joins",
        "beside": "a step once it decodes",
    }
    lines = [(title, *(short(join[name]) for join in joins.values())) for name, title in names.items()]
    own = [f"{join['longest']['median'] / join['beside']['median']:.3g}" for join in joins.values()]
    return table(("", *joins), [*lines, ("the longest, in steps once it decodes (of the medians)", *own)])


def _parts(split: Json) -> str:
    lines = []
    for name in COLORS:
        one = split[name]
        each = [f"{1000 * seconds / one['steps']:.1f}" for seconds in (*one["parts"].values(), one["s"])]
        lines.append((name, *each, one["steps"]))
    return table((f"{split['load']}: ms per step", *split["rows"]["parts"], "all", "steps"), lines)


def plot(content: Json, results: Path) -> None:
    with figure(content, results, "rows", (12, 8.5), panels=(2, 2)) as ((ratios, joins), (parts, memory)):
        _plot_ratios(ratios, content["loads"])
        _plot_joins(joins, content["joins"])
        _plot_parts(parts, content["parts"])
        for name, color in COLORS.items():
            memory.plot(content["memory"][name]["s"], content["memory"][name]["mb"], color=color, label=name)
        memory.set_xlabel(f"seconds; {content['memory']['load']}", fontsize=7)
        memory.set(ylabel="MB in use after a step", ylim=(0, None))
        for axes in (ratios, joins, parts, memory):
            axes.legend(fontsize=8)


def _plot_ratios(axes: Any, loads: list[Json]) -> None:
    places = range(len(loads))
    middle = [load["ratio"]["median"] for load in loads]
    ends = [[abs(load["ratio"][end] - load["ratio"]["median"]) for load in loads] for end in ("min", "max")]
    axes.barh(places, middle, xerr=ends, color=COLORS["rows"], ecolor="black", capsize=3)
    axes.plot([load["target"] for load in loads], places, "|", color="C3", ms=16, mew=2, label="asked for")
    axes.set_yticks(places, [load["key"].replace("_", " ") for load in loads])
    axes.invert_yaxis()
    axes.set(xlabel="times mlx-lm's speed, least to most")


def _plot_joins(axes: Any, joins: Json) -> None:
    for (name, join), color in zip(joins.items(), (COLORS["rows"], COLORS["mlx-lm"]), strict=True):
        for number, steps in enumerate(join["steps"]):
            axes.plot(range(1, len(steps) + 1), steps, "o-", color=color, alpha=0.6, label=None if number else name)
    axes.axhline(1.5, color="C3", ls="--", label="longest asked for")
    axes.set(yscale="log", xlabel="step since the long row was submitted", ylabel="time of a step, 1 = quiet")


def _plot_parts(axes: Any, splits: list[Json]) -> None:
    rows = [(f"{split['load'][:24]}...\n{name}", split[name]["parts"]) for split in splits for name in COLORS]
    before = [0.0] * len(rows)
    for part in rows[0][1]:
        values = [seconds[part] for _, seconds in rows]
        axes.barh(range(len(rows)), values, left=before, label=part)
        before = [a + b for a, b in zip(before, values, strict=True)]
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="seconds of a run, every part waited for")


if __name__ == "__main__":
    main(__doc__ or "", "017", run, render)
