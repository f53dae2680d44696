"""EXP-006's tables, made from its results alone."""

from collections.abc import Iterator
from pathlib import Path

from common import Json
from exp_006_plot import plot
from report import Report, columns, say, short, table, yes

CELLS = {
    "blocks": "{blocks}", "layers": "{layers}", "MB": "{mb}", "mean, ms": "{reconstruct_ms[mean]:.3g}",
    "p50": "{reconstruct_ms[p50]:.3g}", "p95": "{reconstruct_ms[p95]:.3g}", "p99": "{reconstruct_ms[p99]:.3g}",
    "p50 of the store's part": "{store_ms[p50]:.3g}", "copy, in use": "{used_copy_ms[p50]:.3g}",
    "copy, all threads": "{threads_copy_ms[p50]:.3g}", "copy, fresh": "{fresh_copy_ms[p50]:.3g}",
    "restore / floor": "{of_floor:.3g}", "page faults": "{page_faults[median]:.0f}",
    "extract, p95": "{extract_ms[p95]:.3g}", "round trip, p95": "{round_trip_ms[p95]:.3g}",
    "n of the last two": "{extract_ms[n]}",
}  # fmt: skip
GEMMA = {
    "32 blocks x 48 layers": "{name}", "MB": "{mb}", "n": "{reconstruct_ms[n]}",
    "mean, ms": "{reconstruct_ms[mean]:.3g}", "p50": "{reconstruct_ms[p50]:.3g}", "p95": "{reconstruct_ms[p95]:.3g}",
    "of p50: store": "{store_ms[p50]:.3g}", "of p50: engine": "{caches_ms[p50]:.3g}",
    "copy, in use": "{used_copy_ms[p50]:.3g}",
    "copy, all threads": "{threads_copy_ms[p50]:.3g}", "restore / floor": "{of_floor:.3g}",
    "page faults": "{page_faults[median]:.0f}",
}  # fmt: skip
WAYS = {
    "way": "{name}", "MB": "{mb}", "restore, ms": "{restore_ms:.3g}", "one more token, ms": "{token_ms:.3g}",
    "times as fast as the product": "{gain:.3g}", "equal bytes": "{exact}",
}  # fmt: skip
DIRECT = {
    "tokens": "{tokens}", "MB": "{mb}", "first token without cache, s": "{cold_s:.3g}", "from cache, s": "{warm_s:.3g}",
    "times as fast": "{speedup}", "whole answer without, s": "{cold_total_s:.3g}",
    "whole answer from cache, s": "{warm_total_s:.3g}", "so many times as fast": "{total_speedup}",
    "store, ms": "{store_ms:.3g}", "runs": "{cold_s[n]} and {warm_s[n]}", "same tokens": "{same_tokens}",
}  # fmt: skip


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    last = {**content["cells"][-1], "mb": content["cells"][-1]["bytes"] / 1e6, "floor": _floor_ms(content["cells"][-1])}
    number = say(last, "{blocks} blocks of {layers} layers: p95 {reconstruct_ms[p95]:.0f} ms for {mb:.0f} MB; one copy "
                 "of them {floor:.0f} ms")  # fmt: skip
    return Report("cache reconstruction", number, {
        "summary": _summary(content),
        "targets": _targets(content),
        "cells": columns(map(_with_mb, content["cells"]), CELLS),
        "scaling": _scaling(content),
        "gemma": columns(map(_with_mb, content["gemma"]), GEMMA),
        "profile": _profile(content["profile"]),
        "ways": columns([{**row, "mb": ways["mb"]} for ways in content["ways"] for row in ways["rows"]], WAYS),
        "round trip": _round_trip(content["round_trip"]),
        "direct": columns(content["direct"], DIRECT),
        "restores": _restores(content["restores"]),
        "turns": _turns(content["turns"]),
        "padded": _padded(content["padded"]),
        "library": _library(content["library"]),
    })  # fmt: skip


def _with_target(content: Json) -> Iterator[tuple[str, Json, float]]:
    """The seed's cases: their names, cells and milliseconds."""
    by = {(cell["blocks"], cell["layers"]): cell for cell in content["cells"]}
    for one in content["targets"]:
        yield f"{one['blocks']} x {one['layers']}", by[one["blocks"], one["layers"]], one["target_ms"]


