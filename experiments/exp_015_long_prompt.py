"""EXP-015: how a 1,200-token prompt affects seven decoding sequences, and how soon it can be cancelled.

The product's engine at its own settings. Seven sequences decode; then a long prompt is submitted, and their speed while
it is prefilled is compared with their speed before. A second long prompt is cancelled in the middle of its prefill.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import Bench, main
from common import Json, note, spread
from prompts import text_of
from report import Report, listed, say
from works import let_decode, work

MAX_STEP_S = 0.5
LEAST_SPEED = 0.5
MOST_CANCEL_S = 2.0


def one_run(bench: Bench, *, rows: int, n_tokens: int, quiet_s: float) -> Json:
    engine = bench.endless().worker_engine(16, max_step_s=MAX_STEP_S)
    decoding = [engine.submit(work(bench.encode(f"Tell me about the number {n}."), 3000)) for n in range(rows)]
    let_decode(engine, 8)
    quiet = _watch(engine, decoding, lambda seconds: seconds < quiet_s)
    long_ids = bench.encode(text_of(bench.encode, "English", n_tokens))
    uid = engine.submit(work(long_ids, 8))
    during = _watch(engine, decoding, lambda _: _tokens(engine).get(uid, 1) == 0)
    while uid in engine.progress():
        engine.step()
    beside = _watch(engine, decoding, lambda seconds: seconds < quiet_s / 2)
    other = engine.submit(work([*long_ids[1:], 7], 8))
    for _ in range(3):
        engine.step()
    begin = time.perf_counter()
    engine.step()  # a cancel that comes while a step runs waits for its end
    engine.cancel(other)
    cancel_s = time.perf_counter() - begin
    engine.close()
    return {
        "speed": during["tokens_per_s"] / quiet["tokens_per_s"],
        "quiet_tokens_per_s": quiet["tokens_per_s"],
        "prefill_s": during["s"],
        "longest_step_s": during["longest_step_s"],
        "speed_afterwards": beside["tokens_per_s"] / quiet["tokens_per_s"],
        "cancel_s": cancel_s,
        "long_prompt": len(long_ids),
    }


def _watch(engine: Any, uids: list[int], go_on: Callable[[float], bool]) -> Json:
    """Step while `go_on(seconds so far)`, and count the tokens the sequences generate."""
    before, begin, longest = _tokens(engine), time.perf_counter(), 0.0
    while go_on(time.perf_counter() - begin):
        started = time.perf_counter()
        engine.step()
        longest = max(longest, time.perf_counter() - started)
    seconds, after = time.perf_counter() - begin, _tokens(engine)
    said = sum(after[uid] - before[uid] for uid in uids)
    return {"tokens_per_s": said / seconds, "s": seconds, "longest_step_s": longest}


def _tokens(engine: Any) -> dict[int, int]:
    return {uid: row.tokens for uid, row in engine.progress().items()}


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    runs = []
    sizes = {"rows": 2, "n_tokens": 300, "quiet_s": 1.0} if quick else {"rows": 7, "n_tokens": 1200, "quiet_s": 10.0}
    for n in range(1 if quick else 3):
        note(f"run {n + 1}")
        runs.append(one_run(bench, **sizes))
    found = {name: spread([one[name] for one in runs]) for name in runs[0]}
    verdict = {
        "rows_keep_half_their_speed": found["speed"]["median"] >= LEAST_SPEED,
        "a_cancel_takes_effect_within_2_s": found["cancel_s"]["max"] <= MOST_CANCEL_S,
    }
    return {"verdict": verdict, "max_step_s": MAX_STEP_S, "found": found}


SUMMARY = (
    "While a prompt of {long_prompt[median]:.0f} tokens was prefilled, the sequences beside it decoded at "
    "{speed[median]} of their speed (median of {speed[n]} runs, {speed[min]} to {speed[max]}; target: at least 0.5). A "
    "cancel in the middle of a prefill took effect within {cancel_s[max]} s (target: at most 2)."
)
FOUND = {
    "tokens/s of the decoding sequences, before": "{quiet_tokens_per_s}",
    "their speed while the prompt is prefilled, as a share": "{speed}",
    "their speed once the long prompt decodes, as a share": "{speed_afterwards}",
    "seconds until the long prompt's first token": "{prefill_s}",
    "longest step in that time, s": "{longest_step_s}",
    "seconds until a cancel in mid-prefill took effect": "{cancel_s}",
    "tokens of the long prompt": "{long_prompt}",
}


def render(content: Json, results: Path) -> Report:
    found = content["found"]
    number = say(found, "{speed[median]} of their speed while {long_prompt[median]:.0f} tokens are prefilled")
    parts = {"summary": say(found, SUMMARY), "found": listed(found, ("", "median (least to most)"), FOUND)}
    return Report("a long prompt beside decoding sequences", number, parts)


if __name__ == "__main__":
    main(__doc__ or "", "015", run, render)
