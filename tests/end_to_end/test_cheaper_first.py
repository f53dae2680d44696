"""Two workers with a model each: jobs begin with the cheaper one, go on to the dearer one, and trust follows."""

import json

import pytest
from tests.end_to_end.macs import Macs
from tests.support.wait import wait_for

from stoker import InvalidRequest, NobodyServes, Producer
from stoker.batch.feeding import Feeder, ModelChoice
from stoker.cli import main
from stoker_shared.trust import Counts
from stoker_shared.wire import TRUST_KEY

pytestmark = pytest.mark.server

CHECK = {"contains": "yes"}
EASY, HARD = "say yes", "if large say yes else no"
BOTH = ["small", "large"]


@pytest.fixture
def workers(redis_url, tmp_path, producer):
    each = [("--queues", f"q-{model}", "--model", model) for model in BOTH]
    calm = {"STOKER_LEASE_TTL_S": "30", "STOKER_POLL_S": "0.01"}
    crew = Macs(redis_url, tmp_path, 2, "--scripted-steps-per-s", "2000", each=each, env=calm)
    wait_for(lambda: {worker.model for worker in producer.workers()} == set(BOTH))
    yield
    crew.end()


def attempts(result):
    return [(attempt.model, attempt.accepted) for attempt in result.attempts]


def trust(connection, model, task):
    return Counts.parsed(connection.hget(TRUST_KEY, f"{task} {model}"))


def test_jobs_begin_with_the_cheaper_model_and_end_with_one_that_passes(workers, producer, connection, redis_url):
    requests = [{"prompt": prompt, "check": CHECK, "task": task} for task, prompt in (("e", EASY), ("h", HARD)) * 20]
    tickets = producer.submit_many(requests, models=BOTH, min_trust=0.0)
    results = producer.results(tickets, timeout_s=60)
    assert [result.accepted for result in results] == [True] * 40
    assert [attempts(result) for result in results] == [[("small", True)], [("small", False), ("large", True)]] * 20
    assert all(attempt.seconds > 0 for attempt in results[1].attempts)
    assert results[1].attempts[0].reason == "contains: 'yes' is missing"
    # 20 verdicts each: all are there, each a little lighter than the next.
    assert trust(connection, "small", "e").total == pytest.approx(trust(connection, "large", "h").total)
    assert 18 < trust(connection, "small", "h").rejected < 20
    assert connection.llen("rq:queue:q-small") == connection.llen("rq:queue:q-large") == 0

    # Now small is known to be no good at the hard ones, and trusted with the easy ones.
    connection.hset(TRUST_KEY, "h small", "0.0000 90.0000")
    with Producer(redis_url) as later:  # it has not read the counts yet
        tickets = later.submit_many(requests, models=BOTH, min_trust=0.8)
        begun = [attempts(result)[0][0] for result in later.results(tickets, timeout_s=60)]
    assert begun[::2] == ["small"] * 20
    assert begun[1::2].count("large") > 15
    auto = producer.submit(prompt=EASY, check=CHECK, models="auto").result(timeout_s=60)
    assert auto.accepted
    assert auto.task == "short/latin"


def test_feedback_counts_once_and_in_place_of_the_check(workers, producer, connection):
    ticket = producer.submit(prompt=EASY, check=CHECK, models=BOTH, min_trust=0.0, task="t")
    ticket.result(timeout_s=60)
    assert trust(connection, "small", "t") == Counts(1, 0)
    assert ticket.feedback(accepted=False)
    assert ticket.feedback(accepted=False)
    assert not ticket.feedback(accepted=True)
    assert trust(connection, "small", "t") == Counts(0, 1)
    connection.hset(f"rq:job:{ticket.job_id}", "created_at", "2030-01-01T00:00:00Z")  # its id was used again
    assert ticket.feedback(accepted=True)
    unchecked = producer.submit(prompt=EASY, models=BOTH, task="u")
    model = unchecked.result(timeout_s=60).model
    assert unchecked.feedback(accepted=True)
    assert trust(connection, model, "u") == Counts(1, 0)
    plain = producer.submit(prompt=EASY, queue="q-small")
    plain.result(timeout_s=60)
    with pytest.raises(InvalidRequest, match="none of 'task', 'check' and 'models'"):
        plain.feedback(accepted=True)
    labelled = producer.submit(prompt=EASY, queue="q-small", task="v")
    labelled.result(timeout_s=60)
    assert labelled.feedback(accepted=True)
    assert trust(connection, "small", "v") == Counts(1, 0)


