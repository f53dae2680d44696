"""A cancel that was answered true has ended the job, whatever its worker was doing with it."""

import json
import threading
from contextlib import suppress

import pytest
from redis.client import Pipeline
from redis.exceptions import WatchError
from rq import Retry
from tests.worker.queue.ends import drop, fail, finish, give_back, stop
from tests.worker.queue.looking import places
from tests.worker.queue.members import claim, die, ids, impatient, recovered
from tests.worker.queue.test_cascade import ACCEPTED, REJECTED, ROUTE

from stoker.cli import main
from stoker_shared.errors import EngineFailed, GenerationTimedOut, OwnershipLost
from stoker_shared.wire import FIELD_SAVING, TASK_PATH

pytestmark = pytest.mark.server

REQUEST = {"v": 5, "agent_id": "a", "cache": "read", "prompt": "p", "check": {"contains": ["x"]}, "route": ROUTE}
WAYS_ON = {
    "fails": lambda job: fail(job, EngineFailed("x")),
    "times out": lambda job: fail(job, GenerationTimedOut("x"), "partial"),
    "finishes": lambda job: finish(job, ACCEPTED),
    "goes on to another model": lambda job: finish(job, REJECTED),
    "is given back at a stop": lambda job: give_back([job], counts_as_attempt=False),
    "is given back by a broken engine": lambda job: give_back([job], counts_as_attempt=True, alone=True),
    "is stopped on its worker's side": stop,
}
RETRIES = {"at once": {"retry": Retry(max=3)}, "later": {"retry": Retry(max=3, interval=60)}, "never": {}}


def enqueue(plain, job_id="job", agent_id="a", **options):
    plain.enqueue(TASK_PATH, kwargs={"request": {**REQUEST, "agent_id": agent_id}}, job_id=job_id, **options)


def go_on(job, way):
    try:
        with suppress(OwnershipLost):
            WAYS_ON[way](job)
    finally:
        drop(job)


@pytest.mark.parametrize("retries", RETRIES)
@pytest.mark.parametrize("way", WAYS_ON)
def test_a_canceled_job_runs_no_more_whatever_its_worker_does_with_it(
    connection, producer, plain, queue, join, way, retries
):
    enqueue(plain, **RETRIES[retries])
    [job] = claim(queue)
    assert producer.ticket("job").cancel() is True
    go_on(job, way)
    assert places(connection, "job") == ["canceled"]
    assert connection.hget("rq:job:job", "status") == b"canceled"
    assert claim(queue) == claim(join("large", queues="large")) == []
    assert not list(connection.scan_iter("rq:execution*"))


@pytest.mark.parametrize("way", WAYS_ON)
def test_a_cancel_during_the_last_write_of_a_run_ends_the_job_or_finds_that_it_has_ended(
    connection, producer, plain, queue, join, way
):
    """Both at once: the two writes meet in every order."""
    large = join("large", queues="large")
    for n in range(15):
        enqueue(plain, job_id=f"job-{n}", **RETRIES["at once"])
        [job] = claim(queue)
        answers = []
        canceling = threading.Thread(
            target=lambda n=n, answers=answers: answers.append(producer.ticket(f"job-{n}").cancel())
        )
        canceling.start()
        go_on(job, way)
        canceling.join()
        state = connection.hget(f"rq:job:job-{n}", "status")
        assert (state == b"canceled") == answers[0]
        assert answers[0] or state in (b"finished", b"stopped")
        assert claim(queue) == claim(large) == []


@pytest.mark.parametrize("ttl", ["x", "", "1.5", "1e9", "9" * 40, "-9", "\x00", "nan", "{}", "\u0663"])
def test_a_job_that_is_kept_for_no_time_that_can_be_read_is_canceled_like_any_other(connection, producer, plain, ttl):
    enqueue(plain)
    connection.hset("rq:job:job", "failure_ttl", ttl)
    assert producer.ticket("job").cancel() is True
    assert places(connection, "job") == ["canceled"]
    assert connection.ttl("rq:job:job") == (-1 if ttl == "-9" else 7 * 86_400)


def test_a_job_canceled_after_its_workers_death_is_not_put_back(connection, producer, plain, join):
    dead, alive = join("dead"), impatient(join("alive"))
    enqueue(plain)
    enqueue(plain, job_id="other", agent_id="b")
    assert ids(claim(dead)) == ["job", "other"]
    die(dead)
    assert producer.ticket("job").cancel() is True
    assert recovered(alive) == 1
    assert ids(claim(alive)) == ["other"]
    assert places(connection, "job") == ["canceled"]


def test_a_cancel_is_refused_once_the_turn_is_being_saved_which_does_not_begin_after_one(
    connection, producer, plain, queue
):
    for job_id in ("job", "canceled"):
        enqueue(plain, job_id, agent_id=job_id)
    job, canceled = claim(queue)
    job.begin_save()
    assert (producer.ticket("job").cancel(), producer.ticket("canceled").cancel()) == (False, True)
    with pytest.raises(OwnershipLost):
        canceled.begin_save()
    finish(job, ACCEPTED)
    assert places(connection, "job") == ["finished"]


