"""What the stages report is counted whole, and the rates of the last seconds come from it."""

import pytest

from stoker_worker.metrics import declared as of
from stoker_worker.metrics.live import LiveFigures
from stoker_worker.metrics.watch import Watch
from stoker_worker.ports import CompletedGeneration, SequenceProgress, SharedUse, WorkerState


def result(*, prompt=10, cached=4, generated=3, **cache):
    return {
        "finish_reason": "stop",
        "usage": {"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": generated},
        "cache": {"source": "disk", "miss_reason": None, "saved": True, "save_error": None, **cache},
        "timing": {"queued_s": 1.0, "prefill_s": 0.1, "first_token_s": 2.0, "decode_s": 0.5, "total_s": 400.0},
    }


@pytest.fixture
def watch():
    return Watch()


def counted(watch):
    snapshot = watch.metrics.jobs()
    return {(metric.name, *labels): value for (metric, labels), value in snapshot.counters.items() if value}


def test_a_result_is_counted_with_its_tokens_source_and_times(watch):
    watch.metrics.answered(result(), save_s=0.02)
    watch.metrics.answered(result(source="none", miss_reason="evicted", saved=False, save_error="full"))
    watch.metrics.answered(result(save_error="its cache is not saved: full"), replayed=True)
    assert counted(watch) == {
        ("stoker_jobs_ended_total", "finished"): 2,
        ("stoker_jobs_ended_total", "replayed"): 1,
        ("stoker_request_success_total", "stop"): 3,
        ("stoker_prompt_tokens_total",): 30,
        ("stoker_prefix_cache_hits_total",): 12,
        ("stoker_generation_tokens_total",): 9,
        ("stoker_cache_sources_total", "disk"): 2,
        ("stoker_cache_sources_total", "none"): 1,
        ("stoker_cache_misses_total", "evicted"): 1,
        ("stoker_results_unsaved_total",): 1,
    }
    histograms = watch.metrics.jobs().histograms
    saves, latencies = histograms[of.SAVE_TIME, ()], histograms[of.LATENCY, ()]
    assert (sum(saves.counts), saves.total) == (1, 0.02)
    assert latencies.counts[of.LATENCY.buckets.index(900.0)] == 3
    assert latencies.total == 1200


def test_other_ends_are_counted_by_kind(watch):
    watch.metrics.failed(TimeoutError("x"))
    watch.metrics.ended("given_back", 3)
    watch.metrics.recovered(2)
    assert counted(watch) == {
        ("stoker_jobs_ended_total", "failed"): 1,
        ("stoker_job_errors_total", "TimeoutError"): 1,
        ("stoker_jobs_ended_total", "given_back"): 3,
        ("stoker_jobs_recovered_total",): 2,
    }


def test_the_tokens_of_steps_are_counted_once_however_a_sequence_ends(watch):
    def step(running, *ended):
        progress = {uid: SequenceProgress("decode", tokens) for uid, tokens in running.items()}
        done = [CompletedGeneration(uid, "finished", generated_ids=(1,) * n) for uid, n in ended]
        watch.metrics.stepped(0.01, progress, done)

    step({1: 1, 2: 1})
    step({1: 2, 2: 4})  # a draft was right
    step({2: 5}, (1, 3))
    step({3: 1})  # 2 was canceled
    counters = watch.metrics.steps().counters
    assert counters[of.STEP_TOKENS, ()] == 2 + 4 + 2 + 1
    assert counters[of.STEP_SEQUENCES, ()] == 2 + 2 + 2 + 1


def test_rates_are_those_of_the_last_seconds_and_leave_out_idle_time(watch):
    clock = iter([0.0, 5.0, 10.0, 3600.0, 3605.0, 3610.0, 3630.0])
    live = LiveFigures(watch.metrics, watch.looking, clock=lambda: next(clock))

    def beat(n_jobs, tokens, in_flight):
        watch.looking.state = lambda: WorkerState(stages={"decode": in_flight})
        for _ in range(n_jobs):
            watch.metrics.answered(result())
        watch.metrics.stepped(0.01, {}, [CompletedGeneration(1, "finished", generated_ids=(1,) * tokens)])
        now = live.now()
        return now["jobs_per_min"], now["tokens_per_s"]

    assert beat(0, 0, 4) == (0, 0)
    assert beat(5, 100, 4) == (60, 20)
    assert beat(5, 300, 0) == (60, 40)
    assert beat(0, 0, 0) == (0, 0)  # nothing was in flight for an hour
    assert beat(1, 50, 4) == (12, 10)
    assert beat(1, 50, 4) == (12, 10)
    assert beat(4, 0, 4) == (12, 0)  # half a minute of jobs, ten seconds of tokens


def test_the_heartbeat_shows_the_shared_store_if_there_is_one(watch):
    assert watch.figures()["shared_store"] is None
    watch.looking.shared_store = lambda: SharedUse(away_s=1.26, written_bytes=1, read_bytes=2)
    assert watch.figures()["shared_store"] == {"away_s": 1.3}
