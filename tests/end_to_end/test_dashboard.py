"""`stoker dashboard` beside a worker with jobs in flight: its pages are correct, and no job can take control of them.

A headless Chromium reads them if there is one; plain HTTP requests always do.
"""

import html
import json
import os
import pickle
import re
import subprocess
import sys
from base64 import b64encode
from dataclasses import dataclass
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer
from tests.support.dashboard_process import STOKER, browser, require_dashboard, running_dashboard  # noqa: F401
from tests.support.private_server import private_server
from tests.support.worker_process import running_worker

from stoker import Producer, Ticket
from stoker_shared.wire import TASK_PATH

pytestmark = pytest.mark.server

PASSWORD = "swordfish"
PROMPT = "PatientZero"
MARKUP = "<img src=x onerror=alert(1)>"
SLOTS = 3


@dataclass
class Scene:
    """A worker with all its slots taken, two jobs waiting, one finished and one failed."""

    url: str
    admin: Redis
    producer: Producer
    page: str
    running: list[Ticket]
    finished: Ticket
    failed: Ticket

    def get(self, path, method="GET", **headers):
        connection = HTTPConnection(urlsplit(self.page).netloc, timeout=20)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=named)
        response = connection.getresponse()
        return response.status, response.read().decode(), response.headers

    def data(self, path):
        status, body, _ = self.get(f"/0/data/{path}.json")
        assert status == 200, body
        return json.loads(body)

    def queue(self, name="other", serializer=JSONSerializer):
        return Queue(name, connection=self.admin, serializer=serializer)


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    require_dashboard()
    folder = tmp_path_factory.mktemp("dashboard")
    options = ("--scripted-steps-per-s", "40", "--max-batch", str(SLOTS), "--grace-s", "0")
    with private_server(folder / "redis", "--requirepass", PASSWORD, password=PASSWORD) as admin:
        port = admin.config_get("port")["port"]
        url = f"redis://127.0.0.1:{port}/0?password={PASSWORD}"
        producer = Producer(url)
        with running_worker(url, folder / "store", *options) as worker, running_dashboard(url, folder / "log") as page:
            finished = producer.submit(agent_id="done", prompt=f"say {MARKUP}", max_tokens=60)
            failed = producer.submit(agent_id="broken", prompt=f"fail {MARKUP}", max_tokens=4)
            worker.wait_for(lambda: (finished.status().state, failed.status().state) == ("finished", "failed"))
            jobs = [producer.submit(agent_id=f"{MARKUP}{n}", prompt=PROMPT, max_tokens=100_000) for n in range(5)]
            worker.wait_for(lambda: sum(ticket.status().state == "started" for ticket in jobs) == SLOTS)
            running = [ticket for ticket in jobs if ticket.status().state == "started"]
            yield Scene(url, admin, producer, page, running, finished, failed)


# --- pages ---


def test_the_queues_page_shows_true_counts(scene, browser):  # noqa: F811
    # queued, deferred, scheduled, started, finished, failed, canceled
    assert "generate 2 0 0 3 1 1 0" in browser.text(f"{scene.page}/")


def test_a_finished_jobs_page_shows_its_result_as_it_is(scene, browser):  # noqa: F811
    text = html.unescape(browser.text(f"{scene.page}/0/view/job/{scene.finished.job_id}"))
    result = scene.finished.result(timeout_s=1)
    assert f'"text": "{MARKUP}"' in text
    assert f'"completion_tokens": {result.usage.completion_tokens}' in text
    assert "Status : finished" in text


def test_markup_in_jobs_is_shown_as_text(scene, browser):  # noqa: F811
    jobs = [f"job/{ticket.job_id}" for ticket in (scene.finished, scene.failed)]
    for path in ("jobs/generate/started/8/asc/1", *jobs, "workers", "stoker"):
        page = re.sub(r"(?s)<script.*?</script>", "", browser.dom(f"{scene.page}/0/view/{path}"))
        assert "<img" not in page
        assert "&amp;lt;" not in page  # not escaped twice


STATUSES = """
import json, sys
from rq_dashboard.app import create_app
client = create_app().test_client()
print(json.dumps([client.get(f"/rq-dashboard/0/data/{path}.json").status_code for path in sys.argv[1:]]))
"""
"""Of pages of rq-dashboard as it was installed, with the settings of the environment."""


@pytest.mark.scheduled
def test_plain_rq_dashboard_fails_where_its_page_is_said_to_fail(scene):
    """docs/dashboard.md has a table of it, and docs/upstream.md the patch: a release that serves them changes both."""
    waits = scene.queue().enqueue(TASK_PATH, request={}, depends_on=scene.running[0].job_id)
    jobs = [f"job/{job_id}" for job_id in (scene.running[0].job_id, scene.finished.job_id, waits.id)]
    paths = ["queues", "jobs/generate/started/8/asc/1", "jobs/generate/finished/8/asc/1", *jobs, "workers"]
    command = [sys.executable, "-c", STATUSES, *paths]
    for json_serializer, statuses in (
        ("false", [200, 200, 500, 500, 500, 500, 500]),
        ("true", [200, 200, 200, 200, 200, 500, 500]),
    ):
        settings = {"RQ_DASHBOARD_REDIS_URL": scene.url, "RQ_DASHBOARD_JSON_SERIALIZER": json_serializer}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | settings)
        assert json.loads(done.stdout) == statuses


# --- the content of jobs stays data ---


