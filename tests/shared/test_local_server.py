"""The file that leads `stoker` to the embedded server of the same user."""

import fcntl
import os
from pathlib import Path

import pytest

from stoker_shared.local_server import DEFAULT_REDIS_URL, default_redis_url, publish

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
