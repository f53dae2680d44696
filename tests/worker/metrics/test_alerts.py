"""Each alert fires for what it is for, ends once that is mended, and a healthy fleet fires none: by promtool."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ALERTS = Path(__file__).resolve().parents[3] / "docker" / "alerts.yaml"
NAMES = [rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]

GB = 10**9


def always(value, n=240):
    """So many samples, one for each half minute."""
    return f"{value}+0x{n - 1}"


def worker(instance="a", **series):
    """The series of one healthy worker, by their names without the target's labels; or with these values instead."""
    stable = {"ready": 1, "standby": 0, "build_info": 1, "redis_up": 1} | {
        "num_requests_waiting": 0,
        "store_free_bytes": 900 * GB,
        "store_disk_bytes": 1000 * GB,
        "store_bytes": 10 * GB,
        'jobs_ended_total{outcome="failed"}': 0,
        "results_unsaved_total": 0,
    }
    target = f'job="stoker",instance="{instance}"'
    started = series.pop("started", always(0))
    values = {f"stoker_{name}": text for name, text in ({n: always(v) for n, v in stable.items()} | series).items()}
    values |= {"up": always(1), "process_start_time_seconds": started}
    return {
        f"{name.removesuffix('}')},{target}}}" if "{" in name else f"{name}{{{target}}}": text
        for name, text in values.items()
    }


def server(**series):
    """A healthy Redis server and its worker, by redis_exporter; or with these values instead."""
    stable = {"up": 1, "aof_enabled": 1, "aof_last_write_status": 1, "rdb_last_bgsave_status": 1} | {
        "memory_max_bytes": 0,
        "memory_used_bytes": 10**6,
    }
    values = {name: always(value) for name, value in stable.items()} | series
    return worker() | {f'redis_{name}{{job="stoker-redis",instance="queue"}}': text for name, text in values.items()}


def of_another_server(series):
    """The same worker, of another Redis server."""
    return {name.replace('job="stoker"', 'job="another"'): text for name, text in series.items()}


def gone_after(n, instance="b"):
    """A worker that was scraped `n` times and then ended: its target is down, its series are stale."""
    ended = {name: f"{text.partition('+')[0]}+0x{n - 1} stale" for name, text in worker(instance).items()}
    return ended | {f'up{{job="stoker",instance="{instance}"}}': f"{always(1, n)} {always(0)}"}


def restarting(every, n, *, then=240):
    """Starts anew at each `every`th sample, `n` times, and then runs on."""
    runs = [f"{30 * every * run}+0x{every - 1}" for run in range(n)]
    return " ".join([*runs, f"{30 * every * n}+0x{then}"])


FAILED = 'jobs_ended_total{outcome="failed"}'
FINISHED = 'jobs_ended_total{outcome="finished"}'

