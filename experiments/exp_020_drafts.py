"""EXP-020, drafts: what do drafts looked up in a row's own context gain where answers quote it, and cost elsewhere?

The same answers are decoded with and without drafts (`--draft-ngram`), through the product's engine, by turns of twelve
steps; the order changes every round. Run: ``python experiments/exp_020_drafts.py``.
"""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench import Bench, main
from common import Json, note, ratios, spread
from report import Report, columns
from works import chat_work

from stoker_worker.ports import CompletedGeneration, GenerationWork

_CODE: Final = """def shortest_path(graph, start, goal):
    queue, seen = [(0.0, start)], set()
    while queue:
        cost, node = heapq.heappop(queue)
        if node == goal:
            return cost
        if node in seen:
            continue
        seen.add(node)
        for other, weight in graph[node].items():
            heapq.heappush(queue, (cost + weight, other))
    return float("inf")
"""
_JSON: Final = (
    '{"id": 7, "name": "harbour", "depth_m": [12.5, 7.0, 3.25], "open": true, "tags": ["north", "ferry"], '
    '"owner": {"name": "Anna Berg", "email": "anna@example.org", "phone": "555-0134"}, '
    '"berths": [{"number": 1, "length_m": 40}, {"number": 2, "length_m": 25}]}'
)
_STORY: Final = (
    "In a village between two rivers there lived an old clockmaker who mended everything that people brought to him: "
    "clocks and kettles, lamps, umbrellas, and once a church bell. He never asked for money before the work was done, "
    "and he never kept anything longer than a week. When the bridge was washed away in spring, the people on the other "
    "side sent their clocks over by boat."
)
_MAIL: Final = (
    "Hello team,\nthe meeting about the new warehouse in Bremen is on Thursday, 14 March, at 10:30 in room 4.12. "
    "Please bring the figures of February. Julia Winter will join by phone (+49 421 555 0199). The order number is "
    "WH-2291-B.\nRegards, Tom"
)

QUOTING: Final = (
    f"Repeat the following code exactly, without any change:\n```python\n{_CODE}```",
    f'Print this JSON again, with "open" changed to false and nothing else changed:\n{_JSON}',
    "Correct the spelling of this text and print all of it:\n"
    + _STORY.replace("everything", "everthing").replace("bridge", "brigde"),
    f"Rewrite this e-mail with the date changed to 21 March, everything else as it is:\n{_MAIL}",
)

OTHER: Final = (
    "Write a short story about a dog who finds a lighthouse.",
    "Explain how a bicycle stays upright.",
    "Write a Python function that returns the n-th Fibonacci number and explain it.",
    "Write a polite e-mail to my landlord about a broken heater.",
)


KINDS = {"quoting": QUOTING, "other": OTHER}
PROMPTS = {1: 2, 4: 4}
"""How many, by how many of them decode at a time."""
LEAST_QUOTING, LEAST_OTHER = 1.2, 0.97
TURN_STEPS = 12


class Answers:
    """All answers of a load, `width` of them at a time, a few steps at each call.

    Attributes:
        decode_s: seconds of the steps without prefill.
        tokens: those generated in these steps.
    """

    def __init__(self, bench: Bench, load: list[GenerationWork], width: int, *, draft_ngram: bool) -> None:
        self.decode_s, self.steps, self.tokens, self.drafted, self.accepted = 0.0, 0, 0, 0, 0
        self.ids: list[tuple[int, ...]] = []
        self._bench, self._width, self._draft_ngram = bench, width, draft_ngram
        self._groups = [load[first : first + width] for first in range(0, len(load), width)]
        self._engine: Any = None
        self._uids: list[int] = []
        self._done: dict[int, CompletedGeneration] = {}

    def go_on(self, n_steps: int) -> bool:
        """Decode for `n_steps` steps; whether answers are left."""
        import mlx.core as mx

        n_last = self.steps + n_steps
        while (self._engine or self._begin()) and self.steps < n_last:
            in_prefill = any(progress.stage != "decode" for progress in self._engine.progress().values())
            before = self._generated()
            begin = time.perf_counter()
            self._done |= {completion.uid: completion for completion in self._engine.step()}
            if self.steps == n_last - 1:
                mx.synchronize()  # the pass that was begun ahead must not run in the other side's time
            if not in_prefill:
                self.decode_s += time.perf_counter() - begin
                self.steps += 1
                self.tokens += self._generated() - before
            if not self._engine.in_flight:
                self._end()
        return self._engine is not None or bool(self._groups)

    def _begin(self) -> bool:
        if not self._groups:
            return False
        self._engine = self._bench.worker_engine(self._width, max_step_s=60.0, draft_ngram=self._draft_ngram)
        self._uids = [self._engine.submit(work) for work in self._groups.pop(0)]
        return True

    def _end(self) -> None:
        self.ids += [self._done[uid].generated_ids for uid in self._uids]
        drafts = self._engine._generator._decode.drafts
        if drafts is not None:
            self.drafted += drafts.n_drafted
            self.accepted += drafts.n_accepted
        self._engine.close()
        self._engine, self._done = None, {}

    def _generated(self) -> int:
        running = sum(progress.tokens for progress in self._engine.progress().values())
        return running + sum(len(completion.generated_ids) for completion in self._done.values())


