"""The reports of the stages are counted whole; the rates of the last seconds and minutes come from the counts."""

import logging

import pytest
from tests.worker.test_events import RESULT

from stoker_worker.metrics.counters import Costs, Metrics, Rates
from stoker_worker.metrics.watch import Watch
from stoker_worker.ports import CompletedGeneration, SequenceProgress, SharedUse, WorkerState


def result(*, prompt=10, cached=4, generated=3, **cache):
    return {
        "finish_reason": "stop",
        "usage": {"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": generated},
        "cache": {"source": "disk", "miss_reason": None, "saved": True, "save_error": None, **cache},
        "timing": {"queued_s": 1.0, "prefill_s": 0.1, "first_token_s": 2.0, "decode_s": 0.5, "total_s": 400.0},
    }


def counted(metrics):
    return {
        (sample.name.removeprefix("stoker_"), *sample.labels.values()): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.value
    }


def test_a_result_is_counted_with_its_tokens_source_and_times():
    metrics = Metrics()
    metrics.answered(result(), save_s=0.02)
    metrics.answered(result(source="none", miss_reason="evicted", saved=False, save_error="full"))
    metrics.answered(result(save_error="its cache is not saved: full"), replayed=True)
    found = counted(metrics)
    assert {key: value for key, value in found.items() if key[0].endswith("_total")} == {
        ("jobs_ended_total", "finished"): 2,
        ("jobs_ended_total", "replayed"): 1,
        ("request_success_total", "stop"): 3,
        ("prompt_tokens_total",): 30,
        ("prefix_cache_hits_total",): 12,
        ("generation_tokens_total",): 9,
        ("cache_sources_total", "disk"): 2,
        ("cache_sources_total", "none"): 1,
        ("cache_misses_total", "evicted"): 1,
        ("results_unsaved_total",): 1,
    }
    assert (found["save_time_seconds_count",], found["save_time_seconds_sum",]) == (1, 0.02)
    assert found["e2e_request_latency_seconds_sum",] == 1200
    assert ("e2e_request_latency_seconds_bucket", "300.0") not in found
    assert found["e2e_request_latency_seconds_bucket", "900.0"] == 3


def test_other_ends_are_counted_by_kind():
    metrics = Metrics()
    metrics.failed(TimeoutError("x"))
    metrics.ended("given_back", 3)
    metrics.recovered(2)
    assert counted(metrics) == {
        ("jobs_ended_total", "failed"): 1,
        ("job_errors_total", "TimeoutError"): 1,
        ("jobs_ended_total", "given_back"): 3,
        ("jobs_recovered_total",): 2,
    }


def test_the_tokens_of_steps_are_counted_once_however_a_sequence_ends():
    metrics = Metrics()

    def step(running, *ended):
        progress = {uid: SequenceProgress("decode", tokens) for uid, tokens in running.items()}
        done = [CompletedGeneration(uid, "finished", generated_ids=(1,) * n) for uid, n in ended]
        metrics.stepped(0.01, progress, done)

    step({1: 1, 2: 1})
    step({1: 2, 2: 4})  # a draft was right
    step({2: 5}, (1, 3))
    step({3: 1})  # 2 was canceled
    found = counted(metrics)
    assert found["step_tokens_total",] == 2 + 4 + 2 + 1
    assert found["step_sequences_total",] == 2 + 2 + 2 + 1


def test_rates_are_those_of_the_last_seconds_and_leave_out_idle_time():
    metrics, clock = Metrics(), iter([-1.0, 0.0, 5.0, 10.0, 3600.0, 3605.0, 3610.0, 3630.0])
    rates = Rates(metrics, clock=lambda: next(clock))

    def beat(n_jobs, tokens, in_flight):
        for _ in range(n_jobs):
            metrics.answered(result())
        metrics.stepped(0.01, {}, [CompletedGeneration(1, "finished", generated_ids=(1,) * tokens)])
        now = rates.now(WorkerState(stages={"decode": in_flight}))
        return now["jobs_per_min"], now["tokens_per_s"]

    assert beat(0, 0, 4) == (0, 0)
    assert beat(5, 100, 4) == (60, 20)
    assert beat(5, 300, 0) == (60, 40)
    assert beat(0, 0, 0) == (0, 0)  # nothing was in flight for an hour
    assert beat(1, 50, 4) == (12, 10)
    assert beat(1, 50, 4) == (12, 10)
    assert beat(4, 0, 4) == (12, 0)  # half a minute of jobs, ten seconds of tokens


def test_the_metric_of_tokens_per_second_needs_no_heartbeat():
    """None arrives while Redis is away; the batch goes on for a while."""
    metrics, now = Metrics(), [0.0]
    rates = Rates(metrics, clock=lambda: now[0])

    def generate(until: float, tokens: int) -> None:
        now[0] = until
        metrics.stepped(0.01, {}, [CompletedGeneration(1, "finished", generated_ids=(1,) * tokens)])

    for until in (0.0, 5.0, 10.0):
        generate(until, 100)
        rates.now(WorkerState(stages={"decode": 1}))
    assert rates.tokens_per_s() == 20
    generate(20.0, 1000)
    assert rates.tokens_per_s() == 20
    generate(50.0, 1000)
    assert rates.tokens_per_s() == 50
    now[0] = 36_000.0
    assert rates.tokens_per_s() < 0.1


def test_the_heartbeat_shows_the_shared_store_if_there_is_one():
    watch = Watch()
    assert watch.figures()["shared_store"] is None
    watch.shared_store = lambda: SharedUse(away_s=1.26, written_bytes=1, read_bytes=2)
    assert watch.figures()["shared_store"] == {"away_s": 1.3}


def test_a_minute_with_work_is_one_line_and_one_without_is_none(caplog):
    caplog.set_level(logging.INFO)
    now, metrics = [0.0], Metrics()
    rates = Rates(metrics, clock=lambda: now[0])

    def minute() -> list[str]:
        caplog.clear()
        for _ in range(4):
            now[0] += 15
            rates.now(WorkerState())
        return list(caplog.messages)

    assert minute() == []
    for _ in range(60):
        metrics.answered(RESULT)
    metrics.failed(ValueError())
    assert minute() == [
        "rates tokens_per_s=0.0 prompt_tokens_per_s=23.0 cached_share=0.3 finished=60 failed=1 in_flight=0"
    ]
    assert minute() == []


def test_costs_are_found_again_from_the_steps():
    costs = Costs()
    assert costs.figures() == {"prompt_token_s": None, "token_s": None}
    for _ in range(50):  # a prompt of 100 tokens at 1 ms, beside four rows at 5 ms; then nine steps of these
        costs.stepped(0.120, 4, has_prefill=True)
        costs.prefilled(100)
        for _ in range(9):
            costs.stepped(0.020, 4, has_prefill=False)
    assert costs.figures() == {"prompt_token_s": pytest.approx(0.001), "token_s": pytest.approx(0.005)}


def test_costs_follow_a_change():
    costs = Costs()
    for token_s in (0.01, 0.5):
        for _ in range(3000):
            costs.stepped(token_s, 1, has_prefill=False)
    assert (costs.figures()["token_s"] or 0.0) > 0.3
