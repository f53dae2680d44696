"""Checks of MLX's device: BLAS, Metal and its memory limits. The only file here that imports MLX, after the BLAS."""

import os
import subprocess
import sys
from collections.abc import Iterator

from stoker_worker.doctor.check import Check, Finding, ok, warn
from stoker_worker.models.blas import advice_without_blas, preload_blas


def checks() -> Iterator[Check]:
    yield Check("blas", blas)
    yield Check("device", device)
    yield Check("wired memory", wired_memory)


def blas() -> Finding:
    name = preload_blas()
    if advice := advice_without_blas():
        return warn("MLX's own BLAS, which is slow", advice, blas="MLX's own")
    name = name or "Accelerate"
    return ok(name, blas=name)


def device() -> Finding:
    import mlx.core as mx

    name = mx.default_device().type.name
    info = {key: value for key, value in mx.device_info().items() if isinstance(value, str | int | float)}
    figures = {"device": name, "metal": mx.metal.is_available(), **info}
    shown = info.get("device_name", info.get("architecture", ""))
    if is_metal():
        return ok(f"Metal: {shown}", **figures)
    if sys.platform == "darwin":
        return warn("CPU, on a Mac", "Metal is not available to this Python: run it outside of containers", **figures)
    return ok(f"{name}{f': {shown}' if shown else ''}; figures from here say nothing about a Mac", **figures)


def wired_memory() -> Finding:
    """How much memory the GPU may hold: beyond it a Mac swaps, or ends the process."""
    import mlx.core as mx

    if not is_metal():
        return ok("not applicable without Metal")
    info = mx.device_info()
    size, working_set = int(info["memory_size"]), int(info["max_recommended_working_set_size"])
    limit_mb = _wired_limit_mb()
    set_by = f"set to {limit_mb} MB" if limit_mb else "the system's default"
    line = f"{working_set / 2**30:.1f} of {size / 2**30:.1f} GB for the GPU ({set_by})"
    return ok(line, working_set_bytes=working_set, memory_bytes=size, wired_limit_mb=limit_mb)


def _wired_limit_mb() -> int:
    """What the owner of the Mac set; 0: nothing."""
    command = ["sysctl", "-n", "iogpu.wired_limit_mb"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.strip()
    return int(found) if found.isdecimal() else 0


def is_metal() -> bool:
    import mlx.core as mx

    return bool(mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu))


def memory_for_models() -> int:
    """Bytes that weights and caches may take together: the GPU's working set, or the RAM."""
    import mlx.core as mx

    if is_metal():
        return int(mx.device_info()["max_recommended_working_set_size"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_in_use() -> int:
    """Bytes of MLX's arrays: after a model is loaded, those of its weights."""
    import mlx.core as mx

    return mx.get_active_memory()
