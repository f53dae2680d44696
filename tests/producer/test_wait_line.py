"""A command that waits tells on a terminal what for: the job's place and progress, and why no job begins."""

import time

import pytest
from tests.producer.played_worker import publish
from tests.support.wait import wait_for

from stoker import wait_line
from stoker.wait_line import shown_wait
from stoker_shared.errors import RedisUnavailable


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(wait_line, "_SILENT_S", 0.01)
    monkeypatch.setattr(wait_line, "_DRAW_EVERY_S", 0.01)


def until(terminal, text):
    wait_for(lambda: text in terminal.getvalue(), 10)
    return terminal.getvalue()


def test_the_line_is_drawn_anew_and_gone_when_the_wait_ends(as_terminal):
    terminal = as_terminal(100)
    looks = iter(["queued", "no server"])

    def look():
        if (text := next(looks, "started")) == "no server":
            raise RedisUnavailable(text)
        return text

    with shown_wait(look):
        drawn = until(terminal, "started")
    assert drawn.index(": queued") < drawn.index(": no server") < drawn.index(": started")
    assert terminal.getvalue().endswith("\r\x1b[2K")


def test_nothing_is_drawn_where_nobody_looks(as_terminal, capsys):
    with shown_wait(lambda: "queued"):
        time.sleep(0.05)
    assert capsys.readouterr().err == ""
    terminal = as_terminal(100)
    with shown_wait(lambda: "queued", quiet=True):
        time.sleep(0.05)
    assert terminal.getvalue() == ""


@pytest.mark.server
@pytest.mark.parametrize(
    "command", ["submit --message m --wait", "submit --message m --stream", "result mine", "agent info a"]
)
def test_every_command_that_waits_shows_the_jobs_state(stoker, as_terminal, command):
    stoker("submit", "--message", "m", "--job-id", "mine")
    terminal = as_terminal(200)
    assert stoker(*command.split(), "--timeout-s", "0.5")[0] == 1
    place = "next" if "mine" in command else "1 ahead of it"
    assert f"s: queued, {place}; no worker listens to 'generate', nor to any queue" in terminal.getvalue()


@pytest.mark.server
def test_a_model_that_loads_and_a_queue_that_is_suspended_are_the_reasons(stoker, connection):
    stoker("submit", "--message", "m", "--job-id", "mine")
    figures = {"at": 1.0, "hit_share": None}
    figures |= dict.fromkeys(("tokens_per_s", "jobs_per_min", "in_flight", "in_batch", "done", "failed"), 0)
    publish(connection, "mac", "generate", model=None)
    assert "; the worker of 'generate' still loads its model" in stoker("status", "mine")[1]
    assert "still loads its model" in stoker("result", "mine", "--timeout-s", "0")[2]
    publish(connection, "mac", "generate", now={**figures, "suspended": True})
    assert "`rq resume`" in stoker("status", "mine")[1]
    publish(connection, "mac", "generate", now=figures)
    assert stoker("status", "mine")[1] == "queued, next\n"
