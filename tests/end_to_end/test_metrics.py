"""The metrics of real workers are the sums of their results, over a kill; and a stuck engine is not ready."""

import re
import time
from collections import Counter
from urllib.request import urlopen

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.end_to_end.test_exactly_once import as_if_the_worker_died_after_saving
from tests.support.worker_process import running_worker

from stoker import JobFailed

pytestmark = pytest.mark.server

OPTIONS = ("--metrics-port", "0")


def url_of(worker):
    return re.search(r"http://127\.0\.0\.1:\d+/", worker.log)[0]


def scraped(worker):
    with urlopen(f"{url_of(worker)}metrics") as reply:
        families = text_string_to_metric_families(reply.read().decode())
        return Counter({(s.name, *s.labels.values()): s.value for family in families for s in family.samples})


def scraped_after(worker, **ends):
    """Once so many jobs have ended: a result is counted a moment after it was posted."""
    samples = Counter()

    def has_ended():
        samples.clear()
        samples.update(scraped(worker))
        return all(samples["stoker_jobs_ended_total", outcome] == n_jobs for outcome, n_jobs in ends.items())

    worker.wait_for(has_ended)
    return samples


def sums(results):
    found = Counter()
    for result in results:
        found["stoker_prompt_tokens_total",] += result.usage.prompt_tokens
        found["stoker_prefix_cache_hits_total",] += result.usage.cached_tokens
        found["stoker_generation_tokens_total",] += result.usage.completion_tokens
        found["stoker_request_success_total", result.finish_reason] += 1
        found["stoker_cache_sources_total", result.cache.source] += 1
        found["stoker_e2e_request_latency_seconds_count",] += 1
        found["stoker_time_to_first_token_seconds_sum",] += result.timing.first_token_s
    return found


def test_metrics_are_the_sums_of_the_results_over_a_kill(producer, redis_url, connection, store):
    with running_worker(redis_url, store, *OPTIONS) as worker:
        worker.wait_until_ready()
        tickets = [producer.submit(agent_id=f"a{n % 3}", prompt=f"turn {n}", context="append") for n in range(6)]
        with pytest.raises(JobFailed):
            producer.submit(prompt="fail on purpose").result(timeout_s=30)
        producer.results(tickets, timeout_s=30)
        before = scraped_after(worker, finished=6, failed=1)
        tickets.append(producer.submit(agent_id="a0", prompt="say more", context="append", max_tokens=10))
        tickets[-1].result(timeout_s=30)
        long = [producer.submit(agent_id=f"long{n}", prompt="x", max_tokens=300) for n in range(2)]
        worker.wait_for(lambda: all((ticket.status().tokens or 0) > 1 for ticket in long))
        worker.kill()
    as_if_the_worker_died_after_saving(connection, tickets[-1].job_id, expires_at=time.time() + 60)
    with running_worker(redis_url, store, *OPTIONS, log_name="second.log") as worker:
        results = producer.results([*tickets, *long], timeout_s=60)
        after = scraped_after(worker, finished=2, replayed=1)
    both = before + after
    expected = sums(results)
    assert {key: both[key] for key in expected} == pytest.approx(dict(expected))
    assert both["stoker_job_errors_total", "EngineFailed"] == 1
    assert after["stoker_jobs_recovered_total",] == 3
    assert after["stoker_step_tokens_total",] == 2 * 300  # what was answered from the history was not generated again


def test_a_worker_is_not_ready_while_a_step_hangs(producer, redis_url, store):
    slow = ("--scripted-steps-per-s", "0.5", "--stuck-after-s", "0.2", "--grace-s", "0")
    with running_worker(redis_url, store, *OPTIONS, *slow) as worker:
        worker.wait_until_ready()
        page = f"{url_of(worker)}readyz"
        assert httpx.get(page).status_code == 200
        producer.submit(prompt="x", max_tokens=5)
        worker.wait_for(lambda: httpx.get(page).text.startswith("the engine has been in one step"))
