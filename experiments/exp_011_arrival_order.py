"""EXP-011, arrival order: what do padding and the order of arrival cost, in mlx-lm's rectangle and in rows?

The same sequences, long and short, come in three orders; then sequences that come and go one by one, beside as many
that come and go together. Both go through the product's two generators, which take turns, and whose passes are
counted. Run: ``python experiments/exp_011_arrival_order.py``.
"""

import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench import Bench, main
from common import Json, in_turn, note, ratios, spread
from prompts import SIX_KINDS, text_of
from report import Report, columns, say, span
from rows_bench import Contexts, Job, Load, Rectangle, Rows, Run, run_once, same_tokens

# The counts depend on the sequences and their order, not on the machine. Padding is what they exceed the sequences' own
# tokens by.


@dataclass
class Counts:
    """The counts of one run.

    Attributes:
        fed: tokens in prefill passes, padding included.
        attended: keys that the sequences of all decode passes attend to, padding included.
    """

    prefill_passes: int = 0
    decode_passes: int = 0
    fed: int = 0
    attended: int = 0
    _is_prefill = False

    def model(self, model: Any) -> Any:
        return _CountedModel(model, self)

    def note_pass(self, inputs: Any, cache: Any) -> None:
        """Count a pass whose keys and values are in the caches now."""
        if self._is_prefill:
            self.prefill_passes += 1
            self.fed += int(inputs.size)
        else:
            self.decode_passes += 1
            self.attended += _keys_of_all_rows(len(inputs), cache[0])

    @contextmanager
    def during(self) -> Iterator[None]:
        """Count what runs inside the block."""
        from mlx_lm.generate import PromptProcessingBatch

        from stoker_worker.engine.rows.rows_generator import PrefillRows

        with ExitStack() as stack:
            for owner, name in ((PromptProcessingBatch, "prompt"), (PrefillRows, "next")):
                stack.enter_context(patch.object(owner, name, self._prefilling(getattr(owner, name))))
            yield

    def _prefilling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            self._is_prefill = True
            try:
                return call(*args)
            finally:
                self._is_prefill = False

        return called


class _CountedModel:
    def __init__(self, model: Any, counts: Counts) -> None:
        self._model = model
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, inputs: Any, cache: Any) -> Any:
        logits = self._model(inputs, cache=cache)
        self._counts.note_pass(inputs, cache)
        return logits


def _keys_of_all_rows(n_rows: int, cache: Any) -> int:
    from stoker_worker.engine.rows.attention import StepCache

    if isinstance(cache, StepCache):
        return sum(len(group) * max(group.lengths) for group in cache._step.groups)
    return n_rows * int(cache._idx)


MODES = (Rectangle, Rows)
NAMES = tuple(mode.name for mode in MODES)
SORTED = "sorted"
SHORT_BETWEEN = 3
"""Short sequences after each long one, in the mixed order."""
MOST_LOST, MOST_PADDED, LEAST_CHURN = 0.1, 0.05, 0.95


@dataclass(frozen=True)
class Sizes:
    """
    Attributes:
        contexts: tokens that are restored for a sequence, and of how many sequences.
        n_short: sequences without any, of up to `short` prompt tokens.
        answer: fewest and most generated tokens, of all of them.
        churn_places: places of the sequences that come and go; each place has `turns` of them, one after the other,
            whose answers have `together` tokens in all.
    """

    places: int
    contexts: tuple[tuple[int, int], ...]
    n_short: int
    short: tuple[int, int]
    answer: tuple[int, int]
    churn_places: int
    turns: int
    together: int
    rounds: int


FULL = Sizes(4, ((1200, 1), (400, 3)), 8, (20, 80), (8, 24), 8, 2, 64, 3)
QUICK = Sizes(3, ((300, 1),), 4, (10, 30), (2, 4), 3, 2, 8, 1)


def orders(lengths: Sequence[int]) -> dict[str, list[int]]:
    """The places of the same jobs in each order."""
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    left, mixed = deque(by_length), []
    while left:
        mixed.append(left.pop())
        mixed += [left.popleft() for _ in range(min(SHORT_BETWEEN, len(left)))]
    as_they_come = random.Random(11).sample(range(len(lengths)), len(lengths))
    return {"as they come": as_they_come, SORTED: by_length, "mixed": mixed}


def jobs(bench: Bench, sizes: Sizes) -> list[Job]:
    dice = random.Random(12)
    made = []
    for n_tokens, n_jobs in sizes.contexts:
        context = _ids(bench, n_tokens, seed=n_tokens)
        made += [Job(context, _ids(bench, 32, seed), dice.randint(*sizes.answer)) for seed in range(n_jobs)]
    made += [
        Job((), _ids(bench, dice.randint(*sizes.short), seed), dice.randint(*sizes.answer))
        for seed in range(sizes.n_short)
    ]
    return made


