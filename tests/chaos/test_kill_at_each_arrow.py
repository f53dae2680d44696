"""kill -9 at each arrow of docs/lifecycle.md, for one job of several in flight: the page's promises hold.

The first worker kills itself at one place (tests/chaos/hooks.py). Then a second one with the same store drains the
queue.
"""

import hashlib
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest
from redis import Redis
from rq import Queue, Retry
from rq.command import send_stop_job_command
from rq.job import Job
from rq.serializers import JSONSerializer
from tests.chaos.hooks import generations
from tests.support.forked_worker import ForkServer
from tests.support.store_reader import StoreReader, is_made
from tests.worker.queue.looking import MEMBER, places

from stoker_shared.wire import TASK_PATH

RQ = "stoker_worker.queue."
FINISH = RQ + "end:JobFinish."
STORE = "stoker_worker.memory."
FILE_OF_VICTIM = (hashlib.sha256(b"victim").hexdigest()[:32],)


@dataclass(frozen=True)
class Arrow:
    """A place to lose a worker at, the state right after the loss, and the state in the end.

    Attributes:
        place: where RQ's keys have the job right after the loss.
        end: the job's last status; `attempt` belongs to a finished job.
        generations: how often the engine got the job, over both workers.
        turn_saved: whether the job's turn is in its agent's history right after the loss.
        act: what else happens to the job: it falls ``due``, is told to ``stop``, or its worker is told to
            ``terminate``.
    """

    target: str
    when: str
    place: list[str]
    generations: int = 1
    attempt: int | None = 1
    end: str = "finished"
    turn_saved: bool = False
    nth: int = 1
    needles: tuple[str, ...] | None = None
    prompt: str = "x"
    act: str = ""
    options: tuple[tuple[str, Any], ...] = ()


QUEUED, STARTED = ["generate"], ["wip"]
FAILS: dict[str, Any] = {"prompt": "fail so", "end": "failed", "attempt": None}
REFUSED: dict[str, Any] = {"end": "failed", "attempt": None, "options": (("request", {"max_tokens": 0}),)}

ARROWS = {
    "claim: the next jobs are chosen": Arrow(RQ + "waiting:FairQueue.choose", "after", QUEUED),
    "claim: the job is started": Arrow(RQ + "claim:Claimer.claim", "after", STARTED, attempt=2),
    "start: a job that is refused": Arrow(FINISH + "fail", "before", STARTED, 0, **REFUSED),
    "start: a job that was refused": Arrow(FINISH + "fail", "after", ["failed"], 0, **REFUSED),
    "load: before": Arrow("stoker_worker.pipeline.loader:Loader._load", "before", STARTED, attempt=2),
    "load: after": Arrow("stoker_worker.pipeline.loader:Loader._load", "after", STARTED, attempt=2),
    "generate": Arrow("stoker_worker.engine.scripted:ScriptedEngine._advance", "after", STARTED, 2, 2, nth=9),
    "save: before": Arrow(STORE + "store:AgentCacheStore.save", "before", STARTED, 2, 2),
    "save: before its cache file": Arrow(STORE + "files:Disk.rename", "before", STARTED, 2, 2, needles=FILE_OF_VICTIM),
    "save: after its cache file": Arrow(STORE + "files:Disk.rename", "after", STARTED, 2, 2, needles=FILE_OF_VICTIM),
    "save: before the commit": Arrow(STORE + "store_parts:StoreParts.commit_next", "before", STARTED, 2, 2),
    "save: in the transaction": Arrow(STORE + "transcripts:write_version", "after", STARTED, 2, 2),
    "save: after the commit": Arrow(STORE + "store_parts:StoreParts.commit_next", "after", STARTED, turn_saved=True),
    "finish: before": Arrow(FINISH + "finish", "before", STARTED, turn_saved=True),
    "finish: its commands are made": Arrow(FINISH + "_removed", "after", STARTED, turn_saved=True),
    "finish: after": Arrow(FINISH + "finish", "after", ["finished"], turn_saved=True),
    "fail: before": Arrow(FINISH + "fail", "before", STARTED, 2, **FAILS),
    "fail: after": Arrow(FINISH + "fail", "after", ["failed"], 1, **FAILS),
    "fail: it is retried at once": Arrow(
        FINISH + "fail", "after", QUEUED, 2, **FAILS, options=(("retry", Retry(max=1)),)
    ),
    "fail: it is retried after an interval": Arrow(
        FINISH + "fail", "after", ["scheduled"], 2, **FAILS, options=(("retry", Retry(max=1, interval=1)),)
    ),
    "stop command: before": Arrow(FINISH + "stop", "before", STARTED, 2, 2, act="stop"),
    "stop command: after": Arrow(FINISH + "stop", "after", ["failed"], 1, None, "stopped", act="stop"),
    "give back: before": Arrow(RQ + "end:Requeue.__call__", "before", STARTED, 2, 2, act="terminate"),
    "give back: after": Arrow(RQ + "end:Requeue.__call__", "after", QUEUED, 2, 1, act="terminate"),
    "scheduler: before": Arrow(RQ + "housekeeping:Scheduler._move", "before", ["scheduled"], act="due"),
    "scheduler: after": Arrow(RQ + "housekeeping:Scheduler._move", "after", QUEUED, act="due"),
}


pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def forks():
    with ForkServer() as server:
        yield server


@pytest.fixture
def connection(redis_url):
    with Redis.from_url(redis_url) as connection:
        yield connection


class Scene:
    """One queue, one store, and the jobs of every test: two others in flight, the victim, and its agent's next job."""

    def __init__(self, forks, connection, redis_url, folder):
        self.forks, self.connection, self.redis_url, self.folder = forks, connection, redis_url, folder
        self.queue = Queue("generate", connection=connection, serializer=JSONSerializer)
        self.seen = folder / "seen"
        self.store = folder / "store"

    def worker(self, name, *arguments, hooks=None):
        options = ["run", "--engine", "scripted", "--redis", self.redis_url, "--store", str(self.store)]
        options += ["--name", MEMBER]
        short = {"STOKER_RECOVER_S": "0.2", "STOKER_POLL_S": "0.01"}
        hooks = {"seen": str(self.seen), **(hooks or {})}
        return self.forks.run([*options, *arguments], self.folder / f"{name}.log", env=short, hooks=hooks)

    def enqueue(self, job_id, agent, prompt, max_tokens, *, request=None, at=None, **options):
        asked = {"agent_id": agent, "prompt": prompt, "max_tokens": max_tokens, "metadata": {"job": job_id}}
        asked |= {"context": "append"} | (request or {})
        add = self.queue.enqueue if at is None else lambda *args, **more: self.queue.enqueue_at(at, *args, **more)
        return add(TASK_PATH, request=asked, job_id=job_id, result_ttl=600, **options)

    def others_run(self, worker):
        for name in ("other-1", "other-2"):
            self.enqueue(name, name, "x", 150)
        worker.wait_for(lambda: places(self.connection, "other-1") == places(self.connection, "other-2") == ["wip"])

    def drain(self, name="second", **options):
        second = self.worker(name, "--burst", "--scripted-steps-per-s", "4000", **options)
        assert second.wait() == 0, second.log
        return second

    def job(self, job_id):
        return Job.fetch(job_id, self.connection, JSONSerializer)

    def turns(self, agent="victim"):
        """The jobs in the agent's history, oldest first."""
        return StoreReader(self.store).turns(agent) if is_made(self.store) else []

    def assert_nothing_is_left(self):
        for key in ("rq:queue:generate", "rq:wip:generate", "rq:scheduled:generate"):
            assert not self.connection.exists(key), key
        assert not self.connection.keys("rq:execution*")
        assert not self.connection.keys("stoker:holder:*")
        assert StoreReader(self.store).problems() == []


@pytest.fixture
def scene(forks, connection, redis_url, tmp_path):
    return Scene(forks, connection, redis_url, tmp_path)


def in_the_past():
    import datetime

    return datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=5)


def make_scheduled_due(connection):
    for job_id in connection.zrange("rq:scheduled:generate", 0, -1):
        connection.zadd("rq:scheduled:generate", {job_id: 1})
    connection.delete("rq:scheduler-lock:generate")  # which the lost worker would hold for 5 s more


@pytest.mark.parametrize("arrow", ARROWS.values(), ids=ARROWS)
def test_a_worker_that_is_killed_here_loses_nothing(scene, connection, arrow):
    needles = list(arrow.needles or ["victim"])
    hooks = {"die": {"target": arrow.target, "when": arrow.when, "needles": needles, "nth": arrow.nth}}
    first = scene.worker("first", "--grace-s", "0", "--scripted-steps-per-s", "100", hooks=hooks)
    scene.others_run(first)
    options = dict(arrow.options)
    if arrow.act == "due":
        options["at"] = in_the_past()
    endless = arrow.act in {"stop", "terminate"}
    scene.enqueue("victim", "victim", arrow.prompt, 150 if endless else 20, **options)
    if arrow.act != "due":
        scene.enqueue("next", "victim", " next", 4)
    if endless:
        first.wait_for(lambda: scene.job("victim").get_status() == "started")
        time.sleep(0.1)  # the engine has it
        if arrow.act == "stop":
            send_stop_job_command(connection, "victim", serializer=JSONSerializer)
        else:
            first.signal(signal.SIGTERM)
    assert first.wait() == -signal.SIGKILL, first.log

    assert places(connection, "victim") == arrow.place
    assert ("victim" in scene.turns()) == arrow.turn_saved
    in_flight = [name for name in ("other-1", "other-2") if places(connection, name) == ["wip"]]
    make_scheduled_due(connection)
    second = scene.drain()

    victim = scene.job("victim")
    assert victim.get_status() == arrow.end, second.log
    assert places(connection, "victim") == [{"stopped": "failed"}.get(arrow.end, arrow.end)]
    assert generations(scene.seen, {"job": "victim"}) == arrow.generations
    if arrow.end == "finished":
        assert victim.return_value()["attempt"] == arrow.attempt
        assert len([result for result in victim.results() if result.type.name == "SUCCESSFUL"]) == 1
    if arrow.act != "due":
        turns = ["victim", "next"] if arrow.end == "finished" else ["next"]
        assert scene.turns() == turns
    for name in ("other-1", "other-2"):
        assert scene.job(name).return_value()["attempt"] == (2 if name in in_flight else 1)
        assert connection.xlen(f"rq:results:{name}") == 1
    scene.assert_nothing_is_left()


