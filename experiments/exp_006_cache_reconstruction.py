"""EXP-006, cache reconstruction: how long do saved blocks take to become caches again, and what is the minimum?

Synthetic caches of 1 to 32 blocks and 12 to 48 layers, and Gemma 3 12B's, go through the product's own store into the
engine's memory, beside copies of the same bytes. Then SmolLM2 answers from restored caches and without, alone and as
five agents. Run: ``python experiments/exp_006_*.py``.
"""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from bench import Bench, main
from common import Json, note, rss_mib, spread
from report import Report, columns, say, short, table, yes
from restores import five_turns, from_memory, measured, round_trips
from small_cache import SPEC as GEMMA_3_12B
from synthetic_cache import saved_agent, smollm2_layers
from timed_turns import Turns

from stoker_worker.ports.cache_spec import BLOCK_TOKENS

CELLS = {12: (1, 32), 24: (4,), 30: (4, 8, 16, 32), 48: (1, 32)}
"""By layers: numbers of blocks."""
TARGETS_MS = {(1, 12): 0.1, (4, 24): 0.5, (8, 30): 1.0, (16, 30): 2.0, (32, 48): 5.0}
"""The seed's table: p95 by blocks and layers."""
PROJECT_RATIO = 1.5
"""The project's own target: restoring 32 blocks of 30 layers takes at most so many copies of the bytes."""
LINEAR_R2 = 0.95


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    leak = leaks(folder / "leak", rounds=20 if quick else 200)  # first: the process holds little that could hide a leak
    cells = [cell for layers in ((12,) if quick else CELLS) for cell in measured_cells(folder, layers, quick)]
    by = {(cell["blocks"], cell["layers"]): cell for cell in cells}
    n_tokens, rounds, max_tokens = (48, 1, 3) if quick else (768, 3, 16)
    found: Json = {
        "cells": cells,
        "from_memory": [
            from_memory(folder / "memory", blocks=blocks, layers=layers, rounds=4 if quick else 30)
            for blocks, layers in ([(1, 12)] if quick else TARGETS_MS)
        ],
        "fit": straight_line([cell["bytes"] for cell in cells], [cell["reconstruct_ms"]["p50"] for cell in cells]),
        "leak": leak,
        "gemma": [gemma(folder, quick=quick)],
        "turns": five_turns(bench.with_room().endless(), folder / "turns", n_tokens=n_tokens, rounds=rounds,
                            max_tokens=max_tokens),
    }  # fmt: skip
    with closing(Turns(bench, folder / "answers")) as of_one:
        found["round_trip"] = round_trips(of_one, blocks=1 if quick else 8, rounds=2 if quick else 10)
    restored = [*cells, *found["from_memory"], *found["gemma"], found["round_trip"]]
    answers = [found["turns"], found["round_trip"]]
    verdict = {
        "every_restored_byte_is_the_saved_one": all(row["exact"] for row in restored),
        "every_answer_is_the_one_without_cache": all(row["same_tokens"] for row in answers),
        "p95_under_5_ms_at_32_blocks_48_layers": (32, 48) in by and by[32, 48]["reconstruct_ms"]["p95"] < 5.0,
        "p95_under_5_ms_at_32_blocks_48_layers_from_memory": any(
            one["handed_over_ms"]["p95"] < 5.0
            for one in found["from_memory"]
            if (one["blocks"], one["layers"]) == (32, 48)
        ),
        "latency_is_linear_in_bytes": found["fit"]["r2"] >= LINEAR_R2,
        "no_leak": leak["growth_mb"] < leak["cell_mb"],
        "at_most_1_5_copies_at_32_blocks_30_layers": (32, 30) in by and by[32, 30]["copies"]["median"] <= PROJECT_RATIO,
    }
    return {"verdict": verdict, **found}


def short_form(bench: Bench, folder: Path) -> Iterator[Json]:
    """Five agents' turns, and two cells of SmolLM2's layers."""
    n_tokens = 1024 if bench.on_gpu else 256
    found = five_turns(bench.with_room().endless(), folder / "turns", n_tokens=n_tokens, rounds=3)
    without, restored = (found[name]["first_s"] for name in ("without", "restored"))
    yield {"what": say(found, "the last first token of {agents} agents' second turns, {tokens} tokens each: without "
                       "their memory / with it, in time"),
           "ratio": spread([without["median"] / s for s in restored["samples"]]), "first": without, "second": restored,
           "unit": "s", "equal": found["same_tokens"], "headline": "second turn"}  # fmt: skip
    for n_blocks, rounds in ((8, 40), (32, 15)):
        n_tokens, cell = n_blocks * BLOCK_TOKENS, f"{n_blocks} blocks of 30 layers"
        with saved_agent(folder / f"{n_blocks}", smollm2_layers(30), n_tokens) as saved:
            found = measured(saved, n_tokens, rounds, warm_up=2)
        yield {"what": f"a restore / the fastest copy of its bytes, in time: {cell}", "ratio": found["of_floor"],
               "equal": found["exact"]}  # fmt: skip
        yield {"what": f"a restore / a copy into fresh memory, in time: {cell}", "ratio": found["copies"],
               "asked": "at most 1.5" if n_blocks == 32 else "", "equal": found["exact"]}  # fmt: skip


