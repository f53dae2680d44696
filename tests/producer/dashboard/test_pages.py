"""The dashboard's own pages: where Jobs opens, a job's progress, what `stoker status` shows in place of the workers;
and that a page in a browser stays fresh, or says that it is old."""

import html
import json
import re
import threading
import time
import tracemalloc
import zlib
from base64 import b64encode
from urllib.parse import quote

import pytest
import rq.serializers
from flask import abort, request
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.producer.played_worker import PlayedWorker, publish
from tests.support.dashboard_process import browser, require_dashboard  # noqa: F401
from werkzeug.serving import make_server

from stoker.status_command import overview_text

pytestmark = pytest.mark.server

MARKUP = "<b>reviewer"


@pytest.fixture
def build(monkeypatch):
    """`build_app`, whose repairs of RQ and rq-dashboard in this process are undone after the test."""
    require_dashboard()
    from rq_dashboard import web

    from stoker.dashboard.server import build_app

    for owner, name in ((rq.serializers, "PickleSerializer"), (web.config, "serializer")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for name in ("Job", "Queue", "from_url"):
        monkeypatch.setattr(web, name, getattr(web, name))
    aliases = rq.serializers.SERIALIZER_ALIASES
    monkeypatch.setitem(aliases, "pickle", aliases["pickle"])
    return lambda connection: build_app(connection, names={"localhost", "127.0.0.1"})


@pytest.fixture
def page(build, connection):
    client = build(connection).test_client()

    def get(path):
        answer = client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.text

    return get


def words(text):
    shown = re.sub(r"(?s)<script.*?</script>", "", text)
    return " ".join(html.unescape(re.sub(r"(?s)<[^>]*>", " ", shown)).split())


def register(connection, name, *queues, alive=True, **more):
    """A worker as it registers itself; a dead one has only its name left."""
    connection.sadd("rq:workers", f"rq:worker:{name}")
    if alive:
        now = {"at": time.time(), "tokens_per_s": 12.5, "jobs_per_min": 3, "in_flight": 1, "in_batch": 1}
        now |= {"hit_share": 0.5, "done": 5, "failed": 0}
        publish(connection, name, *queues, **{"model": "qwen", "now": now, **more})


def run_on(connection, producer, name):
    job_id = producer.submit(prompt="a secret", agent_id=MARKUP).job_id
    PlayedWorker(connection).start(job_id, tokens=34)
    connection.hset(f"rq:job:{job_id}", "worker_name", name)
    connection.zadd("rq:wip:generate", {f"{job_id}:e": 2e9})
    return job_id


def opened(text):
    [queue] = re.findall(r'id="select-queue" title="Queue name" value="(.*?)"', text)
    [registry] = re.findall(r"<option\s+selected\s*>(\w+)", text)
    return queue, registry


def test_jobs_opens_the_queue_with_the_most_jobs(page, producer, connection):
    assert opened(page("/0/view/jobs")) == ("generate", "queued")
    run_on(connection, producer, "stoker-mac")
    assert opened(page("/0/view/jobs")) == ("generate", "started")
    assert "contains the started jobs" in words(page("/0/view/jobs"))
    producer.submit(prompt="x", queue="small")
    producer.submit_many([{"prompt": "x"}] * 3, queue="nightly")
    assert opened(page("/0/view/jobs")) == ("nightly", "queued")
    assert opened(page("/0/view/jobs/small/failed/8/asc/1")) == ("small", "failed")


@pytest.mark.parametrize("name", ["x');alert(1);('", "ends with \\", "a\nb"])
def test_a_queues_name_from_the_address_cannot_run_as_a_script(page, name):
    text = page(f"/0/view/jobs/{quote(name)}/queued/8/asc/1")
    scripts = "".join(re.findall(r"(?s)<script[^>]*>(.*?)</script>", text))
    [restored] = re.findall(r"== ''\) \{\s*\$\(this\)\.val\((.*)\);", scripts)
    assert json.loads(restored) == name
    assert "alert(1);('" not in scripts


def test_a_queue_with_slashes_in_its_name_has_a_page(page, producer):
    job_id = producer.submit(prompt="x", queue="team//nightly").job_id
    [link] = set(re.findall(r'href="(/0/view/jobs/.*?)"', page("/0/view/stoker")))
    assert opened(page(link)) == ("team//nightly", "queued")
    found = json.loads(page("/0/data/jobs/team%2F%2Fnightly/queued/8/asc/1.json"))
    assert [job["id"] for job in found["jobs"]] == [job_id]


UNREADABLE = {"created_at": "2026-01-01T00:00:00+00:00", "description": b"\xff", "status": "paused", "timeout": "abc"}


def test_jobs_that_rq_cannot_read_and_keys_that_are_no_queues_break_no_page(page, producer, connection):
    jobs = [job.job_id for job in producer.submit_many([{"prompt": "x"}] * (len(UNREADABLE) + 2))]
    for job_id, field, value in zip(jobs, UNREADABLE, UNREADABLE.values(), strict=False):
        connection.hset(f"rq:job:{job_id}", field, value)
    connection.xadd(f"rq:results:{jobs[-2]}", {"type": "none", "exc_string": "!"})
    found = json.loads(page("/0/data/jobs/generate/queued/8/asc/1.json"))["jobs"]
    assert [job["id"] for job in found] == jobs
    assert ["RQ cannot read" in job["description"] for job in found] == [True] * len(UNREADABLE) + [False] * 2
    for job_id in jobs:
        page(f"/0/data/job/{job_id}.json")
        page(f"/0/view/job/{job_id}")
    connection.sadd("rq:queues", b"rq:queue:\xff", "nonsense")
    assert [queue["name"] for queue in json.loads(page("/0/data/queues.json"))["queues"]] == ["generate"]
    for path in ("/", "/0/view/jobs"):
        page(path)


@pytest.mark.slow
def test_what_would_unpack_to_gigabytes_is_not_unpacked_for_a_page(page, producer, connection):
    page("/0/view/jobs")  # what is loaded once
    bomb, many = zlib.compress(bytes(2**28)), b"[" + b"[]," * 5_000_000 + b"0]"
    for name, value in (("data", bomb), ("exc_info", bomb), ("meta", many), ("exc_string", bomb)):
        job_id = producer.submit(prompt="x").job_id
        if name == "exc_string":
            connection.xadd(f"rq:results:{job_id}", {"type": 2, name: b64encode(value)})
        else:
            connection.hset(f"rq:job:{job_id}", name, value)
        tracemalloc.start()
        try:
            page("/0/data/jobs/generate/queued/8/asc/1.json")
            page(f"/0/data/job/{job_id}.json")
            page(f"/0/view/job/{job_id}")
            assert tracemalloc.get_traced_memory()[1] < 150 * 2**20
        finally:
            tracemalloc.stop()


def facts(text):
    found = re.findall(r"(?s)<dt.*?>(.*?)</dt><dd.*?>(.*?)</dd>", text)
    return {label: html.unescape(value) for label, value in found}


def test_a_jobs_page_shows_what_the_job_is_at(page, producer, connection):
    register(connection, "stoker-mac", "generate")
    running = run_on(connection, producer, "stoker-mac")
    shown = {"State": "started", "Agent": MARKUP, "Worker": "stoker-mac"}
    shown |= {"Stage": "decode", "Tokens": "34", "Rate": "8.5 tokens/s"}
    assert facts(page(f"/0/view/job/{running}")) == shown
    producer.submit(prompt="x")
    waiting = producer.submit(prompt="x").job_id
    assert facts(page(f"/0/view/job/{waiting}")) == {"State": "queued, 1 ahead of it", "Agent": "none"}
    connection.delete("stoker:worker:stoker-mac", "stoker:holder:stoker-mac", "stoker:lease:generate")
    left = facts(page(f"/0/view/job/{running}"))
    assert "puts the job back" in left.pop("DEAD")
    assert left == shown
    assert "no worker listens" in facts(page(f"/0/view/job/{waiting}"))["State"]


def test_the_stoker_page_shows_what_stoker_status_shows(page, producer, connection):
    text = words(page("/0/view/stoker"))
    assert "no queues" in text
    assert "no workers" in text
    register(connection, "stoker-mac", "generate", "nightly", model=MARKUP)
    register(connection, "stoker-gone", alive=False)
    job_id = run_on(connection, producer, "stoker-gone")
    run_on(connection, producer, "stoker-mac")
    producer.submit_many([{"prompt": "x"}] * 3, queue="nightly")
    text = page("/0/view/stoker").lower()
    for line in overview_text(producer.overview()).lower().splitlines():
        assert " ".join(line.rstrip(":").split()) in words(text)
    assert f'href="/0/view/job/{job_id}"' in text
    assert text.count('<tr class="failed">') == 2  # the dead worker and its job
    assert 'href="/0/view/jobs/nightly/queued/8/asc/1"' in text
    assert "a secret" not in text
    assert "<b>" not in text


def test_a_server_that_refuses_to_write_is_named_where_workers_look_dead(page, connection):
    most = connection.config_get("maxmemory", "maxmemory-policy")
    try:
        connection.config_set("maxmemory-policy", "noeviction")
        connection.config_set("maxmemory", 1)
        assert "Redis is full (maxmemory), and refuses jobs and results" in words(page("/0/view/stoker"))
    finally:
        for name, value in most.items():
            connection.config_set(name, value)


def test_every_page_leads_to_the_stoker_page(page, producer):
    job_id = producer.submit(prompt="x").job_id
    for path in ("/", "/0/view/jobs", "/0/view/workers", "/0/view/stoker", f"/0/view/job/{job_id}"):
        assert page(path).count('href="/0/view/stoker"') == 1
        assert 'href="/0/view/workers"' not in page(path)


def test_while_redis_is_away_a_page_says_so_in_one_line(build):
    client = build(Redis(port=1, retry=Retry(NoBackoff(), 0))).test_client()
    for path in ("/0/view/jobs", "/0/view/stoker", "/0/view/job/x"):
        answer = client.get(path)
        assert (answer.status_code, answer.text.count("\n")) == (503, 1)


@pytest.mark.slow
def test_a_page_asks_again_and_says_when_its_figures_are_old(build, connection, producer, browser):  # noqa: F811
    job_id = producer.submit(prompt="x").job_id
    app, asked = build(connection), []

    @app.before_request
    def fail_after_the_first_time():
        asked.append(request.path)
        if ("/static/" not in request.path and asked.count(request.path) > 1) or "/data/" in request.path:
            abort(503)

    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        for path in ("/0/view/stoker", f"/0/view/job/{job_id}"):
            [notice] = re.findall(r'<p id="old".*?>', browser.dom(f"http://127.0.0.1:{server.port}{path}"))
            assert "none" not in notice
        assert asked.count(f"/0/data/job/{job_id}.json") > 1
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