SCENARIOS = {
    "a healthy fleet": (server() | worker("b"), {"1m": "", "30m": "", "60m": ""}),
    "a target that never was a worker": (
        worker() | {'up{job="stoker",instance="b"}': always(0), 'up{job="node",instance="c"}': always(0)},
        {"30m": ""},
    ),
    "not ready, then ready": (
        worker(ready=f"{always(0, 20)} {always(1)}"),
        {"4m": "", "6m": "StokerNotReady", "11m": ""},
    ),
    "a standby of a ready worker": (worker() | worker("b", ready=always(0), standby=always(1)), {"6m": "", "60m": ""}),
    "a standby whose holder is not ready": (
        worker(ready=always(0)) | worker("b", ready=always(0), standby=always(1)),
        {"6m": "StokerNotReady"},
    ),
    "a standby that takes over": (
        gone_after(20) | worker("b2", ready=f"{always(0, 21)} {always(1)}", standby=f"{always(1, 21)} {always(0)}"),
        {"12m": "", "18m": "StokerWorkerGone"},
    ),
    "no worker was ever scraped": ({'up{job="other",instance="c"}': always(1)}, {"6m": "StokerGone"}),
    "the only worker is gone": (gone_after(20), {"12m": "", "16m": "StokerWorkerGone", "60m": "StokerWorkerGone"}),
    "one of two workers is gone, and comes back": (
        worker() | gone_after(20) | {'up{job="stoker",instance="b"}': f"{always(1, 20)} {always(0, 40)} {always(1)}"},
        {"10m": "", "16m": "StokerWorkerGone", "29m": "StokerWorkerGone", "31m": ""},
    ),
    "a crash loop, mended": (
        worker(started=restarting(2, 20)),
        {"1m": "", "10m": "StokerCrashLoop", "19m": "StokerCrashLoop", "31m": ""},
    ),
    "a slow crash loop": (worker(started=restarting(12, 15)), {"5m": "", "60m": "StokerCrashLoop"}),
    "a crash loop that is down most of the time": (
        {
            name: ("_ " * 3).join(f"{30 * 4 * run if 'start_time' in name else 1} " for run in range(60))
            for name in worker()
            if name.startswith(("stoker_ready", "stoker_build", "process"))
        }
        | {'up{job="stoker",instance="a"}': "1 0 0 0 " * 60},
        {"20m": "StokerCrashLoop", "60m": "StokerCrashLoop"},
    ),
    "one restart, as for an upgrade": (worker(started=restarting(40, 1)), {"21m": "", "30m": ""}),
    "the shared store is away for an hour": (
        worker(shared_store_up=f"{always(1, 20)} {always(0, 120)} {always(1)}"),
        {"15m": "", "30m": "StokerSharedStoreAway", "69m": "StokerSharedStoreAway", "71m": ""},
    ),
    "1 of 1 jobs failed": (worker(**{FAILED: f"{always(0, 20)} {always(1)}"}), {"15m": "", "25m": "", "60m": ""}),
    "9 of 200 jobs failed": (
        worker(**{FAILED: f"{always(0, 20)} {always(9)}", FINISHED: f"{always(0, 20)} {always(191)}"}),
        {"25m": ""},
    ),
    "8 of 20 jobs failed": (
        worker(**{FAILED: f"{always(0, 20)} {always(8)}", FINISHED: f"{always(0, 20)} {always(12)}"}),
        {"14m": "", "25m": "StokerJobsFail", "50m": ""},
    ),
    "8 of 20 jobs failed, and 200 were given back": (
        worker(
            **{
                FAILED: f"{always(0, 20)} {always(8)}",
                FINISHED: f"{always(0, 20)} {always(12)}",
                'jobs_ended_total{outcome="given_back"}': f"{always(0, 20)} {always(200)}",
            }
        ),
        {"25m": "StokerJobsFail"},
    ),
    "turns are not saved until the disk is mended": (
        worker(results_unsaved_total=f"{always(0, 20)} 0+1x20 {always(20)}"),
        {"9m": "", "12m": "StokerTurnsUnsaved", "20m": "StokerTurnsUnsaved", "24m": ""},
    ),
    "append jobs fail because the disk is full": (
        worker(**{'job_errors_total{error="AgentVersionNotSaved"}': f"{always(0, 20)} 0+1x20 {always(20)}"}),
        {"12m": "StokerTurnsUnsaved", "24m": ""},
    ),
    "the first turn of an append job that is not saved": (
        worker(**{'job_errors_total{error="AgentVersionNotSaved"}': f"{always(0, 20)} {always(1)}"}),
        {"11m": "StokerTurnsUnsaved", "15m": ""},
    ),
    "ten minutes without a scrape, long after turns were not saved": (
        worker(**{'job_errors_total{error="AgentVersionNotSaved"}': f"{always(5, 20)} {'_ ' * 20}{always(5)}"}),
        {"9m": "", "21m": "", "25m": ""},
    ),
    "1 GB free of 1 TB": (
        worker(store_free_bytes=f"{always(1 * GB, 60)} {always(300 * GB)}"),
        {"5m": "StokerDiskFull", "15m": "StokerDiskFull StokerDiskNearlyFull", "31m": ""},
    ),
    "30 GB free of 1 TB": (worker(store_free_bytes=always(30 * GB)), {"15m": "StokerDiskNearlyFull"}),
    "300 GB free of 8 TB": (worker(store_free_bytes=always(300 * GB), store_disk_bytes=always(8000 * GB)), {"15m": ""}),
    "1 GB free of a small disk of 8 GB": (
        worker(store_free_bytes=always(1 * GB), store_disk_bytes=always(8 * GB)),
        {"15m": ""},
    ),
    "Redis is nearly full": (
        server(memory_used_bytes=f"{always(95, 60)} {always(50)}", memory_max_bytes=always(100, 300)),
        {"4m": "", "6m": "StokerRedisNearlyFull", "31m": ""},
    ),
    "redis_exporter may not read, and then may": (
        server(up=f"{always(0, 60)} {always(1)}"),
        {"14m": "", "16m": "StokerRedisUnwatched", "31m": ""},
    ),
    "Redis keeps nothing": (server(aof_enabled=always(0)), {"16m": "StokerRedisForgets"}),
    "Redis cannot write its append-only file": (
        server(aof_last_write_status=f"{always(0, 20)} {always(1)}"),
        {"3m": "StokerRedisCannotSave", "11m": ""},
    ),
    "Redis cannot write its snapshot": (
        server(rdb_last_bgsave_status=f"{always(0, 20)} {always(1)}"),
        {"3m": "StokerRedisCannotSave", "11m": ""},
    ),
    "the engine is stuck": (
        worker(engine_step_age_seconds=f"{always(0, 20)} 0+30x20 {always(0)}"),
        {"11m": "", "15m": "StokerEngineStuck", "22m": ""},
    ),
    "Redis is away": (
        worker(redis_away_seconds_total=f"{always(0, 20)} 0+30x20 {always(600)}"),
        {"9m": "", "14m": "StokerRedisAway", "40m": ""},
    ),
    "a backlog grows old": (
        worker(**{'queue_oldest_wait_seconds{queue="generate"}': f"{always(5 * 3600, 60)} {always(0)}"}),
        {"10m": "", "20m": "StokerBacklogGrowsOld", "31m": ""},
    ),
    "a prompt of many minutes, after an hour without work": (
        worker(
            num_requests_waiting=f"{always(0, 120)} {always(3)}",
            step_tokens_total=always(0),
            step_time_seconds_count=f"{always(0, 120)} 0+5x120",
            **{FINISHED: always(2)},
        ),
        {"64m": "", "66m": "", "80m": ""},
    ),
    "jobs wait and none goes on": (
        worker(num_requests_waiting=always(3), step_time_seconds_count=always(0), **{FINISHED: always(2)}),
        {"4m": "", "45m": "StokerStandsStill"},
    ),
    "jobs wait and none goes on, while those of another Redis server do": (
        worker(num_requests_waiting=always(3), step_time_seconds_count=always(0), **{FINISHED: always(2)})
        | of_another_server(worker(step_time_seconds_count="0+9x240", suspended=always(0), **{FINISHED: "0+1x240"})),
        {"4m": "", "45m": "StokerStandsStill"},
    ),
    "Redis has lost data": (
        worker(redis_data_lost_total=f"{always(0, 20)} {always(1)}"),
        {"9m": "", "12m": "StokerRedisLostData", "26m": ""},
    ),
    "jobs wait while the queue is suspended": (
        worker(
            **{FINISHED: always(2), "step_time_seconds_count": always(0), "num_requests_waiting": always(3)},
            suspended=f"{always(1, 140)} {always(0)}",
        ),
        {"20m": "", "60m": "StokerSuspended", "71m": "", "80m": "StokerStandsStill"},
    ),
    "workers are killed": (
        worker(jobs_recovered_total=f"{always(0, 20)} {always(9, 300)}"),
        {"9m": "", "20m": "StokerWorkersAreLost", "80m": ""},
    ),
    "the KV memory is too small": (
        worker(num_preemptions_total="0+60x120 " + always(7200)),
        {"10m": "", "58m": "StokerPreempts", "100m": ""},
    ),
}