def coming_and_going(bench: Bench, sizes: Sizes) -> tuple[list[Job], list[Job]]:
    """As many jobs with the same prompts: they come and go together, or one by one.

    Each place has `turns` of them, one after the other. Their answers have the same sum in each place, so the last ones
    end together too, and no place is empty at the end.
    """
    dice = random.Random(13)
    mean = sizes.together // sizes.turns
    starts = []
    for _ in range(sizes.churn_places):
        lengths = [0]
        while not mean // 4 <= min(lengths) <= max(lengths) <= 2 * mean:
            cuts = sorted(dice.sample(range(1, sizes.together), sizes.turns - 1))
            lengths = [b - a for a, b in zip((0, *cuts), (*cuts, sizes.together), strict=True)]
        starts += [(sum(lengths[:turn]), length) for turn, length in enumerate(lengths)]
    starts.sort(key=lambda start: start[0])  # places become free in this order
    prompts = [_ids(bench, dice.randint(12, 32), seed) for seed in range(len(starts))]
    churn = [Job((), prompt, length) for prompt, (_, length) in zip(prompts, starts, strict=True)]
    return [replace(job, max_tokens=mean) for job in churn], churn


def _ids(bench: Bench, n_tokens: int, seed: int) -> tuple[int, ...]:
    return tuple(bench.encode(text_of(bench.encode, SIX_KINDS[seed % len(SIX_KINDS)], n_tokens, seed=seed)))


@dataclass
class Measured:
    """A load's rounds in one mode; its tokens are those of the jobs as they were made, not in the load's order."""

    runs: list[Run] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)


Loads = dict[str, tuple[Load, Sequence[int]]]
"""By name, with the places of its jobs among those that were made."""
Found = dict[str, dict[str, Measured]]
"""By load, and by mode."""


def measured(bench: Bench, loads: Loads, rounds: int) -> Found:
    """Let all loads take turns in both modes."""
    contexts = Contexts(bench)
    found: Found = {name: {mode: Measured() for mode in NAMES} for name in loads}
    for number, (name, mode) in in_turn([(name, mode) for name in loads for mode in MODES], rounds):
        (load, order), counts = loads[name], Counts()
        with counts.during():
            run = run_once(replace(bench, network=counts.model(bench.network)), contexts, load, mode)
        note(f"{name}, round {number + 1} of {rounds}: {mode.name} {run.seconds:.1f} s")
        tokens = dict(zip(order, run.tokens, strict=True))
        found[name][mode.name].runs.append(replace(run, tokens=[tokens[n] for n in sorted(tokens)]))
        found[name][mode.name].counts.append(counts)
    return found


def shown(load: Load, measured: Measured) -> Json:
    """A load's figures in one mode."""
    runs, counts = measured.runs, measured.counts[0]
    generated = sum(job.max_tokens for job in load.jobs)
    fed = sum(len(job.prompt) - 1 for job in load.jobs)
    passes = sum(job.max_tokens + 1 for job in load.jobs)  # the prompt's last token, and every token of the answer
    attended = sum(job.n_tokens - n for job in load.jobs for n in range(job.max_tokens + 1))
    return {
        "s": spread([run.seconds for run in runs]),
        "tokens_per_s": spread([generated / run.seconds for run in runs], digits=1),
        "peak_mb": round(statistics.median(run.peak for run in runs) / 1e6),
        "prefill_passes": counts.prefill_passes,
        "decode_passes": counts.decode_passes,
        "places_occupied": round(passes / (counts.decode_passes * load.places), 3),
        "prefill_padded": round(1 - fed / counts.fed, 3),
        "attention_padded": round(1 - attended / counts.attended, 3),
    }


