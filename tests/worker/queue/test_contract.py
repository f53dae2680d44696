"""Every outcome leaves the keys that RQ's own worker leaves. Each story runs under RQ's SimpleWorker and under ours on
a real server; the test compares all `rq:*` keys, and `INTENDED` lists every allowed difference."""

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from rq import Retry
from rq.command import send_stop_job_command
from rq.exceptions import DuplicateJobError
from rq.group import Group
from rq.job import Dependency, Job
from rq.queue import Queue
from rq.serializers import JSONSerializer
from tests.worker.queue.players import WAIT, OurPlayer, Player, StockPlayer
from tests.worker.queue.rq_dump import differences

from stoker_shared.wire import TASK_PATH

pytestmark = [pytest.mark.server, pytest.mark.slow]

# path in the dump, our value, RQ's value, and the reason. docs/lifecycle.md has the same list.
INTENDED = [
    (r"rq:job:\S+ value exc_info|rq:results:\S+ value entry \d exc_string", r"\w+: .*", r"[\w.]+: .*",
     "one line for people, not a traceback through the worker's code"),
    (r"rq:(finished|job|results):\S+ (value \S+|expires_within_s)", "1440 min", "9 min",
     "a result whose producer named no time is kept for a day, not for 500 s"),
    (r"rq:job:\S+ value meta", r'\{"partial": .*', "None",
     "a job that times out keeps the text it had"),
    (r"rq:queue:generate:intermediate", "None", r".*\['job'\].*",
     "an id whose job expired in the queue is dropped when it is claimed; RQ leaves it to a later cleaning"),
]  # fmt: skip

STORIES: dict[str, Callable[[Player], None]] = {}


def story(play: Callable[[Player], None]) -> Callable[[Player], None]:
    STORIES[play.__name__] = play
    return play


@story
def results_that_are_kept_for_a_time_by_default_for_ever_and_not_at_all(player):
    for job_id, result_ttl in (("some time", 600), ("default", None), ("ever", -1), ("never", 0)):
        player.enqueue("say hello", job_id.replace(" ", "-"), result_ttl=result_ttl, ttl=3600)
    player.work()


@story
def failures_at_once_and_after_retries_that_are_kept_for_a_time_and_not_at_all(player):
    player.enqueue("fail because")
    player.enqueue("fail because", "retried", retry=Retry(max=2))
    player.enqueue("fail because", "some-time", failure_ttl=600)
    player.enqueue("fail because", "never", failure_ttl=0)
    player.work()
    player.connection.zrem("rq:failed:generate", "never")  # it is over at once: a cleaning may have come or not


@story
def a_job_that_is_retried_after_intervals(player):
    player.enqueue("fail because", retry=Retry(max=2, interval=[120, 240]))
    for _ in range(3):
        player.work()
        player.look()
        player.make_due()


@story
def a_job_that_is_enqueued_for_later(player):
    request = {"agent_id": "a", "prompt": "say hello"}
    player.queue.enqueue_in(
        timedelta(hours=1), TASK_PATH, request=request, job_id="job", description="described", result_ttl=600, ttl=7200
    )
    player.work()
    player.look()
    player.make_due()
    player.work()


@story
def dependents_of_a_job_that_succeeds_here_and_in_another_queue(player):
    first = player.enqueue("say first", "first", result_ttl=600)
    player.enqueue("say second", "second", result_ttl=600, depends_on="first")
    other = Queue("other", connection=player.connection, serializer=JSONSerializer)
    other.enqueue(TASK_PATH, request={}, job_id="third", description="described", depends_on=first)
    player.work()


@story
def dependents_of_a_job_that_fails_of_which_one_allows_it(player):
    first = player.enqueue("fail first", "first")
    player.enqueue("say second", "second", depends_on="first")
    dependency = Dependency(jobs=[first], allow_failure=True)
    player.enqueue("say third", "third", result_ttl=600, depends_on=dependency)
    player.work()


