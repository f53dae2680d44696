"""What Prometheus and a health check see: every metric by its documented name, and why a worker is not ready."""

import json
import re
import time
from collections import defaultdict
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from stoker_shared.errors import RedisUnavailable
from stoker_worker.metrics.watch import Look, Watch, exposition
from stoker_worker.ports import DataLoss, QueueDepth, Serving, SharedUse, StoreUse, WorkerState

ROOT = Path(__file__).resolve().parents[3]
DOCKER, PAGE = ROOT / "docker", ROOT / "docs" / "metrics.md"

SERVING = Serving("m", 4096, "in rows", 8, "given")
STORE = StoreUse(100, 1000, 2**30, 2**31, 10, 50)
SHARED = SharedUse(0.0, 7, 8)
WAITING = QueueDepth("generate", 3, 1.5)


class KV:
    total, used, preemptions = 8, 6, 2


def state(**fields):
    return WorkerState(**{"serving": SERVING, "stages": {"decode": 2, "prefill": 1}, "kv": KV(), **fields})


def families(watch, look):
    text = exposition(watch.metrics, look, tokens_per_s=1.0, is_ready=True).decode()
    return list(text_string_to_metric_families(text))


def parsed(watch, look):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families(watch, look)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def everything():
    """Each metric, once there is something to show of it."""
    watch = Watch()
    watch.metrics.failed(ValueError())
    watch.metrics.answered({"cache": {"miss_reason": "evicted"}})
    return families(watch, Look(state(), STORE, [WAITING], shared=SHARED))


def test_the_figures_of_a_worker_are_shown():
    watch = Watch()
    watch.metrics.answered({})
    samples = parsed(watch, Look(state(), STORE, [WAITING], shared=SHARED))
    assert samples["stoker_num_requests_running",] == 3
    assert samples["stoker_batch_occupancy_ratio",] == 3 / 8
    assert samples["stoker_num_requests_waiting", "generate"] == 3
    assert samples["stoker_kv_cache_usage_perc",] == 0.75
    assert samples["stoker_e2e_request_latency_seconds_bucket", "+Inf"] == 1


def test_the_page_has_each_metric_with_its_kind_and_meaning(everything):
    """Alerts of users have these names: one that changes or goes is a line in the changelog."""
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith(("| `stoker_", "| `process_"))]
    documented = [(name.strip(" `"), kind.strip(), text.strip()) for _, name, kind, _, text, _ in rows]
    suffix = {"counter": "_total"}
    assert sorted(documented) == sorted(
        (family.name + suffix.get(family.type, ""), family.type, family.documentation) for family in everything
    )


def expressions():
    panels = json.loads((DOCKER / "grafana" / "stoker.json").read_text())["panels"]
    yield from (target["expr"] for panel in panels for target in panel["targets"])
    groups = yaml.safe_load((DOCKER / "alerts.yaml").read_text())["groups"]
    yield from (rule["expr"] for group in groups for rule in group["rules"])


def test_the_dashboard_and_the_alerts_use_metrics_and_labels_that_exist(everything):
    labels = defaultdict(lambda: defaultdict(set))
    for sample in (sample for family in everything for sample in family.samples):
        for label, value in (sample.labels | {"instance": ""}).items():
            labels[sample.name][label].add(value)
    for expression in expressions():
        if 'job="stoker-redis"' in expression:  # redis_exporter's
            continue
        used = re.findall(r"((?:stoker|process)_\w+)(?:\{(.*?)\})?", expression)
        assert used, expression
        for name, matchers in used:
            assert name in labels, expression
            for label, values in re.findall(r"(\w+)[=!]~?\"(.*?)\"", matchers):
                assert label in labels[name], expression
                is_known = label in ("outcome", "error")  # each value is shown from the start
                assert not is_known or set(values.split("|")) <= labels[name][label], expression