def measured(bench: Bench, kind: str, width: int, *, rounds: int, max_tokens: int) -> Json:
    load = [chat_work(bench.model, text, max_tokens=max_tokens) for text in KINDS[kind][: PROMPTS[width]]]
    runs: dict[bool, list[Answers]] = {False: [], True: []}
    for number in range(rounds):
        note(f"{kind}, {width} rows, round {number + 1} of {rounds}")
        sides = {side: Answers(bench, load, width, draft_ngram=side) for side in (False, True)[:: (-1) ** number]}
        while any([side.go_on(TURN_STEPS) for side in sides.values()]):
            pass
        for drafts, done in sides.items():
            runs[drafts].append(done)
    without, drafted = runs[False], runs[True]
    return {
        "kind": kind,
        "width": width,
        "ratio": ratios([run.decode_s for run in without], [run.decode_s for run in drafted]),
        "tokens": without[0].tokens,
        "answers": len(load),
        "same_answers": sum(a == b for a, b in zip(without[0].ids, drafted[0].ids, strict=True)),
        "steps": [without[0].steps, drafted[0].steps],
        "tokens_per_s": [spread([run.tokens / run.decode_s for run in of]) for of in (without, drafted)],
        "drafted": drafted[0].drafted,
        "accepted": drafted[0].accepted,
    }


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    sizes = {"rounds": 1, "max_tokens": 24} if quick else {"rounds": 3, "max_tokens": 48}
    widths = (1,) if quick else PROMPTS
    found = [measured(bench, kind, width, **sizes) for width in widths for kind in KINDS]
    of_kind = {kind: [load["ratio"]["median"] for load in found if load["kind"] == kind] for kind in KINDS}
    verdict = {
        "quoting_answers_1_2_times_as_fast": statistics.median(of_kind["quoting"]) >= LEAST_QUOTING,
        "others_lose_under_3_percent": min(of_kind["other"]) > LEAST_OTHER,
        "all_tokens_equal": all(load["same_answers"] == load["answers"] for load in found),
    }
    return {"verdict": verdict, "loads": found}


def short_form(bench: Bench, folder: Path) -> Iterator[Json]:
    """Two answers of each kind, one at a time."""
    for kind, least in (("quoting", LEAST_QUOTING), ("other", LEAST_OTHER)):
        found = measured(bench, kind, 1, rounds=3, max_tokens=48)
        without, drafted = found["tokens_per_s"]
        yield {"what": f"with drafts / without, in speed: {kind} answers", "ratio": found["ratio"],
               "asked": f"at least {least}", "first": drafted, "second": without, "unit": "tokens/s",
               "equal": found["same_answers"] == found["answers"]}  # fmt: skip


def render(content: Json, results: Path) -> Report:
    loads = content["loads"]
    number = (
        f"{loads[0]['ratio']['median']} times the speed where an answer quotes its context; "
        f"{loads[1]['ratio']['median']} elsewhere"
    )
    rows = [{**load, "who": load["kind"].replace("other", "others"), "at_a_time": _rows(load)} for load in loads]
    parts = {"summary": _summary(loads), "loads": columns(rows, LOADS)}
    return Report("drafts from a row's own context", number, parts)


def _summary(loads: list[Json]) -> str:
    lines = []
    for kind, what in (("quoting", "quote their context"), ("other", "do not")):
        of_kind = [load for load in loads if load["kind"] == kind]
        each = ", ".join(f"{load['ratio']['median']:.3g} ({_rows(load)})" for load in of_kind)
        accepted = sum(load["accepted"] for load in of_kind) / max(1, sum(load["drafted"] for load in of_kind))
        lines.append(
            f"Speed of decoding with drafts, as a multiple of that without, where answers {what}: {each}; "
            f"{100 * accepted:.0f} % of the drafted tokens were right."
        )
    same = all(load["same_answers"] == load["answers"] for load in loads)
    lines.append("All answers are the same with and without drafts." if same else "NOT all answers are the same.")
    return "\n".join(lines)


def _rows(load: Json) -> str:
    rows = "1 row" if load["width"] == 1 else f"{load['width']} rows"
    return f"{rows}, temperature {load['temperature']}" if load.get("temperature") else rows  # once measured


LOADS = {
    "answers": "{who}", "at a time": "{at_a_time}",
    "tokens/s: without, with": "{tokens_per_s[0][median]:.3g}, {tokens_per_s[1][median]:.3g}",
    "with / without": "{ratio:.3g}", "rounds": "{ratio[n]}", "tokens": "{tokens}",
    "steps: without, with": "{steps[0]}, {steps[1]}", "drafted": "{drafted}", "right": "{accepted}",
    "same answers": "{same_answers} of {answers}",
}  # fmt: skip


if __name__ == "__main__":
    main(__doc__ or "", "020", run, render)