@pytest.fixture(scope="module")
def promtool():
    if shutil.which("promtool") is None:
        missing = "no promtool (Debian: prometheus)"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)


def rule_test(scenario, series, firing):
    def samples(alerts):
        return [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in alerts.split()]

    server_up = {'redis_up{job="stoker-redis",instance="queue"}': always(1)}
    fire = f'group by (alertname) (ALERTS{{alertstate="firing"}}) # {scenario}'  # promtool quotes it
    return {
        "interval": "30s",
        "input_series": [{"series": name, "values": values} for name, values in (server_up | series).items()],
        "promql_expr_test": [
            {"expr": fire, "eval_time": at, "exp_samples": samples(alerts)} for at, alerts in firing.items()
        ],
    }


@pytest.mark.slow
def test_each_scenario_has_its_alerts(promtool, tmp_path):
    tests = [rule_test(name, *rest) for name, rest in SCENARIOS.items()]
    (tmp_path / "test.yaml").write_text(
        json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests})
    )
    command = ["promtool", "test", "rules", str(tmp_path / "test.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_alerts(promtool):
    subprocess.run(["promtool", "check", "rules", str(ALERTS)], check=True)


def test_each_alert_is_seen_to_fire():
    fired = {name for _, firing in SCENARIOS.values() for alerts in firing.values() for name in alerts.split()}
    assert fired == set(NAMES)
