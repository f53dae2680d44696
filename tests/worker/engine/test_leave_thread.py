"""A process whose MLX thread has ended exits with its own exit code."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

PROCESS = """
import threading
from stoker_worker.engine.provider import MlxProvider
from stoker_worker.settings import WorkerSettings

def work():
    import mlx.core as mx
    with mx.stream(mx.new_thread_local_stream(mx.default_device())):
        mx.eval(mx.random.normal((64, 64)) @ mx.ones((64, 64)))
    MlxProvider(WorkerSettings()).leave_thread()

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def test_mlx_does_not_abort_the_process_on_its_way_out():
    """Without `leave_thread` about one of three exits is an abort, so the test runs several."""
    exits = [subprocess.run([sys.executable, "-c", PROCESS], check=False).returncode for _ in range(6)]
    assert exits == [0] * 6
