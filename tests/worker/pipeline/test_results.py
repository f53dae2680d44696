"""A result's report of the used cache and of the elapsed time."""

import time

import pytest
from tests.in_memory.queue import InMemoryQueue
from tests.worker.pipeline.stages import MODEL, generated, loaded_job

from stoker_shared.result import CacheReport
from stoker_worker.pipeline.answer import read_answer
from stoker_worker.pipeline.results import build_result, cache_report
from stoker_worker.ports import GenerationTiming, Restored, RestoredPrefix


def report(restored: Restored, cached_tokens: int) -> CacheReport:
    job = loaded_job(InMemoryQueue(), "a")
    job.restored = restored
    return cache_report(job, generated(cached_tokens=cached_tokens).completion, agent_version=2, saved=True)


@pytest.mark.parametrize("source", ["disk", "memory"])
def test_a_used_cache_is_reported(source):
    found = report(Restored(RestoredPrefix(2, ()), source, miss_reason="block_missing"), 2)
    assert (found.source, found.miss_reason) == (source, "block_missing")


def test_a_cache_lost_in_a_failed_step_is_not_reported_as_used():
    found = report(Restored(RestoredPrefix(2, ()), "disk"), 0)
    assert (found.source, found.miss_reason) == ("none", "step_broke")


def test_the_wait_for_the_engine_counts_toward_the_first_token():
    """A loaded job waited for a second, because the engine was in a long step."""
    job = loaded_job(InMemoryQueue(), "a")
    enqueued_at = job.claimed.enqueued_at
    job.submitted_at = enqueued_at + 1.0
    done = generated(timing=GenerationTiming(waited_s=0.25, prefill_s=0.5, decode_s=0.125)).completion
    answer = read_answer(job.request, job.prompt, done, MODEL, "seed")
    timing = build_result(job, done, [answer], MODEL, CacheReport()).timing
    assert timing.first_token_s == pytest.approx(1.75, abs=1e-3)
    assert (timing.prefill_s, timing.decode_s) == (0.5, 0.125)
    assert timing.total_s <= time.time() - enqueued_at + 1e-3