def _floor_ms(cell: Json) -> float:
    """The faster of the two copies into memory in use."""
    return min(cell[key]["p50"] for key in ("used_copy_ms", "threads_copy_ms"))


def _summary(content: Json) -> str:
    pairs = list(_with_target(content))
    met = sum(cell["reconstruct_ms"]["p95"] < target for _, cell, target in pairs)
    beyond = sum(_floor_ms(cell) >= target for _, cell, target in pairs)
    last = max(content["cells"], key=lambda cell: cell["bytes"])
    whole, held = content["gemma"]
    lines = [
        f"{met} of the seed's {len(pairs)} latency targets are met here. {beyond} of them lie below one copy of the "
        "bytes into memory in use: on this machine no restore could meet those.",
        f"{last['blocks']} blocks of {last['layers']} layers ({_mb(last)} MB): p95 "
        f"{_ms(last['reconstruct_ms']['p95'])} ms; one copy of the bytes {_ms(_floor_ms(last))} ms.",
        f"Gemma 3 12B's 32 blocks: p95 {_ms(whole['reconstruct_ms']['p95'])} ms with every layer whole ({_mb(whole)} "
        f"MB), {_ms(held['reconstruct_ms']['p95'])} ms as its caches are ({_mb(held)} MB).",
    ]
    for cell in content["cells"]:
        if (cell["blocks"], cell["layers"]) == (32, 30):
            lines.append(
                "The project's own target, at most 1.5 copies into fresh memory at 32 blocks of 30 layers: "
                f"{short(cell['copies'])}, median of {cell['copies']['n']} rounds; of the faster copy into memory in "
                f"use {short(cell['of_floor'])}."
            )
    first, row = content["direct"][0], content["direct"][-1]
    turns = content["turns"]
    lines += [
        f"SmolLM2's whole answer of {row['answer_tokens']} tokens came {first['total_speedup']} times as fast from a "
        f"restored cache at {first['tokens']} tokens and {row['total_speedup']} times as fast at {row['tokens']}; its "
        f"first token {first['speedup']} and {row['speedup']} times as fast.",
        f"The last first token of five agents with {turns['tokens']} tokens each came {turns['first_speedup']} times "
        "as fast with restored caches.",
        f"The best of the other ways: {', '.join(map(_best_other, content['ways']))}.",
    ]
    return "\n".join(lines)


def _targets(content: Json) -> str:
    head = ("blocks x layers", "MB", "target p95, ms", "measured p95, ms", "met", "copy, GB/s", "floor: MB / GB/s, ms",
            "p50 / floor", "floor within the target", "a copy needs, GB/s")  # fmt: skip
    last = "32 x 48, Gemma 3 12B, {}"
    rows = []
    for name, cell, target in [*_with_target(content), *((last.format(x["name"]), x, 5.0) for x in content["gemma"])]:
        floor, p50, p95 = _floor_ms(cell), cell["reconstruct_ms"]["p50"], cell["reconstruct_ms"]["p95"]
        rows.append((name, _mb(cell), target, _ms(p95), yes(p95 < target, "no"), f"{cell['bytes'] / floor / 1e6:.1f}",
                     _ms(floor), f"{p50 / floor:.1f}", yes(floor < target, "no"),
                     f"{2 * cell['bytes'] / target / 1e6:.0f}"))  # fmt: skip
    return table(head, rows)


def _scaling(content: Json) -> str:
    fit, leak = content["fit"], content["leak"]
    resident = ", ".join(f"{mb:.0f}" for mb in leak["resident_mb"])
    return (
        f"Over all {len(content['cells'])} cells the median is {fit['at_zero_ms']} ms + {fit['ms_per_mb']} ms per MB "
        f"(r2 {fit['r2']}); a power law through them has the exponent {fit['exponent']} (1 is linear).\n"
        f"{leak['rounds']} reconstructions of {leak['blocks']} blocks of {leak['layers']} layers ({leak['cell_mb']} MB "
        f"each): the process held {resident} MB at the start, the quarters and the end; growth {leak['growth_mb']} MB."
    )


