"""What Prometheus and a health check see: every metric by its declared name, and why a worker is not ready."""

import time
from urllib.error import HTTPError
from urllib.request import urlopen

import httpx
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from stoker_shared.errors import RedisUnavailable
from stoker_worker.cli.main import main
from stoker_worker.metrics.declared import DECLARED, REDIS_SERVER
from stoker_worker.metrics.exposition import exposition
from stoker_worker.metrics.http_server import MetricsServer, Pages
from stoker_worker.metrics.looking import Look, Looking
from stoker_worker.metrics.watch import Watch
from stoker_worker.ports import DataLoss, QueueDepth, RedisUse, Serving, SharedUse, StoreUse, WorkerState

SERVING = Serving("m", 4096, "in rows", 8, "given")
STORE = StoreUse(100, 1000, 2**30, 2**31, 10, 50, SharedUse(0.0, 7, 8))
WAITING = QueueDepth("generate", 3, 1.5)
REDIS = RedisUse({"misspelt": 2}, {metric.name.removeprefix("stoker_"): 1.0 for metric in REDIS_SERVER})


class KV:
    total, used, preemptions = 8, 6, 2


def state(**fields):
    return WorkerState(**{"serving": SERVING, "stages": {"decode": 2, "prefill": 1}, "kv": KV(), **fields})


def parsed(watch, look):
    text = exposition(watch.metrics, watch.live, look, is_ready=True).decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_declared_metric_is_shown_once_there_is_something_to_show():
    watch = Watch()
    watch.metrics.failed(ValueError())
    watch.metrics.answered({"cache": {"miss_reason": "evicted"}})
    samples = parsed(watch, Look(state(), STORE, [WAITING], REDIS))
    names = {name for name, *_ in samples}
    declared = {f"{metric.name}_bucket" if metric.kind == "histogram" else metric.name for metric in DECLARED}
    assert declared <= names
    extra = {name.removesuffix("_sum").removesuffix("_count").removesuffix("_bucket") for name in names - declared}
    assert extra <= {metric.name for metric in DECLARED if metric.kind == "histogram"}
    assert samples["stoker_num_requests_running",] == 3
    assert samples["stoker_batch_occupancy_ratio",] == 3 / 8
    assert samples["stoker_num_requests_waiting", "generate"] == 3
    assert samples["stoker_kv_cache_usage_perc",] == 0.75
    assert samples["stoker_e2e_request_latency_seconds_bucket", "+Inf"] == 1


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
    looking = Looking()
    assert not looking.now().is_standing_by
    looking.is_standby = True
    assert parsed(Watch(), looking.now())["stoker_standby",] == 1
    looking.queues = lambda: [WAITING]
    assert parsed(Watch(), looking.now())["stoker_standby",] == 0


def test_the_start_is_that_of_the_worker():
    before = time.time()
    started = parsed(Watch(), Looking().now())["process_start_time_seconds",]
    assert before <= started <= time.time()


def test_free_bytes_are_at_most_5_s_old(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("stoker_worker.metrics.looking.time.monotonic", lambda: now[0])
    looking, free = Looking(), iter([5, 4, 3])
    looking.store = lambda: StoreUse(1, 2, next(free), 9, 0, 0)
    seen = [looking.now().store.disk_free_bytes for now[0] in (100.0, 104.9, 105.0, 109.9, 110.0)]
    assert seen == [5, 5, 4, 4, 3]


def test_redis_is_asked_for_its_figures_only_while_it_answers():
    def refuse():
        raise RedisUnavailable("Redis is away")

    looking = Looking()
    looking.queues, looking.redis = list, lambda: REDIS
    assert looking.now().redis is REDIS
    looking.queues = refuse
    assert looking.now().redis is None
    looking.queues, looking.redis = list, refuse
    assert looking.now().redis is None


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
        (
            Look(state(data_loss=DataLoss(2, 7, 3.2)), STORE, [WAITING]),
            ["Redis lost data 3 s ago"],
        ),
        (Look(state(data_loss=DataLoss(2, 7, 181.0)), STORE, [WAITING]), []),
    ],
)
def test_a_worker_is_ready_unless_there_is_a_reason_against_it(look, said):
    obstacles = look.obstacles(stuck_after_s=60)
    assert len(obstacles) == len(said)
    assert all(words in obstacle for words, obstacle in zip(said, obstacles, strict=True))


@pytest.fixture
def server():
    watch = Watch()
    server = MetricsServer(0, Pages(watch.metrics, watch.live, watch.looking, stuck_after_s=60).answer)
    yield server
    server.close()


def test_the_process_is_healthy_before_it_is_ready(server):
    url = f"http://127.0.0.1:{server.port}"
    with urlopen(f"{url}/healthz") as reply:
        assert reply.status == 200
    with pytest.raises(HTTPError) as not_ready:
        urlopen(f"{url}/readyz")
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
    assert httpx.get(f"http://127.0.0.1:{server.port}/healthz", headers={"Host": host}).status_code == status


def test_the_command_prints_what_the_worker_serves(server):
    run = CliRunner().invoke(main, ["metrics", "--once", "--metrics-port", str(server.port)])
    assert run.exit_code == 0
    assert "stoker_ready 0.0" in run.output


def test_the_command_names_a_port_without_a_worker(server):
    server.close()
    run = CliRunner().invoke(main, ["metrics", "--once", "--metrics-port", str(server.port)])
    assert run.exit_code == 1
    assert f"no worker with metrics at http://127.0.0.1:{server.port}/metrics" in run.output
