"""The tables and the plot of EXP-013, made from its results alone."""

from pathlib import Path

from common import Json, server_lines, table


def render(content: Json, results: Path) -> tuple[str, dict[str, str]]:
    plot(content, results / "exp_013_steps.png")
    rate, step = content["rates"], content["steps"]
    word = "PASSED" if content["verdict"]["passed"] else "FAILED"
    p50, p95 = (max(case["claim_ms"][q] for case in content["claims"].values()) for q in ("p50", "p95"))
    title = (
        f"# {content['experiment']}: queue costs: {word}: a claim {p50:.1f} ms at p50 and {p95:.1f} ms at p95, "
        f"{rate['ratio']['median']} times the jobs of RQ's SimpleWorker, steps {step['p99_delay_ms']:+.1f} ms at p99"
    )
    parts = {"machine": server_lines(content), "claims": _claims(content), "rates": _rates(rate), "steps": _steps(step)}
    return title, parts


def _claims(content: Json) -> str:
    rows = []
    for name, row in content["claims"].items():
        claim, idle, first = row["claim_ms"], row["idle_ms"], row["first"]
        rows.append([
            name, row["waiting"], claim["p50"], claim["p95"], claim["max"], claim["n"],
            f"{idle['p50']} / {idle['p95']}" if idle else "-",
            f"{first['looks']}, worst {first['worst_ms']} ms", "yes" if row["length_true"] else "NO",
        ])  # fmt: skip
    head = [
        "jobs of",
        "waiting",
        "claim p50 ms",
        "p95",
        "max",
        "n",
        "idle look p50 / p95 ms",
        "first looks",
        "length true",
    ]
    return table(head, rows)


def _rates(rate: Json) -> str:
    def cell(spread: Json) -> str:
        return f"{spread['median']:g} ({spread['min']:g} to {spread['max']:g})"

    rows = [
        [rate["jobs"], cell(rate["ours_per_s"]), cell(rate["stock_per_s"]), cell(rate["ratio"]), rate["ratio"]["n"]]
    ]
    return table(["jobs", "stoker, jobs/s", "SimpleWorker, jobs/s", "ratio", "rounds"], rows)


def _steps(step: Json) -> str:
    rows = [
        [name, *(values[q] for q in ("p50", "p95", "p99", "max")), values["n"]]
        for name, values in (("idle", step["idle_ms"]), (f"{step['jobs_per_s']} jobs/s", step["busy_ms"]))
    ]
    return table(["", "p50 ms", "p95", "p99", "max", "steps"], rows)


def plot(content: Json, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2))
    names = ["p50", "p95", "p99"]
    for offset, (label, key) in enumerate((("idle", "idle_ms"), ("100 jobs/s", "busy_ms"))):
        heights = [content["steps"][key][name] for name in names]
        axes.bar([n + 0.4 * offset for n in range(3)], heights, width=0.38, label=label)
    axes.set_xticks([n + 0.2 for n in range(3)], names)
    axes.set_ylabel("ms from step to step")
    axes.set_title("Steps of 1 ms, without and with jobs that come and go")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
