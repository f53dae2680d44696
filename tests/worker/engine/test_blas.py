"""Preloading OpenBLAS: in processes of their own, because loading is for good."""

import subprocess
import sys

import pytest

from stoker_worker.engine import blas


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_preloaded", [])


def needs_openblas() -> None:
    if sys.platform != "linux" or not any(blas._offers_blas(name) for name in blas._NAMES):
        pytest.skip("no OpenBLAS here")


def test_preloading_imports_no_mlx_takes_over_globally_and_may_be_repeated() -> None:
    needs_openblas()
    code = (
        "import ctypes, sys\n"
        "from stoker_worker.engine.blas import preload_openblas\n"
        "before = hasattr(ctypes.CDLL(None), 'cblas_sgemm')\n"
        "first, second = preload_openblas(), preload_openblas()\n"
        "print(before, hasattr(ctypes.CDLL(None), 'cblas_sgemm'), first == second, 'mlx' in sys.modules, first)"
    )
    assert run(code).startswith("False True True False libopenblas")


@pytest.mark.mlx
def test_preloading_after_mlx_says_so_instead_of_doing_nothing() -> None:
    needs_openblas()
    code = (
        "import mlx.core\n"
        "from stoker_worker.engine.blas import preload_openblas\n"
        "try: preload_openblas()\n"
        "except RuntimeError as error: print(error)"
    )
    assert "mlx was imported before" in run(code)


@pytest.mark.usefixtures("fresh")
def test_a_mac_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(blas, "_offers_blas", lambda name: pytest.fail("looked for a library"))
    assert blas.preload_openblas() is None
    assert blas.advice_without_openblas() is None


@pytest.mark.usefixtures("fresh")
def test_linux_without_the_library_gets_one_line_of_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(blas, "_NAMES", ("libno-such-blas.so.0", "libc.so.6"))
    assert blas.preload_openblas() is None
    advice = blas.advice_without_openblas()
    assert advice is not None
    assert "apt install libopenblas0-pthread" in advice
    assert "\n" not in advice


def test_a_library_without_plain_blas_names_is_not_taken() -> None:
    assert not blas._offers_blas("libc.so.6")