@pytest.mark.parametrize(("when", "place"), [("before", STARTED), ("after", QUEUED)])
def test_a_recovery_that_is_killed_is_finished_by_the_next_and_counts_one_worker_loss(scene, connection, when, place):
    first = scene.worker("first", "--scripted-steps-per-s", "100")
    scene.others_run(first)
    scene.enqueue("victim", "victim", "x", 150)
    first.wait_for(lambda: scene.job("victim").get_status() == "started")
    first.kill()
    hooks = {"die": {"target": RQ + "end:Requeue.all", "when": when, "needles": ["victim"]}}
    second = scene.worker("second", hooks=hooks)
    assert second.wait() == -signal.SIGKILL, second.log
    assert [places(connection, name) for name in ("victim", "other-1", "other-2")] == [place] * 3
    scene.drain("third")
    assert {scene.job(name).return_value()["attempt"] for name in ("victim", "other-1", "other-2")} == {2}
    assert scene.turns() == ["victim"]
    scene.assert_nothing_is_left()


@pytest.mark.parametrize(("when", "enqueued"), [("before", 0), ("after", 1)])
def test_a_producer_that_is_killed_has_enqueued_its_job_or_not(scene, connection, forks, when, enqueued):
    hooks = {"die": {"target": "redis.client:Pipeline.execute", "when": when, "needles": []}}
    submit = ["--redis", scene.redis_url, "submit", "--agent", "a", "--prompt", "say hello"]
    producer = forks.run(submit, scene.folder / "producer.log", program="stoker", hooks=hooks)
    assert producer.wait() == -signal.SIGKILL, producer.log
    assert connection.llen("rq:queue:generate") == len(connection.keys("rq:job:*")) == enqueued
    scene.drain()
    assert connection.zcard("rq:finished:generate") == enqueued


@pytest.mark.parametrize(("when", "has_moved"), [("before", False), ("after", True)])
def test_an_escalation_that_is_killed_moves_the_job_and_counts_its_verdict_once(scene, connection, when, has_moved):
    steps = [{"model": "small", "queue": "generate"}, {"model": "large", "queue": "large"}]
    request = {"v": 5, "context": "full", "check": {"contains": ["yes"]}, "route": steps, "task": "t"}
    scene.enqueue("victim", None, "if large say yes else no", 20, request=request)
    hooks = {"die": {"target": FINISH + "escalate", "when": when, "needles": ["victim"]}}
    first = scene.worker("first", "--model", "small", hooks=hooks)
    assert first.wait() == -signal.SIGKILL, first.log
    assert connection.lrange("rq:queue:large", 0, -1) == ([b"victim"] if has_moved else [])
    assert places(connection, "victim") == ([] if has_moved else STARTED)
    own = ["--queues", "large", "--name", "large", "--store", str(scene.folder / "large")]
    large = scene.worker("large", "--model", "large", *own)
    second = scene.worker("second", "--model", "small", "--burst")
    assert second.wait() == 0, second.log
    large.signal(signal.SIGTERM)
    assert large.wait() == 0, large.log

    result = scene.job("victim").return_value()
    assert (result["text"], result["model"], result["metadata"]) == ("yes", "large", {"job": "victim"})
    assert [(tried["model"], tried["accepted"]) for tried in result["attempts"]] == [("small", False), ("large", True)]
    assert connection.xlen("rq:results:victim") == 1
    assert connection.hgetall("stoker:trust") == {b"t small": b"0.0000 1.0000", b"t large": b"1.0000 0.0000"}
    assert generations(scene.seen, {"job": "victim"}) == (2 if has_moved else 3)
    scene.assert_nothing_is_left()