def _profile(found: Json) -> str:
    rows = [
        (row["stage"], short(row["ms"]), f"{100 * row['share']:.1f} %",
         f"{found['gb_s'][row['stage']]}" if row["stage"] in found["gb_s"] else "")
        for row in found["stages"]
    ]  # fmt: skip
    totals = found["totals_ms"]
    one, timed, all_threads = (
        short(totals[name]) for name in ("one thread", "one thread with stopwatches", "all threads")
    )
    system, program = (totals[f"processor in the {name}"]["median"] for name in ("system", "program"))
    said = (
        f"{found['blocks']} blocks of {found['layers']} layers, {found['mb']} MB. The whole restore took {timed} ms "
        f"with stopwatches, {one} ms without and {all_threads} ms by all threads; the processor then spent "
        f"{_ms(system)} ms in the system (reading, page faults) and {_ms(program)} ms in the program."
    )
    return f"{table(('stage', 'ms', 'share', 'GB/s'), rows)}\n\n{said}"


def _best_other(ways: Json) -> str:
    """How the fastest of the other ways compares with the product's."""
    best = max(ways["rows"][1:], key=lambda row: row["gain"]["median"])
    return f"{best['gain']['median']:.2f} times as fast at {ways['mb']} MB ({best['name']})"


def _round_trip(found: Json) -> str:
    rows = [(name, *(_ms(ms[k]) for k in ("mean", "p50", "p95", "p99")), ms["n"]) for name, ms in found["ms"].items()]
    said = (
        f"{found['blocks']} blocks of {found['layers']} layers, {found['answer_tokens']} tokens generated. The same "
        f"tokens as without cache each time: {yes(found['same_tokens'])}. Restored bytes, extracted again, equal to "
        f"those of the run without cache: {yes(found['exact'])}. The bytes of the answer's own tokens: "
        + ("equal." if found["answers_bytes_equal"] else f"at most {found['largest_difference']:.2g} apart.")
    )
    return f"{table(('step', 'mean, ms', 'p50', 'p95', 'p99', 'n'), rows)}\n\n{said}"


def _restores(found: Json) -> str:
    head = (f"{found['blocks']} blocks of {found['layers']} layers ({found['mb']} MB)", "p50, ms", "p95", "n")
    return table(head, [(name, _ms(ms["p50"]), _ms(ms["p95"]), ms["n"]) for name, ms in found["ms"].items()])


def _turns(found: Json) -> str:
    head = (f"{found['agents']} agents of {found['tokens']} tokens", "all prepared, s", "last first token, s",
            f"last of {found['answer_tokens']} tokens, s", "n")  # fmt: skip
    keys = ("restored_s", "first_s", "total_s")
    names = {"without": "without caches", "restored": "restored"}
    rows = [
        (name, *(short(found[way][key]) for key in keys), found[way]["first_s"]["n"]) for way, name in names.items()
    ]
    rows.append(("times as fast", "", found["first_speedup"], found["total_speedup"], ""))
    return f"{table(head, rows)}\n\nThe same tokens in all of them: {yes(found['same_tokens'])}."


def _padded(padded: Json) -> str:
    rows = [
        (name, *(_ms(padded[key][k]) for k in ("mean", "p50", "p95", "p99")), padded[key]["n"])
        for name, key in (("612 tokens: two blocks and a tail", "blocks_ms"), ("768 tokens: padded", "padded_ms"))
    ]
    said = (
        f"Blocks took {short(padded['ratio'])} of the padded layout's time (median of {padded['ratio']['n']} pairs); "
        f"the bytes are {padded['bytes_ratio']:.2f} of its bytes."
    )
    return f"{table(('layout', 'mean, ms', 'p50', 'p95', 'p99', 'n'), rows)}\n\n{said}"


def _library(library: Json) -> str:
    ways = {"library": "`save_file`", "mapped": "`safe_open`", "whole": "`load`"}
    head = ("blocks", "MB", "step", "own, ms", "library, ms", "library / own", "n")
    lines = []
    for row in library["rows"]:
        for name, ratio in row["of_own"].items():
            step, way = name.split(", ")
            lines.append((row["blocks"], row["mb"], f"{step}: {ways[way]}", _ms(row["ms"][f"{step}, own"]["median"]),
                          _ms(row["ms"][name]["median"]), short(ratio), ratio["n"]))  # fmt: skip
    return table(head, lines)


def _with_mb(cell: Json) -> Json:
    return {**cell, "mb": _mb(cell)}


def _mb(cell: Json) -> str:
    return f"{cell['bytes'] / 1e6:.1f}"


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
