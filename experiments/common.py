"""Machine facts, notes, spreads and turns: what every experiment measures with. No MLX at import."""

import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from redis import Redis

HERE = Path(__file__).resolve().parent
Json = dict[str, Any]
Name = TypeVar("Name")
T = TypeVar("T")


# --- the machine ---


def machine(model: Mapping[str, Any] | None = None) -> Json:
    """The facts that a figure depends on, without the machine's name.

    Args:
        model: facts about the model that was measured; ``None`` for an experiment without one.
    """
    from stoker_worker.models.blas import preload_blas

    blas = preload_blas()
    import mlx.core as mx

    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    return {
        "device": str(mx.device_info().get("device_name", "GPU")) if on_gpu else "CPU",
        **hardware(),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "blas": "Accelerate" if platform.system() == "Darwin" else blas or "as MLX links it",
        **(model or {}),
    }


def server_machine(url: str) -> Json:
    """As `machine`, for an experiment with a Redis server of its own and without MLX."""
    with Redis.from_url(url) as connection:
        facts: Any = connection.info("server")
    server = f"{facts.get('server_name', 'redis')} {facts['redis_version']}"
    software = {"sqlite": sqlite3.sqlite_version, "rq": version("rq"), "redis_py": version("redis"), "server": server}
    return hardware() | software


def hardware() -> Json:
    """The same without asking MLX."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "ram_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "os": os_name(),
        "python": platform.python_version(),
        **({"virtual": True} if _is_virtual() else {}),
    }


def _is_virtual() -> bool:
    """Whether macOS runs in a virtual machine, whose GPU is another one's."""
    if platform.system() != "Darwin":
        return False
    command = ["sysctl", "-n", "kern.hv_vmm_present"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() == "1"


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


def rss_mib(pid: int) -> float:
    """The resident memory of a process."""
    seen = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return int(seen.stdout) / 1024


# --- measuring ---


def note(stage: str) -> None:
    """Print the stage of a run to stderr."""
    print(f"{time.strftime('%H:%M:%S')} {stage}", file=sys.stderr, flush=True)


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of one call; its result is dropped afterwards."""
    begin = time.perf_counter()
    made = call()
    took = 1000 * (time.perf_counter() - begin)
    del made
    return took


def spread(samples: Sequence[float], *, digits: int = 3) -> Json:
    """Median, least and most of repeated measurements, and all of them."""
    values = {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}
    return _with_samples(values, samples, digits)


def percentiles(samples: Sequence[float], *, digits: int = 3) -> Json:
    """Mean, median, tails and ends of many measurements, and all of them."""
    p50, p95, p99 = np.percentile(samples, (50, 95, 99)).tolist()
    values = {"mean": statistics.fmean(samples), "p50": p50, "p95": p95, "p99": p99}
    values |= {"min": min(samples), "max": max(samples)}
    return _with_samples(values, samples, digits)


def _with_samples(values: Json, samples: Sequence[float], digits: int) -> Json:
    rounded = {name: round(value, digits) for name, value in values.items()}
    return {**rounded, "n": len(samples), "samples": [round(float(one), digits) for one in samples]}


def ratios(ours: Sequence[float], theirs: Sequence[float], *, digits: int = 3) -> Json:
    """The spread of `ours` by `theirs`, round by round: both of a pair were measured within moments of each other."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)], digits=digits)


def in_turn(names: Sequence[Name], rounds: int, *, warm_up: int = 0) -> Iterator[tuple[int, Name]]:
    """Each name once a round, with the number of the round; every round begins with another name.

    Args:
        warm_up: so many rounds come before, with numbers below 0.
    """
    for number in range(-warm_up, rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            yield number, name


def take_turns(contestants: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 0) -> dict[str, list[T]]:
    """Call every contestant once a round, in turn; what they return in the rounds that count."""
    found: dict[str, list[T]] = {name: [] for name in contestants}
    for number, name in in_turn(list(contestants), rounds, warm_up=warm_up):
        result = contestants[name]()
        if number >= 0:
            found[name].append(result)
    return found


def difference(got: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Index of the first token that differs; ``None`` when all are the same."""
    if list(got) == list(wanted):
        return None
    pairs = enumerate(zip(got, wanted, strict=False))
    return next((n for n, (left, right) in pairs if left != right), min(len(got), len(wanted)))