def measured_cells(folder: Path, n_layers: int, quick: bool) -> Iterator[Json]:
    blocks = (1, 2) if quick else CELLS[n_layers]
    with saved_agent(folder / f"{n_layers}", smollm2_layers(n_layers), max(blocks) * BLOCK_TOKENS) as saved:
        for n_blocks in blocks:
            note(f"{n_blocks} blocks, {n_layers} layers")
            yield measured(saved, n_blocks * BLOCK_TOKENS, 3 if quick else 40, warm_up=5, fresh_every=5)


def gemma(folder: Path, *, quick: bool) -> Json:
    """Gemma 3 12B's caches in 16 bit."""
    n_tokens = (1 if quick else 32) * BLOCK_TOKENS
    with saved_agent(folder / "gemma", GEMMA_3_12B, n_tokens) as saved:
        found = measured(saved, n_tokens, 2 if quick else 10, warm_up=2, fresh_every=0)
    return {"name": "as its caches are", **found}


def leaks(folder: Path, rounds: int) -> Json:
    """Memory of the process while one cell is reconstructed again and again."""
    n_tokens, n_layers = 4 * BLOCK_TOKENS, 24
    with saved_agent(folder, smollm2_layers(n_layers), n_tokens) as saved:
        note(f"{rounds} reconstructions in a row")
        resident = []
        for done in range(-10, rounds + 1):
            if done >= 0 and done % (rounds // 4) == 0:
                gc.collect()
                resident.append(round(rss_mib(os.getpid()) * 2**20 / 1e6, 1))
            saved.restored(n_tokens)
        return {"rounds": rounds, "blocks": 4, "layers": n_layers, "resident_mb": resident,
                "cell_mb": round(n_tokens * saved.model.spec.bytes_per_token / 1e6, 1),
                "growth_mb": round(resident[-1] - resident[0], 1)}  # fmt: skip


def straight_line(n_bytes: Sequence[int], latencies_ms: Sequence[float]) -> Json:
    """Least squares over all cells, and the exponent that a power law would have (1 is linear)."""
    mb = np.array(n_bytes) / 1e6
    took = np.array(latencies_ms)
    slope, at_zero = np.polyfit(mb, took, 1).tolist()
    off = float(np.sum((took - slope * mb - at_zero) ** 2) / np.sum((took - took.mean()) ** 2))
    exponent = float(np.polyfit(np.log(mb), np.log(took), 1)[0])
    return {"ms_per_mb": round(slope, 4), "at_zero_ms": round(at_zero, 3), "r2": round(1 - off, 4),
            "exponent": round(exponent, 3)}  # fmt: skip


OF_CELLS = {
    "blocks": "{blocks}", "layers": "{layers}", "MB": "{mb}", "mean, ms": "{reconstruct_ms[mean]:.3g}",
    "p50": "{reconstruct_ms[p50]:.3g}", "p95": "{reconstruct_ms[p95]:.3g}", "p99": "{reconstruct_ms[p99]:.3g}",
    "n": "{reconstruct_ms[n]}", "p50 of the store's part": "{store_ms[p50]:.3g}",
    "copy, in use": "{used_copy_ms[p50]:.3g}", "copy, all threads": "{threads_copy_ms[p50]:.3g}",
    "copy, fresh": "{fresh_copy_ms[p50]:.3g}", "restore / floor": "{of_floor:.3g}",
}  # fmt: skip
FROM_MEMORY = {
    "blocks": "{blocks}", "layers": "{layers}", "MB": "{mb}", "target p95, ms": "{target}",
    "handed over, p50": "{handed_over_ms[p50]:.3g}", "p95": "{handed_over_ms[p95]:.3g}",
    "copied, p50": "{copied_ms[p50]:.3g}", "copied, p95": "{copied_ms[p95]:.3g}", "n": "{copied_ms[n]}",
}  # fmt: skip
TARGETS = {
    "blocks x layers": "{case}", "MB": "{mb}", "target p95, ms": "{target}",
    "measured p95, ms": "{reconstruct_ms[p95]:.3g}", "met": "{met}", "copy, GB/s": "{gb_s:.1f}",
    "floor: MB / GB/s, ms": "{floor:.3g}", "p50 / floor": "{floors:.1f}", "floor within the target": "{within}",
    "a copy needs, GB/s": "{needs:.0f}",
}  # fmt: skip
STEPS = {
    "step": "{name}", "mean, ms": "{mean:.3g}", "p50": "{p50:.3g}", "p95": "{p95:.3g}", "p99": "{p99:.3g}", "n": "{n}",
}  # fmt: skip
SUMMARY = (
    "From memory, as the seed measures, {in_ram} of its {n_in_ram} targets are met: p95 {most_in_ram:.3g} ms at 32 "
    "blocks of 48 layers, handed over.\n"
    "From files, where each byte is read and verified, {met} of the seed's {n_targets} latency targets are met.\n"
    "{last[blocks]} blocks of {last[layers]} layers ({last[mb]} MB): p95 {last[reconstruct_ms][p95]:.3g} ms; one copy "
    "of the bytes {last[floor]:.3g} ms.\n"
    "Gemma 3 12B's 32 blocks: p95 {held[reconstruct_ms][p95]:.3g} ms for its caches ({held[mb]} MB).\n"
    "The project's own target, at most 1.5 copies into fresh memory at 32 blocks of 30 layers: {own[copies]:.3g}, "
    "median of {own[copies][n]} rounds; of the faster copy into memory in use {own[of_floor]:.3g}.\n"
    "The last first token of five agents with {turns[tokens]} tokens each came {turns[first_speedup]} times as fast "
    "with restored caches."
)
SCALING = (
    "Over all {n_cells} cells the median is {fit[at_zero_ms]} ms + {fit[ms_per_mb]} ms per MB (r2 {fit[r2]}); a power "
    "law through them has the exponent {fit[exponent]} (1 is linear).\n"
    "{leak[rounds]} reconstructions of {leak[blocks]} blocks of {leak[layers]} layers ({leak[cell_mb]} MB each): the "
    "process held {resident} MB at the start, the quarters and the end; growth {leak[growth_mb]} MB."
)
ROUND_TRIP = (
    "\n\n{blocks} blocks of {layers} layers, {answer_tokens} tokens generated. The same tokens as without cache each "
    "time: {same_tokens}. Restored bytes, extracted again, equal to those of the run without cache: {exact}."
)


def render(content: Json, results: Path) -> Report:
    cells, held = [_with_floor(cell) for cell in content["cells"]], _with_floor(content["gemma"][-1])
    by = {(cell["blocks"], cell["layers"]): cell for cell in cells}
    seeds = [_aimed(by[at], f"{at[0]} x {at[1]}", ms) for at, ms in TARGETS_MS.items() if at in by]
    in_ram = [{**one, "mb": f"{one['bytes'] / 1e6:.1f}", "target": TARGETS_MS[one["blocks"], one["layers"]]}
              for one in content["from_memory"]]  # fmt: skip
    p95 = [one["handed_over_ms"]["p95"] for one in in_ram]
    known = {
        **content, "last": cells[-1], "held": held, "own": by.get((32, 30)), "n_cells": len(cells),
        "n_in_ram": len(p95), "most_in_ram": max(p95),
        "in_ram": sum(one["handed_over_ms"]["p95"] < one["target"] for one in in_ram), "n_targets": len(seeds),
        "met": sum(one["met"] == "yes" for one in seeds),
        "resident": ", ".join(f"{mb:.0f}" for mb in content["leak"]["resident_mb"]),
    }  # fmt: skip
    number = say(cells[-1], "{blocks} blocks of {layers} layers: p95 {reconstruct_ms[p95]:.0f} ms for {mb_whole} MB; "
                 "one copy of them {floor:.0f} ms")  # fmt: skip
    of_gemma = _aimed(held, f"32 x 48, Gemma 3 12B, {held['name']}", 5.0)
    trip = content["round_trip"]
    return Report("cache reconstruction", number, {
        "summary": say(known, SUMMARY),
        "targets": columns([*seeds, of_gemma], TARGETS),
        "from memory": columns(in_ram, FROM_MEMORY),
        "cells": columns(cells, OF_CELLS),
        "scaling": say(known, SCALING),
        "round trip": columns([{**ms, "name": name} for name, ms in trip["ms"].items()], STEPS) + say(trip, ROUND_TRIP),
        "turns": _turns(content["turns"]),
    })  # fmt: skip


def _with_floor(cell: Json) -> Json:
    """With its megabytes, and the faster of the two copies into memory in use."""
    mb, floor = cell["bytes"] / 1e6, min(cell[key]["p50"] for key in ("used_copy_ms", "threads_copy_ms"))
    return {**cell, "mb": f"{mb:.1f}", "mb_whole": f"{mb:.0f}", "floor": floor}


def _aimed(cell: Json, case: str, target_ms: float) -> Json:
    took, floor, n_bytes = cell["reconstruct_ms"], cell["floor"], cell["bytes"]
    return {
        **cell, "case": case, "target": target_ms, "met": yes(took["p95"] < target_ms, "no"),
        "within": yes(floor < target_ms, "no"), "floors": took["p50"] / floor, "gb_s": n_bytes / floor / 1e6,
        "needs": 2 * n_bytes / target_ms / 1e6,
    }  # fmt: skip


def _turns(found: Json) -> str:
    head = (f"{found['agents']} agents of {found['tokens']} tokens", "all prepared, s", "last first token, s",
            f"last of {found['answer_tokens']} tokens, s", "n")  # fmt: skip
    rows = [
        (name, *(short(found[way][key]) for key in ("restored_s", "first_s", "total_s")), found[way]["first_s"]["n"])
        for way, name in {"without": "without caches", "restored": "restored"}.items()
    ]
    rows.append(("times as fast", "", found["first_speedup"], found["total_speedup"], ""))
    return f"{table(head, rows)}\n\nThe same tokens in all of them: {yes(found['same_tokens'])}."


if __name__ == "__main__":
    main(__doc__ or "", "006", run, render)
