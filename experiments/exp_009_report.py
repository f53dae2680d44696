"""EXP-009's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json, machine_lines, span, table, verdict_title


def render(content: Json, results: Path) -> tuple[str, dict[str, str]]:
    plot(content, results / "exp_009_peers.png")
    taken, jobs = content["turns"], content["backlog"]
    rounds = [
        (name, f"{taken['first_s'][name]} s", span(taken["later_s"][name], " s"), taken["later_s"][name]["n"])
        for name in taken["first_s"]
    ]
    rates = [
        (name, span(found, " s"), f"{jobs['jobs'] / found['median']:.2f}") for name, found in jobs["seconds"].items()
    ]
    parts = {
        "summary": _summary(content),
        "machine": machine_lines(content),
        "turns": table(("server", "first round", "a later round", "rounds"), rounds),
        "backlog": table(("server", "the backlog", "jobs/s"), rates),
    }
    return verdict_title(content, "this worker and mlx_lm.server, kept running"), parts


def _summary(content: Json) -> str:
    taken, jobs = content["turns"], content["backlog"]
    same = "All answers are equal." if content["verdict"]["all_answers_equal"] else "Some answers differ."
    return (
        f"The first round of {taken['agents']} agents with {taken['tokens_at_first']} tokens each took "
        f"{taken['first_ratio']} times as long as mlx_lm.server's, a later round "
        f"{span(taken['later_ratio'])} times (asked: at most 0.9). A backlog of {jobs['jobs']} jobs went through "
        f"at {span(jobs['rate'])} times its rate (asked: 1.3). {same}"
    )


def plot(content: Json, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5))
    taken, jobs = content["turns"], content["backlog"]
    for axes, found, title in (
        (left, taken["later_s"], "a later round of turns, s"),
        (right, jobs["seconds"], "the backlog, s"),
    ):
        medians = [one["median"] for one in found.values()]
        below = [one["median"] - one["min"] for one in found.values()]
        above = [one["max"] - one["median"] for one in found.values()]
        axes.bar(range(len(found)), medians, yerr=[below, above], capsize=4, color=["tab:blue", "tab:gray"])
        axes.set_xticks(range(len(found)), list(found))
        axes.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
