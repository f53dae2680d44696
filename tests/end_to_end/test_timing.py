"""The times in a result match its producer's clock, whatever the job waited for."""

import threading
import time
from collections.abc import Iterator

import pytest
from tests.worker.pipeline.stages import PlayedStore

from stoker import Producer
from stoker_worker.engine.scripted import ScriptedProvider
from stoker_worker.pipeline.worker import Worker
from stoker_worker.queue.rq_queue import open_queue
from stoker_worker.settings import read_settings

pytestmark = pytest.mark.server

STEP_S, SAVE_S = 0.5, 1.0
NEAR_S = 0.3  # 0.02 on an idle machine; the waits under test are longer


@pytest.fixture
def slow_worker(redis_url: str) -> Iterator[None]:
    """Its engine is slow at a step, and its disk at a save."""
    store = PlayedStore()
    store.before_write = lambda agent_id: time.sleep(SAVE_S)
    settings = read_settings({"redis_url": redis_url, "poll_s": 0.01, "grace_s": 0.0})
    with open_queue(settings, redis_url) as opened:
        worker = Worker(settings, opened.rq_queue, store, ScriptedProvider(max_batch=4, steps_per_s=1 / STEP_S))
        thread = threading.Thread(target=worker.run)
        thread.start()
        yield
        worker.request_stop()
        thread.join(30)
    PlayedStore.close_all()


@pytest.mark.usefixtures("slow_worker")
def test_the_times_include_the_waits_for_the_engine_and_the_save(redis_url: str) -> None:
    producer = Producer(redis_url)
    long = producer.submit(agent_id="long", prompt="x", max_tokens=100)
    while long.status().tokens in (None, 0):
        time.sleep(0.01)
    time.sleep(0.2)  # the engine is in the middle of a step
    began = time.time()
    ticket = producer.submit(agent_id="a", prompt="x", max_tokens=2)
    timing = ticket.result(timeout_s=30).timing
    took_s = time.time() - began
    print(f"client {took_s:.3f} s, {timing}")
    assert timing.total_s == pytest.approx(took_s, abs=NEAR_S)
    assert timing.total_s - timing.first_token_s - timing.decode_s == pytest.approx(SAVE_S, abs=NEAR_S)
    assert timing.queued_s + timing.prefill_s <= timing.first_token_s
