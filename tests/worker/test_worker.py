"""The life of the process: what it says when it ends before it has begun."""

import threading

import pytest

from stoker_shared.errors import QueueHeld
from stoker_worker.settings import read_settings
from stoker_worker.worker import Worker


class TakenOverQueue:
    """A queue whose lease another worker has taken by the first heartbeat."""

    def recover(self):
        return 0

    def beat(self):
        return False


class SlowProvider:
    """A model that loads for as long as the test lasts."""

    def __init__(self):
        self.release = threading.Event()

    def load(self):
        self.release.wait(30)
        raise RuntimeError("not loaded")

    def leave_thread(self):
        pass


def test_a_worker_deposed_while_its_model_loads_says_so():
    provider = SlowProvider()
    settings = read_settings({"heartbeat_s": 0.05, "lease_ttl_s": 1.0})
    worker = Worker(settings, TakenOverQueue(), None, provider, burst=False)
    try:
        with pytest.raises(QueueHeld, match="taken over"):
            worker.run()
    finally:
        provider.release.set()
