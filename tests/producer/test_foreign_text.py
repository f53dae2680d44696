"""Whatever the fields of a job hold, no command gives the terminal orders."""

import json

import pytest
from tests.producer.played_worker import PlayedWorker, publish

from stoker_shared.wire import TRUST_KEY

pytestmark = pytest.mark.server

ORDER = "\x1b]0;title\x07\x9b2J\u202e"
SHOWN = r"\x1b]0;title\x07\x9b2J\u202e"


@pytest.fixture
def job_id(stoker):
    return stoker("submit", "--prompt", "hi")[1].strip()


def is_harmless(text):
    return not any(character in text for character in "\x1b\x07\x9b\u202e")


def test_the_state_of_a_job(stoker, connection, job_id):
    progress = {"progress": {"stage": f"decode{ORDER}\nfinished", "tokens": 1, "tokens_per_s": 1.0}}
    fields = {"status": f"started{ORDER}", "worker_name": f"w{ORDER}", "meta": json.dumps(progress)}
    connection.hset(f"rq:job:{job_id}", mapping=fields)
    code, out, _ = stoker("status", job_id)
    assert code == 0
    assert is_harmless(out)
    assert len(out.splitlines()) == 1
    assert f"started{SHOWN}" in out


def test_the_reason_of_a_failure(stoker, connection, job_id):
    PlayedWorker(connection).fail(job_id, f"TemplateError: bad{ORDER}")
    connection.hset(f"rq:job:{job_id}", "origin", f"q{ORDER}")
    (_, *of_result), (_, *of_status) = stoker("result", job_id), stoker("status", job_id)
    assert is_harmless("".join([*of_result, *of_status]))
    assert f"bad{SHOWN}" in of_result[1]


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("option", ["--wait", "--stream"])
def test_a_generated_text_is_escaped_for_a_terminal_and_exact_for_a_file(
    stoker, connection, monkeypatch, is_terminal, option
):
    given = ("submit", "--prompt", "hi", "--job-id", "mine")
    stoker(*given)
    connection.xadd("stoker:stream:mine", {"run": "1", "kind": "whole", "text": "one"})
    PlayedWorker(connection).finish("mine", text=f"one{ORDER}\n\ttwo")
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    code, out, _ = stoker(*given, option)
    assert (code, out) == (0, f"one{SHOWN if is_terminal else ORDER}\n\ttwo\n")


def test_agents_batches_models_and_workers(stoker, connection):
    publish(connection, f"stoker-w{ORDER}", f"q{ORDER}", host=ORDER, model=ORDER)
    connection.sadd("rq:queues", f"rq:queue:q{ORDER}")
    connection.rpush(f"rq:queue:q{ORDER}", f"job{ORDER}")
    connection.hset(TRUST_KEY, f"task{ORDER} model{ORDER}", "1.0 0.0")
    for command in (["status"], ["workers"], ["ls"], ["trust", "ls"], ["batch", "ls"], ["batch", "status", ORDER]):
        _, out, err = stoker(*command)
        assert is_harmless(out + err), command
    assert f"stoker-w{SHOWN}" in stoker("status")[1]
    assert f"model{SHOWN}" in stoker("trust", "ls")[1]


def test_the_warning_that_a_queue_has_no_worker(producer, connection):
    publish(connection, "stoker-w", f"q{ORDER}")
    warning = producer.unattended("other")
    assert warning is not None
    assert f"q{SHOWN}" in warning
    assert is_harmless(warning)


def test_errors(stoker):
    for command in (["result", f"no{ORDER}"], ["submit", "--prompt", "x", "--job-id", ORDER], [ORDER]):
        code, out, err = stoker(*command)
        assert code != 0
        assert is_harmless(out + err)
