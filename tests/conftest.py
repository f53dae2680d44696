"""Fixtures for every test. A BLAS library is preloaded here, because it must come before the first import of MLX."""

import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:  # the processes share the cores, and OpenBLAS's threads would spin for them
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

os.environ["STOKER_CONFIG"] = ""  # whoever runs the tests may have a file of settings

from stoker_worker.models.blas import preload_blas

BLAS = preload_blas()
HAS_FAST_BLAS = BLAS is not None or sys.platform != "linux"

from tests.support.model_fixture import smollm2  # noqa: E402, F401
from tests.support.node_fixture import node_folder  # noqa: E402, F401
from tests.support.real_model import real_model  # noqa: E402, F401
from tests.support.server_fixture import redis_server, redis_url, server_version  # noqa: E402, F401
from tests.support.small_disk import small_disk  # noqa: E402, F401

# A busy machine is no fault of the code: no example has a deadline, and none is generated too slowly.
settings.register_profile("stoker", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("stoker")

OF_A_WORKER = ("commands", "engine", "fetcher", "finisher", "heartbeat", "loader", "recovery")


def pytest_report_header() -> list[str]:
    slow = "only MLX's own, which is slow: tests marked `fast_blas` are skipped"
    return [f"BLAS: {(BLAS or 'Accelerate') if HAS_FAST_BLAS else slow}", f"server: {server_version()}"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not HAS_FAST_BLAS and item.get_closest_marker("fast_blas"):
        pytest.skip("no OpenBLAS or MKL here: would take many minutes")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """A worker's thread that outlives its test writes into the log of a later test, which then fails."""
    before = set(threading.enumerate())
    yield
    end = time.monotonic() + 5
    while left := [t.name for t in threading.enumerate() if t not in before and t.name.startswith(OF_A_WORKER)]:
        assert time.monotonic() < end, f"left running: {left}"
        time.sleep(0.01)
