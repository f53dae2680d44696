"""The figures of a machine: the experiments' short forms within some minutes, as a page and its JSON.

`stoker-worker figures` calls `run`. Each part runs in a process of its own (`figures_part.py`), because the clock ends
some and MLX may end others. Parts run in the order in which one would ask for them; one for which no time is left is
named. Both files are whole after each part, also if the Mac restarts under the next one. No MLX.

A part is a function, such as ``short_form(bench, folder)`` of an experiment, that yields rows: what is compared
(``what``), the `spread` of the ratios (``ratio``) or a text (``found``), what was asked for (``asked``), the spreads of
both sides (``first``, ``second``, ``unit``), whether the answers of both sides were the same (``equal``), and which of
the page's first figures it is (``headline``).
"""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import IO

from command import as_text
from common import HERE, Json, hardware
from figures_page import page, title_of_row
from rich.console import Console
from source import source

from stoker_shared.durable_file import replace_file


@dataclass(frozen=True)
class Part:
    """
    Attributes:
        name: an experiment's number, or a name.
        warning: of a part that runs only if it is asked for by name.
    """

    name: str
    title: str
    module: str
    function: str = "short_form"
    loads_model: bool = True
    warning: str = ""


_PANIC = "macOS can panic: the Mac then restarts at once, without saving (github.com/ml-explore/mlx/issues/3186)"
PARTS = (
    Part("machine", "the machine: what the doctor finds, memory without copies, launchd", "machine_checks",
         loads_model=False),
    Part("proof", "the proof of the model, as at a worker's first start", "machine_checks", "proof", loads_model=False),
    Part("010", "throughput beside a bare mlx-lm loop", "exp_010_throughput"),
    Part("006", "second turns, and restores beside copies of the bytes", "exp_006_cache_reconstruction"),
    Part("008", "the first token without a cache, from disk and from RAM", "exp_008_first_token"),
    Part("009", "turns and a backlog beside mlx_lm.server", "exp_009_peers"),
    Part("003", "restored caches give the uncached answers", "exp_003_cache_injection"),
    Part("004", "each sequence's cache is handed over when it ends", "exp_004_cache_extraction"),
    Part("014", "a restart", "exp_014_restart"),
    Part("017", "rows beside mlx-lm's rectangle", "exp_017_rows"),
    Part("020", "drafts", "exp_020_drafts"),
    Part("001", "models with windows and without", "exp_001_cache_specifications", loads_model=False),
    Part("002", "the block pool", "exp_002_allocation", loads_model=False),
    Part("013", "the queue beside RQ's own worker", "exp_013_queue_costs", loads_model=False),
    Part("wired", "wired memory", "machine_checks", "wired",
         warning=f"{_PANIC}, and wired memory makes that more likely. Save your work first."),
    Part("sleep", "a worker that sleeps", "machine_checks", "sleep", loads_model=False,
         warning="This Mac sleeps as soon as the part begins. Wake it after a minute or more: the part goes on then."),
)  # fmt: skip
"""In the order in which they run."""

LEAST_S = 20.0
"""With less time left, a part does not begin."""
MOST_OF_THE_REST = 0.5
"""No part but the last takes more than that of the time that is left, unless that is less than `SURE_S`."""
SURE_S = 120.0
_CLEANING_S = 75.0


@dataclass(frozen=True)
class Options:
    """
    Attributes:
        model: an mlx-lm folder or a Hugging Face repo.
        dtype: ``None``: float32 on a CPU or for the demo's model, ``auto`` otherwise.
        named: parts that run only if they are named.
        only: names of parts; empty: all others.
        note: a line for the page.
    """

    minutes: float
    model: str
    dtype: str | None
    named: frozenset[str] = frozenset()
    only: tuple[str, ...] = ()
    note: str = ""

    def parts(self) -> list[Part]:
        return [
            part
            for part in PARTS
            if (part.name in self.named if part.warning else not self.only or part.name in self.only)
        ]


class Clock:
    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def limit_s(self, *, is_last: bool) -> float:
        """The time that the next part may take."""
        left_s = self.left_s()
        return left_s if is_last else min(left_s, max(MOST_OF_THE_REST * left_s, SURE_S))


