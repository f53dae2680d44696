"""`stoker trust`: what it shows, and what it asks before it forgets."""

import pytest
from redis import Redis

from stoker_shared.wire import TRUST_KEY

pytestmark = pytest.mark.server


@pytest.fixture
def connection(redis_url):
    with Redis.from_url(redis_url) as connection:
        connection.hset(TRUST_KEY, mapping={"invoices small": "3 1", "letters small": "1 1", "letters large": "1 0"})
        yield connection


def test_a_model_without_verdicts_is_named(stoker, connection):
    assert stoker("trust", "show", "smal") == (0, "no verdicts on 'smal'\n", "")
    assert "invoices" in stoker("trust", "show", "small")[1]
    assert stoker("trust", "ls", "--task", "poems") == (0, "no verdicts in class 'poems'\n", "")


def test_the_question_names_what_would_be_forgotten_and_no_forgets_nothing(stoker, connection):
    code, out, err = stoker("trust", "reset", "small", "--task", "invoices", stdin=b"n\n")
    assert (code, out) == (1, "")
    assert "Forget the verdicts on small in class invoices?" in err
    assert "Forget the verdicts on all models in class letters?" in stoker("trust", "reset", "--task", "letters")[2]
    assert "Forget the verdicts on all models in all classes?" in stoker("trust", "reset")[2]
    assert connection.hlen(TRUST_KEY) == 3


def test_what_was_forgotten_is_counted(stoker, connection):
    code, out, _ = stoker("trust", "reset", "small", "--task", "invoices", stdin=b"y\n")
    assert (code, out) == (0, "forgot the verdicts on 1 pair of a model and a class\n")
    assert stoker("trust", "reset", "--yes")[1] == "forgot the verdicts on 2 pairs of a model and a class\n"
    assert stoker("trust", "reset", "--yes")[1] == "there are no such verdicts\n"
