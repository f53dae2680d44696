"""An outage of Redis is two lines in the log, however many threads meet it how often."""

import time

import pytest

from stoker_shared.errors import RedisUnavailable
from stoker_worker.events.outage import Outage


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_an_outage_is_one_line_at_its_beginning_and_one_at_its_end(clock, caplog):
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
