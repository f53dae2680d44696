"""EXP-014's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json, machine_lines, span, table, verdict_title

_ROUNDS = {"none": "stays", "SIGTERM": "stopped and restarted", "SIGKILL": "killed and restarted"}


def render(content: Json, results: Path) -> tuple[str, dict[str, str]]:
    plot(content, results / "exp_014_restart.png")
    found, steps = content["rounds"], content["steps"]
    rows = []
    for kind, sources in found["sources"].items():
        ratio = span(found["ratio"][kind]) if kind in found["ratio"] else ""
        named = ", ".join(f"{n} {source}" for source, n in sources.items())
        rows.append((_ROUNDS[kind], span(found["round_s"][kind], " s"), ratio, named))
    head = (
        "the worker",
        "a round: median (least to most)",
        "times the round without a restart",
        "sources of the caches",
    )
    rounds = table(head, rows) + (
        f"\n\nStart of the worker until it is ready: {span(found['start_s'], ' s')}. Stored tokens that were "
        f"prefilled again, at most: {found['stored_tokens_prefilled_again']}. Load average of the machine after each "
        f"round: {span(found['load_average'])}."
    )
    lines = [
        (name, span(taken, " ms"), taken["n"], steps["p95_over_quiet"][name], steps["longest_over_quiet"][name])
        for name, taken in steps["step_ms"].items()
    ]
    head = ("meanwhile", "step, median (least to most)", "steps", "95th percentile / quiet", "longest / quiet")
    parts = {
        "summary": _summary(content),
        "machine": machine_lines(content),
        "rounds": rounds,
        "steps": table(head, lines),
    }
    return verdict_title(content, "a restart, and a long memory coming back"), parts


def _summary(content: Json) -> str:
    found, steps = content["rounds"], content["steps"]
    term, kill = found["ratio"]["SIGTERM"], found["ratio"]["SIGKILL"]
    return (
        f"A round of {found['agents']} agents, {found['tokens_at_first']} to {found['tokens_at_last']} tokens each, "
        f"took {term['median']} times as long after a stop and a restart as without (median of {term['n']} pairs, "
        f"{term['min']} to {term['max']}; target: at most 1.15), and {kill['median']} times after a `kill -9` "
        f"({kill['min']} to {kill['max']}). Of the stored tokens at most {found['stored_tokens_prefilled_again']} was "
        f"prefilled again. While {steps['mb']} MB were read and verified ({steps['read_s']['median']} s), "
        f"{steps['rows']} other sequences decoded; their longest step took {steps['longest_over_quiet']['reading']} "
        f"times a quiet one for a restore (target: at most 2), and "
        f"{steps['longest_over_quiet']['reading ahead']} times for a cache that was read ahead."
    )


def plot(content: Json, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    found, steps = content["rounds"], content["steps"]["step_ms"]
    for axes, taken, unit in (
        (
            left,
            {_ROUNDS[kind]: spread for kind, spread in found["round_s"].items()},
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
