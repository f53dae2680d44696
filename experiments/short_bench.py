"""`make bench`: short forms of the experiments that compare, in under ten minutes, as one table of ratios.

Each script of `FORMS` has a function ``short_form(bench, folder)``, which returns the table's rows: what is compared
(``what``), the `spread` of the ratios (``ratio``), what was asked for (``asked``) and whether the answers of both sides
were the same (``equal``; left out where there are none). Run: ``python experiments/short_bench.py``. It prints the
table, and writes it into the index of the experiments and its numbers into ``results/bench_results.json``.
"""

import argparse
import json
import tempfile
import time
from importlib import import_module
from pathlib import Path

from bench import Bench
from command import add_model, as_text, measured
from common import HERE, Json, machine, note
from report import columns, filled, machine_line

FORMS = ("006", "008", "009", "010", "013", "017")
INDEX = HERE / "README.md"
COLUMNS = {
    "experiment": "[{experiment}]({report})", "compared": "{what}", "ratio (least to most)": "{ratio:.3g}",
    "rounds": "{ratio[n]}", "asked": "{asked}", "same answers": "{equal}",
}  # fmt: skip


def run(bench: Bench, forms: tuple[str, ...]) -> Json:
    rows, seconds = [], {}
    for number in forms:
        (report,) = HERE.glob(f"EXP-{number}-*.md")
        note(f"EXP-{number}")
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found = import_module(script_of_form(number).stem).short_form(bench, Path(folder))
        rows += [{"experiment": f"EXP-{number}", "report": report.name, **row} for row in found]
        seconds[f"EXP-{number}"] = round(time.perf_counter() - begin)
    return {"machine": machine(bench.facts), "rows": rows, "seconds": seconds}


def script_of_form(number: str) -> Path:
    (script,) = (path for path in HERE.glob(f"exp_{number}_*.py"))
    return script


def shown(content: Json) -> str:
    """The table, and the machine that it is from."""
    return f"{columns(content['rows'], COLUMNS)}\n\n{machine_line(content)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE, help="folder for results/; elsewhere, the index is copied")
    parser.add_argument("--only", nargs="+", choices=FORMS, default=FORMS, help="the numbers of some experiments")
    parser.add_argument("--render", action="store_true", help="only rewrite the index from the results that exist")
    add_model(parser)
    args = parser.parse_args()
    results = args.out / "results" / "bench_results.json"
    if not args.render:
        results.parent.mkdir(parents=True, exist_ok=True)
        content = measured(lambda: run(Bench.load(args.model, args.dtype), tuple(args.only)), args, quick=True)
        results.write_text(as_text(content), encoding="utf-8")
    table = shown(json.loads(results.read_text(encoding="utf-8")))
    (args.out / INDEX.name).write_text(filled(INDEX.read_text(encoding="utf-8"), {"bench": table}), encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