@story
def a_dependent_of_two_jobs_of_which_one_waits(player):
    player.enqueue("say first", "first", result_ttl=600)
    player.enqueue("fail second", "second", retry=Retry(max=1, interval=120))
    player.enqueue("say third", "third", depends_on=["first", "second"])
    player.work()


@story
def a_group(player):
    group = Group.create(connection=player.connection, name="group")
    request = {"agent_id": "a", "prompt": "say hello"}
    jobs = [
        Queue.prepare_data(TASK_PATH, kwargs={"request": request}, job_id=f"job-{n}", description="-", result_ttl=ttl)
        for n, ttl in enumerate([600, 600, 0])
    ]
    group.enqueue_many(player.queue, jobs)
    player.work()


@story
def a_unique_id_that_is_enqueued_again_before_and_after_its_end(player):
    for _ in range(2):
        player.enqueue("say hello", result_ttl=600, unique=True)
        with pytest.raises(DuplicateJobError):
            player.enqueue("say hello", result_ttl=600, unique=True)
        player.work()
        with pytest.raises(DuplicateJobError):
            player.enqueue("say hello", result_ttl=600, unique=True)
        Job.fetch("job", player.connection, JSONSerializer).delete()


@story
def a_job_whose_time_in_the_queue_has_passed(player):
    player.enqueue("say hello", ttl=3600)
    player.enqueue("say hello", "other", result_ttl=600, ttl=3600)
    player.connection.delete("rq:job:job")  # as when it expires
    player.work()


@story
def jobs_that_time_out_of_which_one_is_retried(player):
    player.enqueue(WAIT, job_timeout=1)
    player.enqueue(WAIT, "retried", job_timeout=1, retry=Retry(max=1, interval=120))
    player.work()


@story
def a_job_that_is_stopped(player):
    player.enqueue(WAIT, retry=Retry(max=3))
    stop = player.when_started(
        "job", lambda: send_stop_job_command(player.connection, "job", serializer=JSONSerializer)
    )
    player.work()
    stop.join()


@story
def a_job_that_is_canceled_while_it_waits(player):
    job = player.enqueue("say hello", "canceled")
    player.enqueue("say hello", "other", result_ttl=600)
    player.enqueue("say hello", "dependent", result_ttl=600, depends_on=job)
    job.cancel()
    player.work()


@story
def a_failed_job_that_an_operator_requeues(player):
    player.enqueue("fail because", retry=Retry(max=1))
    player.work()
    player.look()
    Job.fetch("job", player.connection, JSONSerializer).requeue()
    player.look()
    player.work()


def is_intended(path: str, ours: object, theirs: object) -> bool:
    return any(
        all(re.fullmatch(p, str(v)) for p, v in ((where, path), (our_value, ours), (their_value, theirs)))
        for where, our_value, their_value, _ in INTENDED
    )


@pytest.mark.parametrize("name", STORIES)
@pytest.mark.filterwarnings("default::DeprecationWarning")
def test_our_worker_leaves_the_keys_that_rqs_own_worker_leaves(name, redis_url, tmp_path, monkeypatch):
    looks = []
    for make in (lambda: OurPlayer(redis_url, tmp_path / "store"), lambda: StockPlayer(redis_url, monkeypatch)):
        player = make()
        STORIES[name](player)
        player.look()
        player.connection.close()
        looks.append(player.looks)
    unexplained = [
        f"look {number}: {path}: ours {our_value!r}, RQ's {their_value!r}"
        for number, (ours, theirs) in enumerate(zip(*looks, strict=True), start=1)
        for path, our_value, their_value in differences(ours, theirs)
        if not is_intended(path, our_value, their_value)
    ]
    assert not unexplained, "\n".join(unexplained)


def test_the_page_lists_the_intended_differences_and_no_others():
    page = (Path(__file__).resolve().parents[3] / "docs" / "lifecycle.md").read_text()
    _, section = page.split("## Where RQ's own worker leaves other keys")
    first_table = section.split("\n\n")[2].splitlines()
    assert len(first_table) - 2 == len(INTENDED)