def run(out: Path, options: Options) -> tuple[Path, bool]:
    """Returns the page, beside which is the JSON, and whether no part failed."""
    console, clock, parts = Console(highlight=False, soft_wrap=True), Clock(options.minutes), options.parts()
    out.mkdir(parents=True, exist_ok=True)
    (log := out / "figures.log").write_text("")
    content = _facts(options)
    console.print(f"{len(parts)} parts in at most {options.minutes:g} minutes; what they print goes to {log}")
    begin = time.perf_counter()
    try:
        for number, part in enumerate(parts, 1):
            left = f"{clock.left_s() / 60:.0f} min left"
            console.print(f"[bold]{number} of {len(parts)}[/bold]  {part.title} ({part.name}); {left}")
            if part.warning:
                console.print(f"    [bold]{part.warning}[/bold]")
            found = _part(part, options, clock, log, console)
            content["machine"] |= found.pop("machine", {})
            content["parts"].append(found)
            content["wall_s"] = round(time.perf_counter() - begin)
            _print(found, console)
            _write(out, content)
    finally:
        content["thermal"]["after"], content["load_average_at_end"] = thermal(), round(os.getloadavg()[0], 1)
        content["parts"] += [_empty(part, "not run") for part in parts[len(content["parts"]) :]]
        file = _write(out, content)
    return file, all(part["status"] in ("done", "not run", "stopped") for part in content["parts"])


def _facts(options: Options) -> Json:
    told: Json = {"minutes": options.minutes, "dtype": options.dtype, "note": options.note}
    told |= {"named": sorted(options.named), "only": options.only}
    return {
        "stoker": version("stoker"),
        "date": date.today().isoformat(),
        "quick": True,
        "source": source(),
        "options": told,
        "machine": hardware() | {"load_average_at_start": round(os.getloadavg()[0], 1)},
        "thermal": {"before": thermal(), "after": []},
        "wall_s": 0,
        "parts": [],
    }


def thermal() -> list[str]:
    """What macOS tells about its heat; nothing elsewhere."""
    if platform.system() != "Darwin":
        return []
    done = subprocess.run(["pmset", "-g", "therm"], capture_output=True, text=True, check=False, timeout=10)
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _empty(part: Part, status: str, error: str = "") -> Json:
    return {"name": part.name, "title": part.title, "status": status, "error": error, "s": 0, "rows": []}


def _part(part: Part, options: Options, clock: Clock, log: Path, console: Console) -> Json:
    if clock.left_s() < LEAST_S:
        return _empty(part, "not run")
    begin, limit_s = time.perf_counter(), clock.limit_s(is_last=part is options.parts()[-1])
    with tempfile.TemporaryDirectory(prefix="stoker-figures-") as folder:
        result = Path(folder) / "part.json"
        asked = {"module": part.module, "function": part.function, "loads_model": part.loads_model,
                 "model": options.model, "dtype": options.dtype, "folder": folder}  # fmt: skip
        command = [sys.executable, str(HERE / "figures_part.py"), json.dumps(asked), str(result)]
        with log.open("a") as output:
            output.write(f"--- {part.name} ---\n")
            output.flush()
            status, error = _run(command, output, limit_s, log, console)
        found = json.loads(result.read_text()) if result.exists() else {"rows": [], "error": ""}
    if status == "done" and found["error"]:
        status = "failed"
    took_s = round(time.perf_counter() - begin)
    return {**_empty(part, status), **found, "error": found["error"] or error, "s": took_s}


def _run(command: Sequence[str], output: IO[str], limit_s: float, log: Path, console: Console) -> tuple[str, str]:
    """How a process ended within its time, and the reason if not well. Ctrl-C ends it too."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
    end = time.monotonic() + limit_s
    try:
        with console.status("it starts") as line:
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.2)
                line.update(_last_line(log))
        if process.poll() is None:
            return "stopped", f"stopped after {limit_s:.0f} s"
    finally:
        _ended(process)
    if process.returncode == 0:
        return "done", ""
    return "failed", f"its process ended with {process.returncode}: {_last_line(log)}"


def _ended(process: "subprocess.Popen[bytes]") -> None:
    """Politely first, so that it stops its servers and removes its files."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_CLEANING_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 400))
        lines = file.read().decode(errors="replace").splitlines()
    return re.sub(r"[\[\]\x00-\x1f]", "", lines[-1])[:150] if lines else ""


def _print(found: Json, console: Console) -> None:
    for row in found["rows"]:
        console.print(f"    {title_of_row(row)}", markup=False)
    if found["status"] != "done":
        console.print(f"    {found['status']} {found['error'][:300]}".rstrip(), markup=False)


def _write(out: Path, content: Json) -> Path:
    file = out / "figures.md"
    replace_file(file.with_suffix(".json"), as_text(content).encode())
    replace_file(file, page(content).encode())
    return file