def test_a_call_that_is_repeated_gets_the_same_job_wherever_it_is(workers, producer):
    def submit():
        return producer.submit(prompt=HARD, check=CHECK, models=BOTH, min_trust=0.0, job_id="mine", task="t")

    assert submit().result(timeout_s=60).model == "large"
    assert submit().result(timeout_s=60).model == "large"


def line(number, prompt):
    body = {"model": "gpt-9", "prompt": prompt, "max_tokens": 20}
    return {"custom_id": f"line {number}", "method": "POST", "url": "/v1/completions", "body": body}


def run_batch(redis_url, folder, lines, *options, check=CHECK, ends=0):
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    words = ["--redis", redis_url, "batch", "run", str(folder / "in.jsonl"), "--out", str(folder / "out.jsonl")]
    if check:
        (folder / "check.json").write_text(json.dumps(check))
        words += ["--check", str(folder / "check.json")]
    with pytest.raises(SystemExit) as left:
        main([*words, "--models", "small,large", *options])
    assert left.value.code == ends


def test_a_batch_reports_the_part_of_each_model(workers, redis_url, connection, tmp_path, capsys):
    lines = [line(n, (EASY, EASY, HARD, "say no")[n % 4]) for n in range(40)]
    for _ in range(2):  # the second time, all answers are in the file already
        run_batch(redis_url, tmp_path, lines, "--min-trust", "0", "--json")
        report = json.loads(capsys.readouterr().out)
        assert (report["succeeded"], report["checked"], report["accepted"]) == (40, 40, 30)
        small, large = (report["models"][model] for model in BOTH)
        assert (small["asked"], small["accepted"], large["asked"], large["accepted"]) == (40, 20, 20, 10)
        assert all(report["models"][model]["seconds"] > 0 for model in BOTH)
    answers = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    asked = {answer["custom_id"]: len(answer["response"]["body"]["attempts"]) for answer in answers}
    assert [asked[f"line {n}"] for n in range(40)] == [1, 1, 2, 2] * 10
    # Nothing is left: neither in the first queue nor where the lines went on to.
    assert not [key for key in connection.keys("rq:*") if key.startswith((b"rq:job:", b"rq:finished:", b"rq:results:"))]


def test_a_batch_learns_from_its_first_lines(workers, redis_url, tmp_path, monkeypatch, capsys):
    """It sends few at a time: the model that a line begins with is chosen when it is sent."""
    monkeypatch.setattr("stoker.cascade.routing._LOOK_S", 0.0)
    run_batch(redis_url, tmp_path, [line(n, HARD) for n in range(300)], "--min-trust", "0.6", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["accepted"] == 300
    assert report["models"]["small"]["asked"] < 90  # about 120, if all were sent at once


def test_a_batch_goes_on_while_a_worker_is_away(workers, redis_url, tmp_path, monkeypatch):
    feed, n_times = Feeder.feed, [0]

    def away(*_):
        raise NobodyServes("no live worker serves model 'small'")

    def away_at_times(self, record, room, done):
        n_times[0] += 1
        if n_times[0] == 2:  # the command is run again while nobody serves the models
            monkeypatch.setattr(ModelChoice, "queues", away)
            raise KeyboardInterrupt
        if n_times[0] in (1, 3):
            away()
        return feed(self, record, room, done)

    monkeypatch.setattr(Feeder, "feed", away_at_times)
    for code in (130, 0):
        run_batch(redis_url, tmp_path, [line(n, EASY) for n in range(6)], ends=code)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize(
    ("check", "why"),
    [
        (None, "--models and --check go together"),
        ({"contians": "yes"}, "check.json has no condition of a check (json_schema, regex, contains,"),
    ],
)
def test_a_batch_needs_its_models_and_a_check_or_a_schema(redis_url, tmp_path, capsys, check, why):
    run_batch(redis_url, tmp_path, [line(0, EASY)], check=check, ends=2)
    assert why in capsys.readouterr().err