def test_a_cancel_is_refused_after_the_worker_died_in_its_save(connection, producer, plain, join):
    """Whether the turn was saved is known to the next worker only, which answers from it."""
    dead, alive = join("dead"), impatient(join("alive"))
    enqueue(plain)
    [job] = claim(dead)
    job.begin_save()
    die(dead)
    assert recovered(alive) == 1
    assert producer.ticket("job").cancel() is False
    [job] = claim(alive)
    assert producer.ticket("job").cancel() is False
    finish(job, ACCEPTED)
    assert places(connection, "job") == ["finished"]


@pytest.mark.parametrize("then", ["fails", "goes on to another model", "is enqueued anew"])
def test_a_job_can_be_canceled_again_after_a_run_whose_turn_was_not_saved(producer, plain, queue, then):
    enqueue(plain, **RETRIES["at once"])
    [job] = claim(queue)
    job.begin_save()
    if then == "is enqueued anew":
        enqueue(plain)
    else:
        WAYS_ON[then](job)
    assert producer.ticket("job").cancel() is True


def test_a_cancel_whose_reply_was_lost_is_answered_true(producer, plain, monkeypatch):
    """redis-py reports a lost reply to a transaction with watched keys as a `WatchError`."""
    enqueue(plain)
    execute, lost = Pipeline.execute, [WatchError("the connection was lost")]

    def loses_one_reply(pipeline, *arguments, **options):
        replies = execute(pipeline, *arguments, **options)
        if lost:
            raise lost.pop()
        return replies

    monkeypatch.setattr(Pipeline, "execute", loses_one_reply)
    assert producer.ticket("job").cancel() is True
    assert producer.ticket("job").cancel() is False


@pytest.fixture
def batch(redis_url, tmp_path, monkeypatch, capsys):
    """A batch of 20 lines in Redis, one for each agent; returns a command's exit code and what it prints."""
    monkeypatch.chdir(tmp_path)
    lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions"} for n in range(20)]
    bodies = [{"model": "m", "prompt": "p", "user": f"agent {n}"} for n in range(20)]
    text = "\n".join(json.dumps({**line, "body": body}) for line, body in zip(lines, bodies, strict=True))
    (tmp_path / "in.jsonl").write_text(text)

    def command(*arguments):
        with pytest.raises(SystemExit) as left:
            main(["--redis", redis_url, "batch", *arguments])
        captured = capsys.readouterr()
        return left.value.code, captured.out + captured.err

    assert command("submit", "in.jsonl", "--any-model", "--name", "b")[0] == 0
    return command


def interrupted(job_id):
    raise KeyboardInterrupt


def test_no_line_of_a_canceled_batch_is_run_though_the_client_was_interrupted(
    connection, queue, batch, monkeypatch, tmp_path
):
    monkeypatch.setattr("stoker.batch.record.cancel_job", interrupted)
    for key in list(connection.scan_iter("rq:job:b-*"))[:3]:
        connection.hset(key, FIELD_SAVING, "2020-01-01T00:00:00Z")  # of an earlier job of this id
    code, printed = batch("cancel", "b")
    assert code != 0
    assert "is canceled" in printed
    for _ in range(20):
        assert claim(queue) == []
    job_ids = [key.decode().removeprefix("rq:job:") for key in connection.scan_iter("rq:job:b-*")]
    assert [places(connection, job_id) for job_id in job_ids] == [["canceled"]] * 20
    assert all(0 < connection.ttl(f"rq:job:{job_id}") <= 7 * 86_400 for job_id in job_ids)
    assert batch("fetch", "b", "--out", "out.jsonl")[0] == 3
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [answer["error"]["code"] for answer in answers] == ["batch_cancelled"] * 20


def test_a_line_that_runs_when_its_batch_is_canceled_is_not_retried_or_put_back(connection, queue, batch, monkeypatch):
    monkeypatch.setattr("stoker.batch.record.cancel_job", interrupted)
    first, second, third = claim(queue, 3)
    batch("cancel", "b")
    give_back([first], counts_as_attempt=False)
    finish(second, ACCEPTED)
    third.begin_save()
    give_back([third], counts_as_attempt=True)
    [again] = claim(queue, 2)
    assert again.job_id == third.job_id  # its turn may have been saved
    finish(again, ACCEPTED)
    for _ in range(20):
        assert claim(queue) == []
    assert places(connection, first.job_id) == ["canceled"]
    assert places(connection, second.job_id) == ["finished"]


def test_a_record_without_a_name_cancels_no_job(connection, plain, queue):
    enqueue(plain)
    connection.hset("stoker:batch:", "canceled", "1")
    assert [job.job_id for job in claim(queue)] == ["job"]


def test_a_job_that_was_asked_to_stop_goes_back_if_its_turn_may_have_been_saved(connection, producer, queue):
    """The next run knows, or sees to it that the turn does not arrive later."""
    for job_id in ("saves", "runs"):
        producer.submit(agent_id=job_id, prompt="x", job_id=job_id)
    saves, runs = claim(queue)
    saves.begin_save()
    for job in (saves, runs):
        queue._registration.in_flight.ask_to_stop(job.job_id)
    assert give_back([saves, runs], counts_as_attempt=False) == 1
    assert (places(connection, "saves"), places(connection, "runs")) == (["generate"], ["failed"])
    [again] = claim(queue)
    assert again.was_saving
