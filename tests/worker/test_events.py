"""The log lines of jobs, as text and as JSON, with nothing of a request; and those of an outage."""

import io
import json
import logging
import time

import pytest

from stoker_shared.errors import AgentVersionNotSaved, RedisUnavailable, TemplateError
from stoker_worker.cli.log_lines import CHATTY, configure_logging
from stoker_worker.events import Outage, log_answer, log_failure
from stoker_worker.settings import read_settings

RESULT = {
    "text": "PatientZero",
    "finish_reason": "length",
    "usage": {"prompt_tokens": 23, "cached_tokens": 7, "completion_tokens": 5},
    "timing": {"total_s": 0.25},
    "cache": {"agent_version": 3},
}


@pytest.fixture
def logged(monkeypatch):
    """Configures the log as a worker does, and returns what it writes."""
    root, stderr = logging.getLogger(), io.StringIO()
    level = root.level

    def configure(**settings):
        monkeypatch.setattr(root, "handlers", [])  # pytest's own
        monkeypatch.setattr("sys.stderr", stderr)
        configure_logging(read_settings(settings))
        return stderr

    yield configure
    root.setLevel(level)
    for chatty in CHATTY:
        logging.getLogger(chatty).setLevel(logging.NOTSET)


def test_a_finished_job_is_one_line_of_text(logged):
    out = logged()
    log_answer("finished", "j-1", RESULT, agent="a b")
    line = out.getvalue().partition("MainThread ")[2]
    assert line == (
        "finished job=j-1 agent='a b' prompt=23 cached=7 generated=5 seconds=0.250 ended_by=length version=3\n"
    )


def test_a_name_in_a_message_makes_no_line_of_its_own_and_gives_no_orders(logged):
    out = logged()
    log = logging.getLogger("stoker_worker")
    log.warning("queue %s", "q\n2026-01-01 00:00:00,000 I MainThread stopped\x1b[2J\x9b\u202e")
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        log.exception("broken")
    message, *traceback = out.getvalue().splitlines()
    assert message.endswith(r"queue q\n2026-01-01 00:00:00,000 I MainThread stopped\x1b[2J\x9b\u202e")
    assert len(traceback) > 3
    assert traceback[-1] == r"ValueError: \x1b[2J"


def test_as_json_each_line_is_an_object_with_the_same_fields(logged):
    out = logged(log_format="json")
    log_answer("finished", "j-1", {**RESULT, "cache": {}}, agent=None)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("stoker_worker").exception("broken")
    event, error = map(json.loads, out.getvalue().splitlines())
    assert event["time"].endswith("Z")
    assert {name: event[name] for name in ("level", "event", "job", "agent", "prompt", "seconds", "version")} == {
        "level": "info", "event": "finished", "job": "j-1", "agent": None, "prompt": 23, "seconds": 0.25,
        "version": None,
    }  # fmt: skip
    assert "two\nlines" in error["traceback"]


def test_a_failure_has_its_kind_and_only_a_reason_that_can_quote_no_request(logged):
    out = logged(quiet=True)
    log_answer("finished", "j-0", RESULT)
    log_failure("j-1", TemplateError("the template refused: PatientZero"), agent="a")
    log_failure("j-2", ValueError("PatientZero"))
    log_failure("j-3", AgentVersionNotSaved("No space left on device"))
    lines = [line.partition("MainThread ")[2] for line in out.getvalue().splitlines()]
    assert lines == [
        "failed job=j-1 agent=a error=TemplateError",
        "failed job=j-2 error=ValueError",
        "failed job=j-3 error=AgentVersionNotSaved reason='No space left on device'",
    ]


def test_an_outage_is_one_line_at_its_beginning_and_one_at_its_end(monkeypatch, caplog):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    outage = Outage("Redis")
    outage.answered()
    for _ in range(20):
        outage.met(RedisUnavailable("Redis is away (MISCONF: No space left on device)"))
        clock[0] += 0.5
        outage.answered()  # the heartbeat comes through, other calls do not
    clock[0] += 2
    outage.answered()
    outage.answered()
    assert caplog.messages == [
        "outage begins: Redis is away (MISCONF: No space left on device); running jobs go on",
        "outage over: Redis works again after 12.0 s",
    ]
    outage.met(RedisUnavailable("again"))
    assert len(caplog.messages) == 3
