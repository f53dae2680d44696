"""Machine facts, spreads, results as JSON, and reports whose figures come from that JSON. Experiments only; no MLX.

A report is prose with parts between markers. The script writes those parts and the verdict in the title line.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Json = dict[str, Any]
LOADING_LIMIT_MS = 500.0
"""The plan's limit for loading a cache; a criterion of EXP-003."""


def machine(model: Mapping[str, Any] | None = None) -> Json:
    """The facts that a figure depends on, without the machine's name.

    Args:
        model: facts about the model that was measured; ``None`` for an experiment without one.
    """
    from stoker_worker.models.blas import preload_blas

    blas = preload_blas()
    import mlx.core as mx

    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    facts = {
        "device": str(mx.device_info()["device_name"]) if on_gpu else "CPU",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "ram_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "os": os_name(),
        "python": platform.python_version(),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "blas": "Accelerate" if platform.system() == "Darwin" else blas or "as MLX links it",
        "load_average_at_start": round(os.getloadavg()[0], 1),
    }
    return {**facts, **(model or {})}


def arguments(about: str, *, model: bool = True) -> argparse.Namespace:
    """The command line. `model` adds the options of an experiment that loads a model."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a few prompts and repetitions, to check that the script still works"
    )
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the report and its results/")
    if model:
        parser.add_argument("--model", help="mlx-lm folder or Hugging Face repo; default: SmolLM2-135M-Instruct")
        dtypes = ("float32", "auto")
        parser.add_argument(
            "--dtype", choices=dtypes, default=dtypes[0], help="exact results are promised for float32 only"
        )
    parser.add_argument("--render", action="store_true", help="only rewrite the report from the results that exist")
    return parser.parse_args()


def note(stage: str) -> None:
    """Print the stage of a run to stderr."""
    print(f"{time.strftime('%H:%M:%S')} {stage}", file=sys.stderr, flush=True)


def spread(samples: Sequence[float], *, digits: int = 3) -> Json:
    """Median, least and most of repeated measurements."""
    values = {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}
    return {**{name: round(value, digits) for name, value in values.items()}, "n": len(samples)}


def span(found: Json, unit: str = "") -> str:
    """A `spread` as reports write it."""
    return f"{found['median']}{unit} ({found['min']} to {found['max']})"


def difference(got: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Index of the first token that differs; ``None`` when all are the same."""
    if list(got) == list(wanted):
        return None
    pairs = enumerate(zip(got, wanted, strict=False))
    return next((n for n, (left, right) in pairs if left != right), min(len(got), len(wanted)))


def finish(args: argparse.Namespace, number: str, report: str, run: Callable[[], Json], render: Any) -> None:
    """Run the experiment unless only rendering, write the results as JSON, and make report and plot from that JSON.

    Args:
        render: called with the results and the plot's folder; makes the plot, returns the title and the parts by name.
    """
    results = args.out / "results" / f"exp_{number}_results.json"
    if not args.render:
        results.parent.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        content = {"experiment": f"EXP-{number}", "date": date.today().isoformat(), "quick": args.quick, **run()}
        content["wall_s"] = round(time.perf_counter() - start)
        results.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    content = json.loads(results.read_text(encoding="utf-8"))
    title, parts = render(content, results.parent)
    text = (HERE / report).read_text(encoding="utf-8")
    (args.out / report).write_text(_filled(text, title, parts), encoding="utf-8")
    print(f"{title}\n" + json.dumps(content["verdict"], indent=1))


def server_lines(content: Json) -> str:
    """As `machine_lines`, for an experiment with a Redis server of its own and without a model."""
    facts = content["machine"]
    size = "quick run" if content["quick"] else "full run"
    names = {"python": "Python", "sqlite": "SQLite", "rq": "rq", "redis_py": "redis-py", "server": "server"}
    software = ", ".join(f"{name} {facts[key]}" for key, name in names.items() if key in facts)
    return (
        f"{content['date']}, {size}, {content['wall_s']} s. {facts['cpu']}, {facts['cores']} cores; {facts['os']}; "
        f"{software}; load average at the start {facts['load_average_at_start']}."
    )


def machine_lines(content: Json) -> str:
    facts = content["machine"]
    size = "quick run" if content["quick"] else "full run"
    model = ""
    if "model" in facts:
        cache = f"cache {facts['cache_dtype']}, {facts['cache_bytes_per_token']} bytes per token"
        model = f" Model: {facts['model']}, {cache}."
    return (
        f"{content['date']}, {size}, {content['wall_s']} s. Device: {facts['device']}; {facts['cpu']}, "
        f"{facts['cores']} cores, {facts['ram_gb']} GB; {facts['os']}; Python {facts['python']}, mlx {facts['mlx']}, "
        f"mlx-lm {facts['mlx_lm']}, BLAS: {facts['blas']}; load average at the start {facts['load_average_at_start']}."
        f"{model}"
    )


def verdict_title(content: Json, name: str) -> str:
    device = content["machine"]["device"]
    where = "on a CPU; not run on Metal" if device == "CPU" else f"on {device}"
    return f"# {content['experiment']}: {name}: {'PASSED' if content['verdict']['passed'] else 'FAILED'} ({where})"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _filled(text: str, title: str, parts: Mapping[str, str]) -> str:
    text = title + text[text.index("\n") :]
    for name, part in parts.items():
        begin, end = f"<!-- from results: {name} -->\n", f"<!-- end: {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}{part}\n{end}{rest.split(end)[1]}"
    return text


def cpu_name() -> str:
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def os_name() -> str:
    if platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]} {platform.machine()}"
    return f"{platform.freedesktop_os_release()['PRETTY_NAME']} {platform.machine()}"
