"""The command of every experiment: its options, its results as JSON, and the report, the plot and the index row that
are made from that JSON. No MLX."""

import argparse
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import date
from functools import partial
from pathlib import Path

from common import HERE, Json, machine, server_machine
from report import Report, indexed, written
from source import source

from stoker_worker.embedded_redis import EmbeddedServer

Run = Callable[..., Json]
"""Called with ``quick``, it returns the results: among them is the ``verdict``, which has the criteria by name."""
Render = Callable[[Json, Path], Report]
"""Called with the results and the plot's folder; it also makes the plot."""


def arguments(about: str, *, model: bool, more: Mapping[str, Json] | None = None) -> argparse.Namespace:
    """The command line.

    Args:
        model: whether to add the options of an experiment that loads a model.
        more: options of this experiment alone: name, which has underscores, and what `add_argument` takes.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="a few prompts and repetitions, to check that the script still works")
    add("--out", type=Path, default=HERE, help="folder for the report and its results/")
    add("--render", action="store_true", help="only rewrite the report from the results that exist")
    if model:
        add("--model", help="mlx-lm folder or Hugging Face repo; default: SmolLM2-135M-Instruct")
        exact = "exact results are promised for float32 only"
        add("--dtype", choices=("float32", "auto"), default="float32", help=exact)
    for name, about_it in (more or {}).items():
        add("--" + name.replace("_", "-"), **about_it)
    return parser.parse_args()


def main(about: str, number: str, run: Run, render: Render) -> None:
    """The command of an experiment without a model: it calls `run(folder, quick=...)` with a temporary folder."""

    def of_run(*, quick: bool) -> Json:
        with tempfile.TemporaryDirectory() as folder:
            return {"machine": machine(), **run(Path(folder), quick=quick)}  # which loads the BLAS library before

    finish(arguments(about, model=False), number, of_run, render)


def server_main(about: str, number: str, run: Run, render: Render) -> None:
    """The same with a Redis server of its own and without MLX: `run(url, folder, quick=...)`."""

    def of_run(*, quick: bool) -> Json:
        logging.disable(logging.WARNING)
        with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder) / "redis") as server:
            return {"machine": server_machine(server.url), **run(server.url, Path(folder), quick=quick)}

    finish(arguments(about, model=False), number, of_run, render)


def finish(args: argparse.Namespace, number: str, run: Run, render: Render) -> None:
    """Run the experiment unless only rendering, and write its results, report, plot and index row."""
    results = args.out / "results" / f"exp_{number}_results.json"
    if not args.render:
        results.parent.mkdir(parents=True, exist_ok=True)
        content = {"experiment": f"EXP-{number}", **measured(partial(run, quick=args.quick), args, quick=args.quick)}
        results.write_text(as_text(content), encoding="utf-8")
    content = json.loads(results.read_text(encoding="utf-8"))
    report = render(content, results.parent)
    (file,) = HERE.glob(f"EXP-{number}-*.md")
    for name, change in (
        (file.name, lambda text: written(text, content, report)),
        ("README.md", lambda text: indexed(text, content, report.number)),
    ):
        (args.out / name).write_text(change((HERE / name).read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{report.number}\n" + json.dumps(content["verdict"], indent=1))


def as_text(content: Json) -> str:
    """JSON with each list of numbers on one line."""
    text = json.dumps(content, indent=1, ensure_ascii=False, default=str)
    numbers = re.compile(r"\[\s+(-?\d[-+\d.eE,\s]*?)\s+\]")
    return numbers.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def measured(run: Callable[[], Json], args: argparse.Namespace, *, quick: bool) -> Json:
    """The results of a run with the facts about it: its source, options and machine. It has passed if every
    criterion of its verdict holds."""
    load, begin = os.getloadavg()[0], time.perf_counter()
    found = run()
    facts = found.pop("machine") | {"load_average_at_start": round(load, 1)}
    if "verdict" in found:
        found["verdict"] = {"passed": all(found["verdict"].values()), **found["verdict"]}
    return {
        "date": date.today().isoformat(),
        "quick": quick,
        "source": source(),
        "options": {name: value for name, value in vars(args).items() if name not in ("out", "render")},
        "machine": facts,
        **found,
        "load_average_at_end": round(os.getloadavg()[0], 1),
        "wall_s": round(time.perf_counter() - begin),
    }