def test_lost_data_and_a_suspension_are_counted_from_zero():
    def values(**fields):
        samples = parsed(Watch(), Look(state(**fields), STORE, [WAITING]))
        names = ("redis_data_lost_total", "redis_data_lost_jobs_total", "suspended")
        return [samples[f"stoker_{name}",] for name in names]

    assert values() == [0, 0, 0]
    assert values(data_loss=DataLoss(2, 7, 1e6), is_suspended=True) == [2, 7, 1]


def test_a_worker_that_has_not_got_far_shows_only_what_is_known():
    samples = parsed(Watch(), Look(WorkerState(), None, None))
    assert samples["stoker_redis_up",] == 0
    assert not {"stoker_store_bytes", "stoker_model_info"} & {name for name, *_ in samples}


def test_a_standby_is_shown_as_one_until_it_holds_its_queues():
    watch = Watch()
    assert not watch.look().is_standing_by
    watch.is_standby = True
    assert parsed(watch, watch.look())["stoker_standby",] == 1
    watch.queues = lambda: [WAITING]
    assert parsed(watch, watch.look())["stoker_standby",] == 0


def test_the_start_is_that_of_the_worker():
    before = time.time()
    started = parsed(Watch(), Watch().look())["process_start_time_seconds",]
    assert before <= started <= time.time()


def test_free_bytes_are_at_most_5_s_old(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("stoker_worker.metrics.watch.time.monotonic", lambda: now[0])
    watch, free = Watch(), iter([5, 4, 3])
    watch.store = lambda: StoreUse(1, 2, next(free), 9, 0, 0)
    seen = [watch.look().store.disk_free_bytes for now[0] in (100.0, 104.9, 105.0, 109.9, 110.0)]
    assert seen == [5, 5, 4, 4, 3]


@pytest.mark.parametrize(
    ("look", "said"),
    [
        (Look(state(), STORE, [WAITING]), []),
        (Look(WorkerState(), None, None), ["does not hold its queues", "not loaded"]),
        (Look(state(), STORE, RedisUnavailable("Redis is away")), ["Redis is away"]),
        (Look(state(redis_away_s=3), STORE, [WAITING]), ["no heartbeat"]),
        (Look(state(), PermissionError("no rights"), [WAITING]), ["no rights"]),
        (Look(state(), StoreUse(1, 2, 0, 9, 0, 0), [WAITING]), ["disk is full"]),
        (Look(state(), STORE, [WAITING], shared=SharedUse(12.3, 0, 0)), ["shared store has not answered for 12 s"]),
        (Look(state(), STORE, [WAITING], shared=SharedUse(0.0, 0, 0)), []),
        (Look(state(step_age_s=61), STORE, [WAITING]), ["one step for 61 s"]),
        (Look(state(data_loss=DataLoss(2, 7, 3.2)), STORE, [WAITING]), ["Redis lost data 3 s ago"]),
        (Look(state(data_loss=DataLoss(2, 7, 181.0)), STORE, [WAITING]), []),
    ],
)
def test_a_worker_is_ready_unless_there_is_a_reason_against_it(look, said):
    obstacles = look.obstacles(stuck_after_s=60)
    assert len(obstacles) == len(said)
    assert all(words in obstacle for words, obstacle in zip(said, obstacles, strict=True))


@pytest.fixture
def server():
    with Watch().served(0, stuck_after_s=60) as port:
        yield f"http://127.0.0.1:{port}"


def test_the_process_is_healthy_before_it_is_ready(server):
    with urlopen(f"{server}/healthz") as reply:
        assert reply.status == 200
    with pytest.raises(HTTPError) as not_ready:
        urlopen(f"{server}/readyz")
    assert (not_ready.value.code, b"model is not loaded" in not_ready.value.read()) == (503, True)
    not_ready.value.close()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9410", 200),
        ("[::1]:9410", 200),
        ("localhost", 200),
        ("host.docker.internal:9410", 200),
        ("worker:9411", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:9410", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
def test_a_name_that_a_web_site_can_have_is_refused(server, host, status):
    assert httpx.get(f"{server}/healthz", headers={"Host": host}).status_code == status
