"""Settings: read once, unknown names refused, passwords never shown."""

import pytest

from stoker_shared.environment import VARIABLES
from stoker_worker.cli.main import run
from stoker_worker.queue.connect import _STANDBY_POLL_S
from stoker_worker.settings import read_settings


def test_settings_describe_themselves_without_the_password():
    settings = read_settings({"redis_url": "redis://:secret@host:1/0"})
    assert "secret" not in settings.describe()
    assert "redis://:***@host:1/0" in settings.describe()


@pytest.mark.parametrize("url", ["redis://host/0?password=secret&x=1", "redis://user:secret@host/0?password=secret"])
def test_passwords_in_the_query_are_not_shown_either(url):
    assert "secret" not in read_settings({"redis_url": url}).describe()


def test_a_lease_shorter_than_two_heartbeats_is_refused():
    with pytest.raises(ValueError, match="lease_ttl_s"):
        read_settings({"lease_ttl_s": 3.0, "heartbeat_s": 2.0})


def test_a_standby_elsewhere_takes_over_within_5_s_by_default():
    """The holder may have renewed its lease just before it died, and the standby have looked just before it ran out."""
    assert read_settings({}).lease_ttl_s + _STANDBY_POLL_S < 5


def test_options_win_over_the_environment_and_the_environment_over_defaults(monkeypatch):
    monkeypatch.setenv("STOKER_MAX_BATCH", "3")
    monkeypatch.setenv("STOKER_GRACE_S", "7")
    settings = read_settings({"max_batch": 5, "grace_s": None})
    assert (settings.max_batch, settings.grace_s, settings.poll_s) == (5, 7.0, 0.05)


def test_every_option_of_the_worker_is_also_a_variable(monkeypatch):
    options = {option.name for option in run.params}
    assert {f"STOKER_{name.upper()}" for name in options} <= VARIABLES
    for flag in ("burst", "standby", "verbose"):
        monkeypatch.setenv(f"STOKER_{flag.upper()}", "1")
    settings = read_settings(dict.fromkeys(options))
    assert settings.burst
    assert settings.standby
    assert settings.verbose


def test_limits_of_disk_and_memory_may_be_left_to_the_machine(monkeypatch):
    settings = read_settings({})
    assert (settings.store_max_bytes, settings.memory_max_bytes) == (None, None)
    monkeypatch.setenv("STOKER_STORE_MAX_BYTES", "1000000")
    assert read_settings({"memory_max_bytes": 0}).store_max_bytes == 1_000_000
    for wrong in ({"store_max_bytes": 0}, {"memory_max_bytes": -1}):
        with pytest.raises(ValueError, match="max_bytes"):
            read_settings(wrong)


def test_agents_are_kept_and_so_are_sixteen_versions_unless_told_otherwise(monkeypatch):
    settings = read_settings({})
    assert (settings.keep_versions, settings.agent_ttl_s) == (16, None)
    monkeypatch.setenv("STOKER_KEEP_VERSIONS", "1")
    for given, seconds in {"30d": 30 * 86_400, "12h": 43_200, "90m": 5400, "90": 90, "5s": 5}.items():
        monkeypatch.setenv("STOKER_AGENT_TTL", given)
        settings = read_settings({})
        assert (settings.keep_versions, settings.agent_ttl_s) == (1, seconds)
    for wrong in ("0", "-1", "1w", "", "1.5h", "9999d"):
        with pytest.raises(ValueError, match="a number and a unit"):
            read_settings({"agent_ttl": wrong})
    with pytest.raises(ValueError, match="keep_versions"):
        read_settings({"keep_versions": 0})


def test_an_unknown_name_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("STOKER_MAX_BACTH", "3")
    with pytest.raises(ValueError, match="STOKER_MAX_BACTH"):
        read_settings({})


@pytest.mark.parametrize("queues", ["", "a,,b", "a,a"])
def test_queue_lists_that_name_nothing_or_one_twice_are_refused(queues):
    with pytest.raises(ValueError, match="queues"):
        read_settings({"queues": queues})
