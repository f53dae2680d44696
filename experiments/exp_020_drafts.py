"""EXP-020, drafts: what do drafts looked up in a row's own context gain where answers quote it, and cost elsewhere?

The same answers are decoded with and without drafts (`--draft-ngram`), through the product's engine, by turns of twelve
steps; the order changes every round. Run: ``python experiments/exp_020_drafts.py``.
"""

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import Bench, main
from common import Json, machine, note, spread
from draft_prompts import OTHER, QUOTING
from exp_020_report import render
from rows_bench import worker_chunk

from stoker_shared import build_request
from stoker_worker.ports import CompletedGeneration, GenerationWork

REPORT = "EXP-020-drafts.md"
KINDS = {"quoting": QUOTING, "other": OTHER}
WIDTHS = (1, 2, 4)
LEAST_QUOTING, LEAST_OTHER = 1.2, 0.97
CONTEXT_TOKENS = 240
TURN_STEPS = 12


# --- answers ---


def works(bench: Bench, texts: Sequence[str], *, max_tokens: int, temperature: float) -> list[GenerationWork]:
    found = []
    for seed, text in enumerate(texts):
        messages = [{"role": "user", "content": text}]
        fields = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        request = build_request({"agent_id": "x", "messages": messages, **fields})
        tokenizer = bench.model.tokenizer
        rendered = tokenizer.render(request.messages, add_generation_prompt=True, tools=None, template_kwargs=None)
        found.append(GenerationWork(request, tuple(tokenizer.encode_rendered(rendered)), None, None))
    return found


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
        from stoker_worker.engine.assembly import assemble

        if not self._groups:
            return False
        self._engine = assemble(self._bench.network, self._bench.model, max_bytes=4 << 30, max_batch=self._width,
                                prefill_tokens=worker_chunk(self._bench), max_step_s=60.0,
                                draft_ngram=self._draft_ngram)  # fmt: skip
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


def measured(
    bench: Bench, kind: str, width: int, temperature: float, *, rounds: int, prompts: int, max_tokens: int
) -> Json:
    load = works(bench, KINDS[kind][:prompts], max_tokens=max_tokens, temperature=temperature)
    runs: dict[bool, list[Answers]] = {False: [], True: []}
    for number in range(rounds):
        order = (False, True)[:: 1 if number % 2 == 0 else -1]
        sides = {draft_ngram: Answers(bench, load, width, draft_ngram=draft_ngram) for draft_ngram in order}
        while any([side.go_on(TURN_STEPS) for side in sides.values()]):
            pass
        for draft_ngram, done in sides.items():
            runs[draft_ngram].append(done)
            note(f"{kind}, {width} rows, temperature {temperature}, round {number + 1}: drafts {draft_ngram}, "
                 f"{done.tokens} tokens, {done.steps} steps, {done.decode_s:.1f} s")  # fmt: skip
    without, drafted = runs[False], runs[True]
    return {
        "kind": kind,
        "width": width,
        "temperature": temperature,
        "ratio": spread([a.decode_s / b.decode_s for a, b in zip(without, drafted, strict=True)]),
        "tokens": without[0].tokens,
        "answers": len(load),
        "same_answers": sum(a == b for a, b in zip(without[0].ids, drafted[0].ids, strict=True)),
        "steps": [without[0].steps, drafted[0].steps],
        "tokens_per_s": [spread([run.tokens / run.decode_s for run in of]) for of in (without, drafted)],
        "drafted": drafted[0].drafted,
        "accepted": drafted[0].accepted,
    }


# --- passes ---


def passes(bench: Bench, rows: int, sizes: Sequence[int], repeats: int) -> Json:
    """Milliseconds of passes over `rows` rows of one length: steps that are read a pass late, as without drafts; steps
    that are waited for; passes with several tokens of each row."""
    import mlx.core as mx

    from stoker_worker.engine.generator import SequenceStart
    from stoker_worker.engine.rows.rows_generator import RowsGenerator

    found: dict[str, list[float]] = {}
    generator = RowsGenerator(bench.network, bench.model.spec, draft_ngram=True)
    for n in range(rows):
        ids = [(7919 * (n + 1) + 31 * i) % 40_000 + 100 for i in range(CONTEXT_TOKENS)]
        generator.insert(SequenceStart([ids[:-1], ids[-1:]], None, [], 10_000, None, []))
    while generator._prefill.rows:
        generator.next(CONTEXT_TOKENS)
    decode = generator._decode

    def timed(name: str, call: Any) -> None:
        begin = time.perf_counter()
        call()
        found.setdefault(name, []).append(1000 * (time.perf_counter() - begin))

    def step(size: int) -> None:
        order = decode._groups.order()
        made = {row: [1 + i for i in range(size - 1)] for row in order} if size > 1 else {}
        decode.drafts.of_step = lambda *_: made  # type: ignore[method-assign]
        decode.step()

    def waited(size: int) -> None:
        step(size)
        mx.eval(decode._next_tokens, decode._logprobs)

    for _ in range(repeats):
        step(1)
        for _ in range(3):
            timed("a step ahead", lambda: step(1))
        mx.eval(decode._next_tokens, decode._logprobs)
        for _ in range(3):
            timed("waited for", lambda: waited(1))
    for _ in range(repeats):
        for size in sizes:
            timed(str(size), lambda size=size: waited(size))
    generator.close()
    return {"rows": rows, **{name: spread(samples, digits=1) for name, samples in found.items()}}


# --- all of it ---


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    facts = machine(bench.facts)
    sizes = {"rounds": 1, "prompts": 2, "max_tokens": 24} if quick else {"rounds": 3, "prompts": 4, "max_tokens": 96}
    loads = [("quoting", 1, 0.0), ("other", 1, 0.0)] if quick else [
        *((kind, width, 0.0) for width in WIDTHS for kind in KINDS), ("quoting", 4, 0.7)
    ]  # fmt: skip
    of_passes = [passes(bench, rows, (2, 3, 5, 1), 1 if quick else 5) for rows in ((1,) if quick else (1, 2, 4, 8))]
    found = [measured(bench, *load, **sizes) for load in loads]
    return {
        "machine": facts,
        "verdict": verdict(found),
        "loads": found,
        "passes": of_passes,
        "load_average_at_end": round(os.getloadavg()[0], 1),
    }


def verdict(found: list[Json]) -> Json:
    ratios = {kind: [load["ratio"]["median"] for load in found if load["kind"] == kind] for kind in KINDS}
    criteria = {
        "quoting_answers_1_2_times_as_fast": statistics.median(ratios["quoting"]) >= LEAST_QUOTING,
        "others_lose_under_3_percent": min(ratios["other"]) > LEAST_OTHER,
        "all_tokens_equal": all(load["same_answers"] == load["answers"] for load in found),
    }
    return {"passed": all(criteria.values()), **criteria}


if __name__ == "__main__":
    main(__doc__ or "", "020", REPORT, run, render)
