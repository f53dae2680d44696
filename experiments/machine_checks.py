"""What only the machine itself can tell: the doctor's findings and the proof, memory without copies, launchd, and, by
name only, wired memory and sleep. Parts of the figures."""

import mmap
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import Json, note, ratios, timed
from worker_process import SCRIPTED, WorkerProcess

from stoker import Producer
from stoker_worker import doctor
from stoker_worker.embedded_redis import EmbeddedServer
from stoker_worker.service import manager_here, worker_unit
from stoker_worker.settings import read_settings

BYTES = 256 << 20
_ROUNDS = 7
_SLEPT_S, _PATIENCE_S = 10.0, 900.0


def short_form(bench: object, folder: Path) -> Iterator[Json]:
    yield from _findings(doctor.machine_checks())
    yield from shared_buffers()
    yield launchd(folder)


def proof(bench: Any, folder: Path) -> Iterator[Json]:
    from stoker_worker.engine.provider import MlxProvider

    settings = read_settings({"store": folder / "store", "model": bench.source, "dtype": bench.dtype})
    yield from _findings(doctor.model_checks(bench.source, MlxProvider(settings)))


def _findings(checks: Iterable[doctor.Check]) -> Iterator[Json]:
    for name, look in checks:
        finding = doctor.found(look)
        yield {"what": f"doctor: {name}", "found": f"{finding.status}: {finding.line}"}


# --- memory without copies ---


def shared_buffers() -> Iterator[Json]:
    """Whether an array of MLX can use a buffer's own memory, as a restore would like to."""
    for name, buffer in (
        ("whose pages are its own", np.frombuffer(mmap.mmap(-1, BYTES), np.uint8)),
        ("of NumPy's", np.zeros(BYTES, np.uint8)),
    ):
        what = f"mx.array(buffer) / mx.asarray(buffer, copy=False), in time: 256 MB {name}"
        try:
            yield _shared(what, buffer)
        except (TypeError, ValueError, RuntimeError) as error:
            yield {"what": what, "found": f"refused: {error}"}


def _shared(what: str, buffer: Any) -> Json:
    import mlx.core as mx

    array = mx.asarray(buffer, copy=False)
    mx.eval(array)
    buffer[:] = 7
    is_shared = bool(mx.all(array == 7).item())
    ways: list[Callable[[], Any]] = [lambda: mx.array(buffer), lambda: mx.asarray(buffer, copy=False)]
    copied, shared = zip(*([timed(partial(_on_device, way)) for way in ways] for _ in range(_ROUNDS)), strict=True)
    return {"what": f"{what} ({'shared' if is_shared else 'copied all the same'})", "ratio": ratios(copied, shared)}


def _on_device(make: Callable[[], Any]) -> Any:
    """The array, after its first use on the device."""
    import mlx.core as mx

    array = make()
    mx.eval(mx.max(array))
    return array


# --- launchd ---


def launchd(folder: Path) -> Json:
    """A worker without a model as a service of this user: loaded, and unloaded again."""
    row: Json = {"what": "launchd loads a worker's unit, and unloads it"}
    if platform.system() != "Darwin":
        return row | {"found": "no Mac"}
    name, manager, said = "stoker-figures", manager_here(), list[str]()
    options = ("--engine", "scripted", "--redis", "embedded", "--store", str(folder / "service"))
    unit = worker_unit(name, options, grace_s=5)
    try:
        manager.install(unit, said.append)
        command = ["launchctl", "print", f"gui/{os.getuid()}/{name}"]
        loaded = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        if manager.path(name).exists():
            manager.uninstall(name, said.append)
    is_gone = subprocess.run(command, capture_output=True, check=False).returncode != 0
    return row | {"equal": loaded.returncode == 0 and is_gone, "found": "loaded and unloaded"}


# --- by name only ---


def wired(bench: Any, folder: Path) -> Iterator[Json]:
    """The engine's speed with its memory wired, in turn with it not wired."""
    import mlx.core as mx
    from exp_010_throughput import Engines, Load, compare, loads, measured

    limit = int(mx.device_info().get("max_recommended_working_set_size", 0))
    if not limit:
        yield {"what": "wired memory", "found": "this device has no recommended size"}
        return
    with closing(Engines(bench)) as engines:

        def with_limit(n_bytes: int, load: Load) -> list[list[int]]:
            mx.set_wired_limit(n_bytes)
            return engines.run(load)

        (load,) = loads(bench, random.Random(10), (8,), 96)
        compare(bench, load, {"bare": partial(with_limit, 0), "wired": partial(with_limit, limit)}, 5)
    mx.set_wired_limit(0)
    found = measured(load)
    yield {"what": f"memory wired / not wired, in speed: {load.name}", "ratio": found["wired_ratio"],
           "first": found["wired_tokens_per_s"], "second": found["bare_tokens_per_s"], "unit": "tokens/s",
           "equal": found["wired_same_text"]}  # fmt: skip


def sleep(bench: object, folder: Path) -> Iterator[Json]:
    """A worker without a model, before and after this Mac has slept."""
    with (
        EmbeddedServer(folder / "redis") as server,
        Producer(server.url) as producer,
        WorkerProcess(server.url, folder / "store", *SCRIPTED),
    ):

        def turn(n: int) -> int:
            asked = {"agent_id": "sleeper", "prompt": f"turn {n}", "context": "append", "max_tokens": 8}
            return producer.submit(**asked).result(timeout_s=_PATIENCE_S).cache.agent_version

        before = turn(1)
        subprocess.run(["pmset", "sleepnow"], check=True, capture_output=True)
        slept_s = _slept_s()
        begin = time.perf_counter()
        after = turn(2)
        took_s = time.perf_counter() - begin
    yield {"what": "an agent's turn after the Mac slept",
           "found": f"{slept_s:.0f} s of sleep; then {took_s:.1f} s", "equal": after == before + 1}  # fmt: skip


def _slept_s() -> float:
    """Wait until the wall clock has run ahead of this process."""
    last, end = time.time(), time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        note("waiting for this Mac to sleep and to be woken")
        time.sleep(1)
        now = time.time()
        if now - last > _SLEPT_S:
            return now - last
        last = now
    sys.exit("this Mac did not sleep")
