"""`stoker trust`: what it shows, the verdicts it counts, and what it asks before it forgets."""

import json

import pytest
from tests.producer.played_worker import PlayedWorker, result_fields

from stoker_shared.trust import Counts
from stoker_shared.wire import TRUST_KEY

pytestmark = pytest.mark.server


@pytest.fixture(autouse=True)
def verdicts(connection):
    connection.hset(TRUST_KEY, mapping={"invoices small": "3 1", "letters small": "1 1", "letters large": "1 0"})


def test_a_model_without_verdicts_is_named(stoker):
    assert stoker("trust", "ls", "smal") == (0, "no verdicts on smal in all classes\n", "")
    shown = stoker("trust", "ls", "small")[1]
    assert "invoices" in shown
    assert "large" not in shown
    assert stoker("trust", "ls", "--task", "poems") == (0, "no verdicts on all models in class poems\n", "")


def test_the_question_names_what_would_be_forgotten_and_no_forgets_nothing(stoker, connection):
    code, out, err = stoker("trust", "reset", "small", "--task", "invoices", stdin=b"n\n")
    assert (code, out) == (1, "")
    assert "Forget the verdicts on small in class invoices?" in err
    assert "Forget the verdicts on all models in class letters?" in stoker("trust", "reset", "--task", "letters")[2]
    assert "Forget the verdicts on all models in all classes?" in stoker("trust", "reset")[2]
    assert connection.hlen(TRUST_KEY) == 3


def test_what_was_forgotten_is_counted(stoker):
    code, out, _ = stoker("trust", "reset", "small", "--task", "invoices", stdin=b"y\n")
    assert (code, out) == (0, "forgot the verdicts on 1 pair of a model and a class\n")
    assert stoker("trust", "reset", "--yes")[1] == "forgot the verdicts on 2 pairs of a model and a class\n"
    assert stoker("trust", "reset", "--yes")[1] == "there are no such verdicts\n"


def test_a_persons_verdict_on_an_answer_counts_once(stoker, connection, producer):
    job_id = producer.submit(prompt="p", task="poems").job_id
    worker = PlayedWorker(connection)
    worker.finish(job_id, {**result_fields(job_id), "task": "poems"})

    def rejected() -> float:
        return Counts.parsed(connection.hget(TRUST_KEY, "poems scripted")).rejected

    assert stoker("trust", "reject", job_id) == (0, "rejected\n", "")
    assert rejected() == 1
    assert json.loads(stoker("trust", "reject", job_id, "--json")[1]) == {"job_id": job_id, "counted": True}
    assert stoker("trust", "accept", job_id) == (1, "the opposite verdict was given before\n", "")
    assert rejected() == 1


def test_a_verdict_on_a_job_that_is_not_there_is_an_error(stoker):
    code, out, err = stoker("trust", "accept", "nothing")
    assert (code, out) == (1, "")
    assert err.startswith("JobNotFound: job nothing: not found")