class Bomb:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickles_are_never_loaded_and_break_no_page(scene, tmp_path):
    target = tmp_path / "unpickled"
    job = scene.queue("pickled", serializer=None).enqueue("os.getcwd", Bomb(target), meta={"bomb": Bomb(target)})
    packed = pickle.dumps(Bomb(target))
    scene.admin.xadd(f"rq:results:{job.id}", {"type": 1, "return_value": b64encode(packed)})
    assert [shown["id"] for shown in scene.data("jobs/pickled/queued/8/asc/1")["jobs"]] == [job.id]
    shown = scene.data(f"job/{job.id}")
    assert shown["result"] == f"<{len(packed)} bytes that are not JSON>"
    meta = scene.admin.hget(f"rq:job:{job.id}", "meta")
    scene.admin.zadd("rq:failed:pickled", {job.id: 2e9})
    assert scene.get(f"/job/{job.id}/requeue", "POST")[0] == 200
    assert scene.admin.hget(f"rq:job:{job.id}", "meta") == meta
    assert scene.get(f"/job/{job.id}/delete", "POST")[0] == 200
    assert not scene.admin.exists(f"rq:job:{job.id}")
    assert not target.exists()


def test_a_job_that_waits_for_another_has_a_page(scene):
    first = scene.queue().enqueue(TASK_PATH, request={})
    second = scene.queue().enqueue(TASK_PATH, request={}, depends_on=first)
    shown = scene.data(f"job/{second.id}")
    assert (shown["depends_on"], shown["depends_on_status"]) == ([first.id], ["active"])


def test_a_job_with_an_id_that_rq_does_not_allow_breaks_no_page(scene):
    data = f'["{TASK_PATH}", null, [], {{"request": {{"agent_id": "a", "prompt": "x"}}}}]'
    fields = {"status": "failed", "origin": "strange", "data": data, "created_at": "2026-01-01T00:00:00.000000Z"}
    good = scene.queue("strange").enqueue(TASK_PATH, request={}, job_id="good")
    for job_id in ("a.b", "good:a", "two words"):
        scene.admin.hset(f"rq:job:{job_id}", mapping=fields)
        scene.admin.rpush("rq:queue:strange", job_id)
        scene.admin.zadd("rq:failed:strange", {job_id: 2e9})
    queued = [job["id"] for job in scene.data("jobs/strange/queued/8/asc/1")["jobs"]]
    assert sorted(queued) == sorted([good.id, "a.b", "good:a", "two words"])
    failed = [job["id"] for job in scene.data("jobs/strange/failed/8/asc/1")["jobs"]]
    assert sorted(failed) == ["a.b", "good:a", "two words"]
    assert scene.data("job/a.b")["id"] == "a.b"


def test_pages_contain_no_password_and_allow_only_their_own_scripts(scene):
    for path in ("/", "/0/view/jobs", "/0/view/workers", "/0/view/stoker", f"/0/view/job/{scene.finished.job_id}"):
        status, body, headers = scene.get(path)
        assert status == 200
        assert PASSWORD not in body
        [scripts] = [part for part in headers["Content-Security-Policy"].split("; ") if part.startswith("script-src")]
        assert "unsafe-inline" not in scripts
        assert scripts.split("'")[1].removeprefix("nonce-") in body


# --- refused requests ---


def test_another_sites_page_can_neither_change_nor_read_anything(scene):
    job = scene.queue().enqueue(TASK_PATH, request={})
    delete = f"/job/{job.id}/delete"
    assert scene.get(delete, "POST", Sec_Fetch_Site="cross-site")[0] == 403
    assert scene.get(delete, "POST", Origin="http://evil.example")[0] == 403
    assert scene.get("/requeue/generate", Sec_Fetch_Site="cross-site")[0] == 403
    status, said = scene.get("/0/data/queues.json", Host="evil.example")[:2]  # another site's name for our address
    assert (status, said) == (400, "this dashboard does not answer to the Host 'evil.example'; --name allows it\n")
    assert scene.admin.exists(f"rq:job:{job.id}")
    assert scene.get(delete, "POST", Sec_Fetch_Site="same-origin", Origin=scene.page)[0] == 200
    assert not scene.admin.exists(f"rq:job:{job.id}")


def stoker(*arguments):
    done = subprocess.run([*STOKER, *arguments], capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize("bind", ["::", "mac-mini.local"])
def test_other_machines_are_let_in_only_when_asked(bind):
    code, said = stoker("dashboard", "--bind", bind)
    assert code == 2
    assert "--allow-remote" in said


def test_with_allow_remote_it_warns_and_answers_only_to_its_names(scene, tmp_path):
    options = ("--bind", "0.0.0.0", "--allow-remote", "--name", "mac-mini.local")
    with running_dashboard(scene.url, tmp_path / "log", *options) as page:
        port = urlsplit(page).port
        for host, status in (("Mac-mini.local", 200), ("127.0.0.1", 200), ("[::1]", 200), ("evil.example", 400)):
            connection = HTTPConnection("127.0.0.1", port, timeout=20)
            connection.request("GET", "/0/data/queues.json", headers={"Host": f"{host}:{port}"})
            assert connection.getresponse().status == status
    assert "no password" in (tmp_path / "log").read_text()


def test_without_its_packages_the_error_contains_the_install_command():
    code = "import sys; sys.modules['rq_dashboard'] = None; from stoker.cli import main; main(['dashboard'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "pip install 'stoker[dashboard]'" in done.stderr


def test_without_a_server_it_ends_with_an_error(scene):
    code, said = stoker("--redis", f"redis://:{PASSWORD}@127.0.0.1:1", "dashboard", "--port", "0")
    assert code == 1
    assert "RedisUnavailable" in said
    assert PASSWORD not in said
