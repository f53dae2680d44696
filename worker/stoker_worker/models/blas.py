"""A fast BLAS for MLX on a CPU. Owns the preloading; imports no MLX. Main thread, before anything imports mlx.

The Linux wheel of MLX links the reference BLAS. The dynamic linker takes a symbol from the first library that offers it
globally, so a BLAS loaded before MLX takes over its float32 matrix products, about thirty times as fast (1,024 x 1,024
on two cores: 5 GFLOP/s alone, 155 with MKL, 282 with OpenBLAS). After MLX is loaded, preloading changes nothing.

``python -m stoker_worker.models.blas`` prints the library that would be loaded, and exits with 1 if there is none.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ADVICE: Final = (
    "float32 matrix products run about 30 times as fast with a BLAS: apt install libopenblas0-pthread, or "
    "pip install --no-deps mkl (0.7 GB, not open source)"
)

_OPENBLAS: Final = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblaso.so.0", "libopenblas.so")
"""Debian's name, Fedora's for threads and for OpenMP, and that of a build from source. Only libraries with 32-bit
indices and plain symbol names help: MLX never asks for names with a prefix or a suffix (``libopenblas64_``)."""

_MKL: Final = "libmkl_rt.so.*"
"""In the `mkl` wheel, which unpacks into the environment's ``lib``."""

_NEEDED_SYMBOL: Final = "cblas_sgemm"

_preloaded: list[str] = []


def find_blas() -> str | None:
    """The library for `preload_blas`: the system's OpenBLAS, else MKL in this environment, else ``None``. Always
    ``None`` outside Linux: macOS has Accelerate."""
    if sys.platform != "linux":
        return None
    return next((library for library in _candidates() if _offers_blas(library)), None)


def preload_blas() -> str | None:
    """Load the library that `find_blas` finds, so that MLX uses it. May be called again; the first success counts.

    Returns:
        The library's name without a folder; ``None`` if there is none (see `advice_without_blas`).

    Raises:
        RuntimeError: there is one, but MLX was imported before.
    """
    if _preloaded:
        return _preloaded[0]
    library = find_blas()
    if library is None:
        return None
    name = os.path.basename(library)
    if "mlx.core" in sys.modules:
        raise RuntimeError(f"mlx was imported before {name} could be preloaded: call preload_blas() first")
    if library not in _OPENBLAS:
        # MKL's other layers need an OpenMP or TBB library: without one, the first product ends the process.
        os.environ.setdefault("MKL_THREADING_LAYER", "SEQUENTIAL")
    ctypes.CDLL(library, mode=os.RTLD_GLOBAL)
    _preloaded.append(name)
    return name


def advice_without_blas() -> str | None:
    """One line for the operator if `preload_blas` returned ``None``; ``None`` if no library would help."""
    return ADVICE if sys.platform == "linux" and not _preloaded else None


def _candidates() -> Iterator[str]:
    yield from _OPENBLAS
    yield from map(str, sorted(Path(sys.prefix, "lib").glob(_MKL)))


def _offers_blas(library: str) -> bool:
    """True if the library exists and exports MLX's symbols. Loads it privately, so it takes over nothing yet."""
    try:
        return hasattr(ctypes.CDLL(library, mode=os.RTLD_LOCAL), _NEEDED_SYMBOL)
    except OSError:
        return False


if __name__ == "__main__":
    found = find_blas()
    print(found or "no BLAS library found")
    sys.exit(0 if found else 1)
