"""A worker with a small budget: right answers, recent agents from RAM, and a store that stops growing.

The scripted engine fails a job whose restored cache does not fit its prompt.
"""

import pytest
from tests.support.worker_process import running_worker

from stoker import Producer

pytestmark = pytest.mark.server

WORDS = "a sentence of some length that fills a block. " * 24


def turns(producer, number):
    return [
        producer.submit(agent_id=f"agent {n}", context="append", prompt=f"{n} {number} {WORDS}", max_tokens=8)
        for n in range(8)
    ]


def results(tickets):
    return [ticket.result(timeout_s=60) for ticket in tickets]


def cache_bytes(store):
    return sum(path.stat().st_blocks * 512 for path in store.rglob("*.safetensors"))


def test_the_second_turn_comes_from_ram_and_after_a_restart_from_disk(redis_url, tmp_path):
    producer, store = Producer(redis_url), tmp_path / "store"
    with running_worker(redis_url, store):
        first = results(turns(producer, 1))
        second = results(turns(producer, 2))
    with running_worker(redis_url, store, "--memory-max-bytes", "0"):
        third = results(turns(producer, 3))
        fourth = results(turns(producer, 4))
    assert [{result.cache.source for result in round} for round in (first, second, third, fourth)] == [
        {"none"},
        {"memory"},
        {"disk"},
        {"disk"},
    ]
    for before, after in ((first, second), (second, third), (third, fourth)):
        for one, two in zip(before, after, strict=True):
            assert two.usage.cached_tokens == one.usage.prompt_tokens + one.usage.completion_tokens
