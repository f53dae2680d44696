"""A fast BLAS for MLX on a CPU. Owns the preloading; imports no MLX. Main thread, before anything imports mlx.

The Linux wheel of MLX links the reference BLAS. The dynamic linker gives a symbol to the first library that offers it
globally, so an OpenBLAS loaded before MLX takes over its float32 matrix products, which are then about thirty times
as fast. Once MLX is loaded its symbols are bound, and preloading changes nothing.
"""

import ctypes
import os
import sys
from typing import Final

ADVICE: Final = "float32 matrix products run about 30 times as fast with OpenBLAS: apt install libopenblas0-pthread"
"""One line for the operator, for when `preload_openblas` found none on Linux."""

_NAMES: Final = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblaso.so.0", "libopenblas.so")
"""Debian's name, Fedora's for threads and for OpenMP, and the one of a build from source. Only libraries with 32-bit
indices and plain symbol names help: those with a suffix or a prefix (``libopenblas64_``) are never asked by MLX."""

_NEEDED_SYMBOL: Final = "cblas_sgemm"

_preloaded: list[str] = []


def preload_openblas() -> str | None:
    """Load OpenBLAS so that MLX will use it. May be called again; the first success counts.

    Returns:
        The name of the library that was loaded; ``None`` when there is none, and on anything but Linux (macOS has
        Accelerate). On Linux, `ADVICE` then says what to do.

    Raises:
        RuntimeError: there is one, but MLX is loaded already: the caller imports in the wrong order.
    """
    if _preloaded:
        return _preloaded[0]
    if sys.platform != "linux":
        return None
    name = next((name for name in _NAMES if _offers_blas(name)), None)
    if name is None:
        return None
    if "mlx.core" in sys.modules:
        raise RuntimeError(f"mlx was imported before {name} could be preloaded: call preload_openblas() first")
    ctypes.CDLL(name, mode=os.RTLD_GLOBAL)
    _preloaded.append(name)
    return name


def advice_without_openblas() -> str | None:
    """What to tell the operator when `preload_openblas` returned ``None``; nothing where it would not help."""
    return ADVICE if sys.platform == "linux" and not _preloaded else None


def _offers_blas(name: str) -> bool:
    """Whether the library exists and exports what MLX asks for. Loads it privately: nothing is taken over yet."""
    try:
        return hasattr(ctypes.CDLL(name, mode=os.RTLD_LOCAL), _NEEDED_SYMBOL)
    except OSError:
        return False
