"""Preloading a BLAS, in separate processes, because a loaded library stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker_worker.models import blas

OPENBLAS = "libopenblas.so.0"
NO_BLAS = "libc.so.6"  # it exists, but exports no matrix product


def run(code: str, *, ending: int = 0) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == ending, done.stderr
    return done.stdout.strip()


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A Linux machine without BLAS; returns the environment's library folder."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(blas, "_preloaded", [])
    monkeypatch.setattr(blas, "_OPENBLAS", ("libno-such-blas.so.0", NO_BLAS))
    (tmp_path / "lib").mkdir()
    return tmp_path / "lib"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """The globally loaded libraries, each with MKL's setting at that moment."""
    found: list[tuple[str, str | None]] = []

    def load(name: str, mode: int) -> object:
        if mode == os.RTLD_GLOBAL:
            found.append((name, os.environ.get("MKL_THREADING_LAYER")))
        elif not Path(name).exists() and name not in (NO_BLAS, OPENBLAS):
            raise OSError(name)
        return type("Library", (), {} if name == NO_BLAS else {"cblas_sgemm": None})

    monkeypatch.setattr("stoker_worker.models.blas.ctypes.CDLL", load)
    monkeypatch.setattr(sys, "modules", {name: it for name, it in sys.modules.items() if name != "mlx.core"})
    monkeypatch.setenv("MKL_THREADING_LAYER", "")  # so that it is unset again after the test
    monkeypatch.delenv("MKL_THREADING_LAYER")
    return found


def needs_blas() -> None:
    if blas.find_blas() is None:
        pytest.skip("no BLAS library here")


def test_preloading_imports_no_mlx_takes_over_globally_and_may_be_repeated() -> None:
    needs_blas()
    code = (
        "import ctypes, sys\n"
        "from stoker_worker.models.blas import preload_blas\n"
        "before = hasattr(ctypes.CDLL(None), 'cblas_sgemm')\n"
        "first, second = preload_blas(), preload_blas()\n"
        "print(before, hasattr(ctypes.CDLL(None), 'cblas_sgemm'), first == second, 'mlx' in sys.modules, first)"
    )
    assert run(code).startswith("False True True False lib")


@pytest.mark.mlx
def test_preloading_after_mlx_is_an_error_instead_of_no_effect() -> None:
    needs_blas()
    code = (
        "import mlx.core\n"
        "from stoker_worker.models.blas import preload_blas\n"
        "try: preload_blas()\n"
        "except RuntimeError as error: print(error)"
    )
    assert "mlx was imported before" in run(code)


def test_a_mac_needs_nothing(linux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(blas, "_offers_blas", lambda name: pytest.fail("looked for a library"))
    assert blas.preload_blas() is None
    assert blas.advice_without_blas() is None


@pytest.mark.usefixtures("linux")
def test_linux_without_a_library_gets_one_line_with_both_ways_to_one() -> None:
    assert blas.preload_blas() is None
    advice = blas.advice_without_blas()
    assert advice is not None
    assert "apt install libopenblas0-pthread" in advice
    assert "pip install --no-deps mkl" in advice
    assert "\n" not in advice


@pytest.mark.parametrize("own", [None, "TBB"])
def test_mkl_of_the_environment_is_taken_where_there_is_no_openblas(
    linux: Path, loads: list[tuple[str, str | None]], own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the calling thread: MKL's other layers end the process at the first product if their library is missing. An
    operator's own setting is kept."""
    if own:
        monkeypatch.setenv("MKL_THREADING_LAYER", own)
    (linux / "libmkl_rt.so.3").touch()
    assert blas.preload_blas() == "libmkl_rt.so.3"
    assert loads == [(str(linux / "libmkl_rt.so.3"), own or "SEQUENTIAL")]
    assert blas.advice_without_blas() is None


def test_openblas_is_taken_before_mkl(
    linux: Path, loads: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (linux / "libmkl_rt.so.3").touch()
    monkeypatch.setattr(blas, "_OPENBLAS", (NO_BLAS, OPENBLAS))
    assert blas.preload_blas() == OPENBLAS
    assert loads == [(OPENBLAS, None)]
