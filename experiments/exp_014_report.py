"""EXP-014's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json, machine_lines, table, verdict_title


def render(content: Json, results: Path) -> tuple[str, dict[str, str]]:
    plot(content, results / "exp_014_restart.png")
    found, steps = content["rounds"], content["steps"]
    rows = [
        ("after a restart, from disk", _span(found["disk_s"], " s")),
        ("the same, with memory touched before", _span(found["disk_touched_s"], " s")),
        ("worker stays, from RAM", _span(found["memory_s"], " s")),
        ("after a restart / from RAM", _span(found["ratio"], "")),
        ("the same, with memory touched before", _span(found["ratio_touched"], "")),
        ("a GB of fresh memory after a restart", _span(found["first_touch_s_per_gb"], " s")),
        ("the same GB for the next process", _span(found["second_touch_s_per_gb"], " s")),
        ("stored tokens prefilled again, at most", found["stored_tokens_prefilled_again"]),
        ("every result names the right source", "yes" if found["sources_are_true"] else "NO"),
    ]
    lines = [
        (name, _span(taken, " ms"), taken["n"], steps["p95_over_quiet"][name], steps["longest_over_quiet"][name])
        for name, taken in steps["step_ms"].items()
    ]
    head = ("meanwhile", "step, median (least to most)", "steps", "95th percentile / quiet", "longest / quiet")
    parts = {
        "summary": _summary(content),
        "machine": machine_lines(content),
        "rounds": table(("round", "median (least to most)"), rows),
        "steps": table(head, lines),
    }
    return verdict_title(content, "a restart, and a long memory coming back"), parts


def _summary(content: Json) -> str:
    found, steps = content["rounds"], content["steps"]
    return (
        f"A round of {found['agents']} agents, {found['tokens_at_first']} to {found['tokens_at_last']} tokens each, "
        f"took {found['ratio']['median']} times as long after a restart as from RAM (median of {found['ratio']['n']} "
        f"pairs, {found['ratio']['min']} to {found['ratio']['max']}; target: at most 1.15), and "
        f"{found['ratio_touched']['median']} times where other processes had touched the memory before. Of the stored "
        f"tokens at most {found['stored_tokens_prefilled_again']} was prefilled again. While {steps['mb']} MB were "
        f"read and verified ({steps['read_s']['median']} s), {steps['rows']} other sequences decoded; their longest "
        f"step took {steps['longest_over_quiet']['reading']} times a quiet one (target: at most 2)."
    )


def _span(found: Json, unit: str) -> str:
    return f"{found['median']}{unit} ({found['min']} to {found['max']})"


def plot(content: Json, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    found, steps = content["rounds"], content["steps"]["step_ms"]
    for axes, taken, unit in (
        (
            left,
            {"restart": found["disk_s"], "memory touched": found["disk_touched_s"], "RAM": found["memory_s"]},
            "s per round",
        ),
        (right, steps, "ms per step"),
    ):
        medians = [one["median"] for one in taken.values()]
        below = [one["median"] - one["min"] for one in taken.values()]
        above = [one["max"] - one["median"] for one in taken.values()]
        axes.bar(range(len(taken)), medians, yerr=[below, above], capsize=4, color="tab:blue")
        axes.set_xticks(range(len(taken)), list(taken))
        axes.set_ylabel(unit)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
