"""Settings: read once, unknown names refused, passwords never shown."""

import json

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from stoker_worker.cli.main import main
from stoker_worker.queue.client import STANDBY_POLL_S
from stoker_worker.settings import WorkerSettings, read_settings, settings_in_force


def test_settings_describe_themselves_without_the_password():
    settings = read_settings({"redis_url": "redis://:secret@host:1/0"})
    assert "secret" not in settings.describe()
    assert "redis://:***@host:1/0" in settings.describe()


def test_a_redis_url_may_be_in_a_file(tmp_path):
    file = tmp_path / "a b.url"
    file.write_text("redis://:secret@host:1/0\n/the/lock\n")
    settings = read_settings({"redis_url": file.as_uri()})
    assert settings.redis_url == "redis://:secret@host:1/0"
    assert "secret" not in settings.describe()


@pytest.mark.parametrize("content", [None, b"", b"\nredis://:secret@h", b"redis://:secret@\xff", b"file:///secret"])
def test_a_file_without_a_redis_url_is_named_and_not_quoted(tmp_path, content):
    file = tmp_path / "redis.url"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValidationError, match=file.name) as refused:
        read_settings({"redis_url": file.as_uri()})
    assert "secret" not in "".join(error["msg"] for error in refused.value.errors())


def test_the_secret_that_somebody_wrote_into_the_url_of_a_shared_store_is_not_shown():
    assert "secret" not in read_settings({"shared_store": "s3://key:secret@bucket/prefix"}).describe()
    assert "=s3://bucket/prefix" in read_settings({"shared_store": "s3://bucket/prefix"}).describe()


@pytest.mark.parametrize(
    ("given", "named"),
    [({"lease_ttl_s": 3.0, "heartbeat_s": 2.0}, "lease_ttl_s"), ({"poll_s": 1.5}, "no dead worker is noticed")],
)
def test_a_lease_shorter_than_two_heartbeats_or_four_looks_is_refused(given, named):
    with pytest.raises(ValueError, match=named):
        read_settings(given)


def test_a_standby_elsewhere_takes_over_within_5_s_by_default():
    """The holder may have renewed its lease just before it died, and the standby have looked just before it ran out."""
    assert read_settings({}).lease_ttl_s + STANDBY_POLL_S < 5


def test_options_win_over_the_environment_and_the_environment_over_defaults(monkeypatch):
    monkeypatch.setenv("STOKER_MAX_BATCH", "3")
    monkeypatch.setenv("STOKER_GRACE_S", "7")
    monkeypatch.setenv("STOKER_BURST", "1")
    settings = read_settings({"max_batch": 5, "grace_s": None})
    assert (settings.max_batch, settings.grace_s, settings.burst, settings.poll_s) == (5, 7.0, True, 0.05)


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


def test_a_file_is_under_variables_and_options_and_the_origin_of_each_value_is_told(monkeypatch, tmp_path):
    file = tmp_path / "worker.toml"
    file.write_text(
        'max-batch = 3\ngrace_s = 4\npoll_s = 0.2\nqueues = ["a", "b"]\n[defaults]\ntemperature = 0.7\ntop_k = 20\n'
    )
    monkeypatch.setenv("STOKER_GRACE_S", "5")
    settings, origins = settings_in_force({"config": str(file), "poll_s": 0.3})
    assert (settings.max_batch, settings.grace_s, settings.poll_s, settings.queues) == (3, 5.0, 0.3, "a,b")
    assert settings.defaults == "temperature=0.7,top_k=20"
    names = ("max_batch", "grace_s", "poll_s", "burst")
    assert [origins[name] for name in names] == [str(file), "STOKER_GRACE_S", "option", "default"]


def test_the_file_in_the_usual_place_is_read_unless_another_one_or_none_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("STOKER_CONFIG")
    assert read_settings({}).max_batch is None
    usual = tmp_path / ".config" / "stoker" / "worker.toml"
    usual.parent.mkdir(parents=True)
    usual.write_text("max_batch = 3")
    assert (read_settings({}).max_batch, read_settings({}).config) == (3, usual)
    (tmp_path / "other.toml").write_text("")
    monkeypatch.setenv("STOKER_CONFIG", str(tmp_path / "other.toml"))
    assert read_settings({}).max_batch is None
    assert read_settings({"config": ""}).max_batch is None
    usual.write_text("not TOML")
    assert CliRunner().invoke(main, ["config", "--config", ""]).exit_code == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_bacth = 3", r"unknown settings: max_bacth \(did you mean max_batch\?\)"),
        ("max_batch = ", "is not TOML"),
        ("max_batch = 0", "max_batch"),
        ("config = 'x'", "unknown settings: config"),
        (None, "cannot read .*worker.toml: No such file"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path, content, message):
    file = tmp_path / "worker.toml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_settings({"config": str(file)})


def test_the_config_command_shows_every_setting_and_no_password(monkeypatch):
    monkeypatch.setenv("STOKER_REDIS_URL", "redis://:swordfish@host:1/0")
    shown = CliRunner().invoke(main, ["config", "--max-batch", "8"]).output
    assert "swordfish" not in shown
    lines = {line.split()[0]: line for line in shown.splitlines()}
    assert lines.keys() == WorkerSettings.model_fields.keys()
    assert lines["redis_url"].split() == ["redis_url", "redis://:***@host:1/0", "STOKER_REDIS_URL"]
    assert lines["max_batch"].split() == ["max_batch", "8", "option"]
    assert "80 % of its own" in lines["store_max_bytes"]
    as_object = json.loads(CliRunner().invoke(main, ["config", "--json"]).output)
    assert as_object["redis_url"] == {"value": "redis://:***@host:1/0", "from": "STOKER_REDIS_URL"}


@pytest.mark.parametrize(
    "wrong", [{"quiet": True, "verbose": True}, {"name": "a b"}, {"name": "-"}, {"name": "-a"}, {"name": "."}]
)
def test_settings_that_exclude_each_other_or_could_be_taken_for_something_else_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        read_settings(wrong)