def described(loads: Loads, found: Found, base: str) -> list[Json]:
    """Each load in both modes, its speed to that of `base` in the same mode, and of rows to the rectangle."""

    def seconds(name: str, mode: str) -> list[float]:
        return [run.seconds for run in found[name][mode].runs]

    return [
        {
            "key": name,
            "name": load.name,
            **{mode: shown(load, found[name][mode]) for mode in NAMES},
            "to_base": {mode: ratios(seconds(base, mode), seconds(name, mode)) for mode in NAMES},
            "rows_to_rectangle": ratios(*(seconds(name, mode) for mode in NAMES)),
        }
        for name, (load, _) in loads.items()
    ]


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    sizes = QUICK if quick else FULL
    made = jobs(bench, sizes)
    by_order: Loads = {
        name: (Load(name, name, sizes.places, 0.0, [made[n] for n in order]), order)
        for name, order in orders([job.n_tokens for job in made]).items()
    }
    steady, churn = coming_and_going(bench, sizes)
    lengths, places = [job.max_tokens for job in churn], range(len(churn))
    by_coming: Loads = {
        name: (Load(name, title, sizes.churn_places, 0.0, those), places)
        for name, title, those in (("steady", f"{steady[0].max_tokens} tokens each", steady),
                                   ("churn", f"{min(lengths)} to {max(lengths)} tokens", churn))
    }  # fmt: skip
    measured(bench, {"warm": (replace(by_coming["steady"][0], jobs=steady[:2]), range(2))}, 1)
    in_orders, in_coming = measured(bench, by_order, sizes.rounds), measured(bench, by_coming, sizes.rounds)
    arrival, turnover = described(by_order, in_orders, SORTED), described(by_coming, in_coming, "steady")
    same = same_tokens(run for modes in in_orders.values() for one in modes.values() for run in one.runs) + sum(
        same_tokens(run for one in modes.values() for run in one.runs) for modes in in_coming.values()
    )
    every = [one for found in (in_orders, in_coming) for modes in found.values() for one in modes.values()]
    verdict = {
        "no_order_costs_rows_more_than_10_percent": all(
            load["to_base"]["rows"]["median"] >= 1 - MOST_LOST for load in arrival
        ),
        "rows_attend_to_at_most_5_percent_of_padding": all(
            load["rows"]["attention_padded"] <= MOST_PADDED for load in arrival
        ),
        "rows_are_never_slower_than_the_rectangle": all(
            load["rows_to_rectangle"]["median"] >= 1 for load in (*arrival, *turnover)
        ),
        "churn_at_0_95_of_a_steady_batch": turnover[-1]["to_base"]["rows"]["median"] >= LEAST_CHURN,
        "the_counts_are_the_same_in_every_round": all(count == one.counts[0] for one in every for count in one.counts),
        "all_tokens_equal": same == len(made) + 2 * len(churn),
    }
    told = {"jobs": len(made), "churn_jobs": len(churn)}
    told |= {name: getattr(sizes, name) for name in ("places", "contexts", "short", "n_short", "churn_places")}
    return {"verdict": verdict, "sizes": told, "arrival": arrival, "turnover": turnover}


SPEEDS = {
    "order": "{order}", "mode": "{mode}", "s": "{s}", "tokens/s": "{tokens_per_s}",
    "peak, MB": "{peak_mb}", "rows / rectangle, in speed": "{to_rectangle}",
}  # fmt: skip
COUNTS = {
    "order": "{order}", "mode": "{mode}", "decode passes": "{decode_passes}",
    "their places occupied": "{places_occupied:.1%}", "prefill passes": "{prefill_passes}",
    "padding in prefill": "{prefill_padded:.1%}", "padding in attention": "{attention_padded:.1%}",
}  # fmt: skip
SIZES = (
    "Orders: {jobs} sequences in {places} places: {restored}, {n_short} with {short[0]} to {short[1]} new tokens. "
    "Turnover: {churn_jobs} sequences in {churn_places} places."
)


def render(content: Json, results: Path) -> Report:
    number = say(
        content["turnover"][-1], "rows that come and go have {to_base[rows][median]} of a steady batch's speed"
    )
    restored = ", ".join(
        f"{n} with {tokens} restored tokens and 32 new ones" for tokens, n in content["sizes"]["contexts"]
    )
    parts = {"summary": _summary(content), "sizes": say({**content["sizes"], "restored": restored}, SIZES)}
    for kind, base in (("arrival", "sorted"), ("turnover", "steady")):
        rows = [
            {**load[mode], "order": load["key"] if load["key"] == load["name"] else f"{load['key']}: {load['name']}",
             "mode": mode, "to_base": load["to_base"][mode],
             "to_rectangle": load["rows_to_rectangle"] if mode == "rows" else None}
            for load in content[kind] for mode in NAMES
        ]  # fmt: skip
        parts |= {kind: columns(rows, {**SPEEDS, f"speed, 1 = {base}": "{to_base}"}),
                  f"{kind} counts": columns(rows, COUNTS)}  # fmt: skip
    return Report("what padding and the order of arrival cost", number, parts)


def _summary(content: Json) -> str:
    arrival, churn = content["arrival"], content["turnover"][-1]
    worst = {mode: min(arrival, key=lambda load: load["to_base"][mode]["median"]) for mode in NAMES}
    most = max(arrival, key=lambda load: load["rectangle"]["attention_padded"])
    same = content["verdict"]["all_tokens_equal"]
    return "\n".join((
        f"In mlx-lm's rectangle the worst order ({worst['rectangle']['key']}) has "
        f"{span(worst['rectangle']['to_base']['rectangle'])} of the speed of the sorted one, in rows "
        f"({worst['rows']['key']}) {span(worst['rows']['to_base']['rows'])}.",
        say(most, "Up to {rectangle[attention_padded]:.0%} of what the rectangle's decode passes attend to is padding "
            "({key}); in rows {rows[attention_padded]:.1%}."),
        say(churn, "Sequences that come and go one by one have {to_base[rows]} of the speed of as many that come and "
            "go together, in rows (asked: 0.95), and {to_base[rectangle]} in the rectangle."),
        f"{'Every' if same else 'NOT every'} sequence has the same tokens in all runs.",
    ))  # fmt: skip


if __name__ == "__main__":
    main(__doc__ or "", "011", run, render)
