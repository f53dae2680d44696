"""RQ's own commands, used on one of many jobs in flight: each acts by its name, and on that job alone."""

import signal
import subprocess
import sys
import time

import pytest
from rq.command import send_shutdown_command, send_stop_execution_command, send_stop_job_command
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.worker_registration import get_keys
from tests.support.worker_process import running_worker
from tests.worker.queue.looking import places

from stoker import Producer

pytestmark = pytest.mark.server

N_JOBS = 8


def tokens(ticket):
    return ticket.status().tokens or 0


class Scene:
    """A worker with free slots and many jobs in flight, which end only when a test ends them."""

    def __init__(self, redis_url, connection, worker):
        self.redis_url, self.connection, self.worker = redis_url, connection, worker
        self.producer = Producer(redis_url)
        self.tickets = [self.endless(f"agent {n}") for n in range(N_JOBS)]
        worker.wait_for(lambda: all(tokens(ticket) > 0 for ticket in self.tickets))

    def endless(self, agent):
        return self.producer.submit(agent_id=agent, prompt="x", max_tokens=1_000_000)

    def rq(self, *arguments):
        command = [sys.executable, "-m", "rq.cli", *arguments, "--url", self.redis_url]
        subprocess.run(command, capture_output=True, text=True, check=True)

    def places(self, ticket):
        return places(self.connection, ticket.job_id)

    def assert_they_go_on(self, tickets):
        assert [self.places(ticket) for ticket in tickets] == [["wip"]] * len(tickets)
        before = [tokens(ticket) for ticket in tickets]
        self.worker.wait_for(lambda: all(tokens(now) > then for now, then in zip(tickets, before, strict=True)))


@pytest.fixture
def scene(redis_url, connection, tmp_path):
    with running_worker(redis_url, tmp_path / "store", "--grace-s", "0") as worker:
        yield Scene(redis_url, connection, worker)


def stop_job(connection, job):
    send_stop_job_command(connection, job.id, serializer=JSONSerializer)


def stop_execution(connection, job):
    [execution] = job.get_executions()
    send_stop_execution_command(connection, job.id, execution.id)


@pytest.mark.parametrize(
    ("verb", "state", "place"),
    [
        (stop_job, "stopped", ["failed"]),
        (stop_execution, "stopped", ["failed"]),
        (lambda _, job: job.cancel(), "canceled", ["canceled"]),
        (lambda _, job: job.delete(), None, []),
    ],
    ids=["send_stop_job_command", "send_stop_execution_command", "cancel", "delete"],
)
def test_one_job_of_many_in_flight_ends_and_the_others_go_on(scene, connection, verb, state, place):
    victim, *others = scene.tickets
    verb(connection, Job.fetch(victim.job_id, connection, JSONSerializer))
    scene.worker.wait_for(lambda: f"cancelled job={victim.job_id}" in scene.worker.log)
    assert connection.hget(f"rq:job:{victim.job_id}", "status") == (state.encode() if state else None)
    assert scene.places(victim) == place
    assert not connection.keys(f"rq:execution*{victim.job_id}*")
    scene.assert_they_go_on(others)


def test_no_job_starts_while_suspended_and_running_jobs_go_on(scene):
    scene.rq("suspend")
    time.sleep(1)  # the worker looks four times a second
    late = scene.producer.submit(agent_id="late", prompt="say hello", max_tokens=8)
    scene.assert_they_go_on(scene.tickets)
    time.sleep(1)
    assert scene.places(late) == ["generate"]
    scene.rq("resume")
    assert late.result(timeout_s=30).text == "hello"


def test_a_stopped_job_that_is_requeued_runs_again(scene, connection):
    victim, *others = scene.tickets
    send_stop_job_command(connection, victim.job_id, serializer=JSONSerializer)
    scene.worker.wait_for(lambda: scene.places(victim) == ["failed"])
    scene.rq("requeue", "--queue", "generate", "--serializer", "json", victim.job_id)
    scene.worker.wait_for(lambda: scene.places(victim) == ["wip"])
    scene.assert_they_go_on([victim, *others])


@pytest.mark.parametrize("how", ["send_shutdown_command", "SIGTERM"])
def test_a_worker_told_to_leave_claims_no_more_and_gives_back_in_order(scene, connection, how):
    [name] = [key.rpartition(":")[2] for key in get_keys(connection=connection)]
    if how == "SIGTERM":
        scene.worker.signal(signal.SIGTERM)
    else:
        send_shutdown_command(connection, name)
    late = scene.endless("late")
    assert scene.worker.wait() == 0, scene.worker.log
    queued = [job_id.decode() for job_id in connection.lrange("rq:queue:generate", 0, -1)]
    assert queued == [ticket.job_id for ticket in (*scene.tickets, late)]
    assert not connection.keys("rq:workers*")
