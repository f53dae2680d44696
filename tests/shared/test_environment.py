"""The STOKER_* variables: none is missing, and a misspelt name is refused with the nearest one."""

import fcntl
import os
from pathlib import Path

import pytest

from stoker_shared.environment import (
    DEFAULT_REDIS_URL,
    ENV_PREFIX,
    VARIABLES,
    default_redis_url,
    publish,
    require_known_variables,
)
from stoker_worker.settings import WorkerSettings


def test_the_variables_are_the_fields_of_the_workers_settings():
    assert sorted(VARIABLES) == sorted(ENV_PREFIX + name.upper() for name in WorkerSettings.model_fields)


def test_a_misspelt_variable_is_refused_with_the_nearest_name():
    require_known_variables(dict.fromkeys([*VARIABLES, "PATH", "STOKERS"], "x"))
    with pytest.raises(ValueError, match=r"STOKER_REDIS_ULR \(did you mean STOKER_REDIS_URL\?\)") as refused:
        require_known_variables({"STOKER_REDIS_ULR": "redis://:hunter2@h", "STOKER_MAX_BATCH": "3"})
    assert "hunter2" not in str(refused.value)
    with pytest.raises(ValueError, match=r"environment: STOKER_COLOUR$"):
        require_known_variables({"STOKER_COLOUR": "blue"})


URL = "redis://:secret@127.0.0.1:7000"


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home" / ".stoker" / "redis.url"


def test_the_server_is_found_as_long_as_its_lock_is_held(file, tmp_path):
    assert default_redis_url() == DEFAULT_REDIS_URL
    with (tmp_path / "server.lock").open("w") as lock:
        publish(URL, Path(lock.name))
        assert default_redis_url() == DEFAULT_REDIS_URL, "nobody holds the lock: the server is gone"
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert default_redis_url() == URL
    assert default_redis_url() == DEFAULT_REDIS_URL


def test_only_the_user_can_read_it(file, tmp_path):
    old_mask = os.umask(0)
    try:
        publish(URL, tmp_path / "lock")
    finally:
        os.umask(old_mask)
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("content", [b"", b"\xff\xff", b"one line\n", b"redis://h\n/no/such/lock\n"])
def test_a_file_of_another_content_is_passed_over(file, content):
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    assert default_redis_url() == DEFAULT_REDIS_URL
