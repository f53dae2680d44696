"""EXP-013's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json
from report import Report, columns, figure, say


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    claims, rate, step = content["claims"], content["rates"], content["steps"]
    p50, p95 = (max(case["claim_ms"][q] for case in claims.values()) for q in ("p50", "p95"))
    summary = (
        f"A claim takes {p50:.1f} ms at p50 and {p95:.1f} ms at p95. Jobs run at {rate['ratio']['median']} times the "
        f"rate of RQ's SimpleWorker. Beside jobs that come and go, a step is {step['p99_delay_ms']:.1f} ms later at "
        "p99."
    )
    number = say(
        {**rate, **claims["one busy agent's"]},
        "{claim_ms[p50]} ms; {ratio[median]} times the jobs per second of RQ's SimpleWorker (asked: 1.5)",
    )
    parts = {"summary": summary, "claims": _claims(claims), "rates": columns([rate], RATES), "steps": _steps(step)}
    return Report("queue costs", number, parts)


def _claims(claims: Json) -> str:
    rows = [{**row, "name": name, "idle": "{p50} / {p95}".format(**row["idle_ms"]) if row["idle_ms"] else "-"}
            for name, row in claims.items()]  # fmt: skip
    return columns(rows, {
        "jobs of": "{name}", "waiting": "{waiting}", "claim p50 ms": "{claim_ms[p50]}", "p95": "{claim_ms[p95]}",
        "max": "{claim_ms[max]}", "n": "{claim_ms[n]}", "idle look p50 / p95 ms": "{idle}",
        "first looks": "{first[looks]}, worst {first[worst_ms]} ms", "length true": "{length_true}",
    })  # fmt: skip


RATES = {"jobs": "{jobs}", "stoker, jobs/s": "{ours_per_s:g}", "SimpleWorker, jobs/s": "{stock_per_s:g}",
         "ratio": "{ratio:g}", "rounds": "{ratio[n]}"}  # fmt: skip


def _steps(step: Json) -> str:
    rows = [{"name": "idle", **step["idle_ms"]}, {"name": f"{step['jobs_per_s']} jobs/s", **step["busy_ms"]}]
    return columns(
        rows, {"": "{name}", "p50 ms": "{p50}", "p95": "{p95}", "p99": "{p99}", "max": "{max}", "steps": "{n}"}
    )


def plot(content: Json, results: Path) -> None:
    names = ["p50", "p95", "p99"]
    title = "steps of 1 ms, without and with jobs that come and go"
    with figure(content, results, "steps", (6, 3.2), title=title) as axes:
        for offset, (label, key) in enumerate((("idle", "idle_ms"), ("100 jobs/s", "busy_ms"))):
            heights = [content["steps"][key][name] for name in names]
            axes.bar([n + 0.4 * offset for n in range(3)], heights, width=0.38, label=label)
        axes.set_xticks([n + 0.2 for n in range(3)], names)
        axes.set_ylabel("ms from step to step")
        axes.legend()
