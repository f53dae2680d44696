"""Clients that connect and then send little or nothing: they are closed in time, and keep nobody else out."""

import resource
import socket
import subprocess
import sys
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest
import uvicorn
from tests.support.wait import wait_for
from uvicorn.server import ServerState

from stoker.serve import connections
from stoker.serve.connections import BODY_BYTES, BODY_S, HEAD_S, Connections, LimitedProtocol

HEAD = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 9999999\r\n\r\n"


class Client:
    """One connection to a protocol whose timers run when `pass_s` is called."""

    def __init__(self, everyone, state):
        loop = SimpleNamespace(call_later=self._call_later, create_task=self._create_task)
        self.transport = Mock(**{"is_closing.return_value": False, "get_extra_info.return_value": None})
        self._now, self._timers = 0.0, []
        config = uvicorn.Config(lambda: None, log_config=None)
        self.protocol = LimitedProtocol(everyone, config=config, server_state=state, app_state={}, _loop=loop)
        self.protocol.connection_made(self.transport)

    def send(self, data):
        while data:
            room = self.protocol.get_buffer(-1)
            n = min(len(room), len(data))
            room[:n], data = data[:n], data[n:]
            self.protocol.buffer_updated(n)

    def pass_s(self, seconds):
        self._now += seconds
        for timer in [timer for timer in self._timers if timer.at <= self._now]:
            self._timers.remove(timer)
            if not timer.cancel.called:
                timer.run()

    @property
    def is_closed(self):
        return self.transport.abort.called or self.transport.close.called

    def _call_later(self, seconds, run):
        timer = Mock(at=self._now + seconds, run=run)
        self._timers.append(timer)
        return timer

    @staticmethod
    def _create_task(coroutine):
        coroutine.close()
        return Mock()


@pytest.fixture
def connect():
    everyone, state = Connections(most=3), ServerState()
    return lambda: Client(everyone, state)


@pytest.mark.parametrize(
    ("first", "seconds", "more"),
    [(b"", HEAD_S, b""), (b"POST", HEAD_S, b"x"), (HEAD, BODY_S, b"x"), (HEAD, BODY_S, b"")],
    ids=["idle", "slow head", "slow body", "no body"],
)
def test_a_request_that_does_not_come_in_time_is_closed(connect, first, seconds, more):
    client = connect()
    client.send(first)
    for _ in range(9):
        client.pass_s(seconds / 10)
        client.send(more)
        assert not client.is_closed
    client.pass_s(seconds / 10)
    assert client.is_closed


def test_a_long_upload_goes_on_as_long_as_enough_of_it_comes_and_a_request_that_has_come_may_take_any_time(connect):
    uploading, waiting = connect(), connect()
    uploading.send(HEAD)
    waiting.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    for _ in range(5):
        uploading.send(b"x" * BODY_BYTES)
        for client in (uploading, waiting):
            client.pass_s(BODY_S)
    assert (uploading.is_closed, waiting.is_closed) == (False, False)


def test_a_client_that_takes_nothing_of_its_answer_is_closed(connect):
    slow, slower = connect(), connect()
    for client in (slow, slower):
        client.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        client.protocol.pause_writing()
    slow.protocol.resume_writing()
    for client in (slow, slower):
        client.pass_s(BODY_S)
    assert (slow.is_closed, slower.is_closed) == (False, True)


def test_a_new_client_takes_the_place_of_an_idle_one_then_of_one_that_sends(connect):
    sending, waiting, idle = connect(), connect(), connect()
    sending.send(HEAD)
    waiting.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")

    def closed(client):
        if client.is_closed:
            client.protocol.connection_lost(None)
        return client.is_closed

    first = connect()
    assert [closed(client) for client in (sending, waiting, idle, first)] == [False, False, True, False]
    first.send(HEAD)
    second = connect()
    assert [closed(client) for client in (sending, waiting, first, second)] == [True, False, False, False]


def test_chunks_of_one_byte_are_read_in_small_pieces(connect):
    plain, chunked = connect(), connect()
    plain.send(HEAD)
    chunked.send(b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert len(chunked.protocol.get_buffer(-1)) <= len(plain.protocol.get_buffer(-1)) // 16


@pytest.mark.server
@pytest.mark.parametrize(("n_files", "n_idle"), [(64, 100), (1100, 500)])
def test_many_idle_clients_keep_nobody_out_and_fill_no_log(server_url, tmp_path, n_files, n_idle):
    program = f"ulimit -n {n_files}; exec {sys.executable} -c 'from stoker.cli import main; main()'"
    command = ["sh", "-c", f"{program} serve --port 0 --redis {server_url}"]
    with ExitStack() as open_now:
        log = tmp_path / "log"
        stderr = open_now.enter_context(log.open("wb"))
        served = open_now.enter_context(subprocess.Popen(command, stderr=stderr))
        open_now.callback(served.terminate)
        wait_for(lambda: b"http://" in log.read_bytes(), 30)
        port = int(log.read_text().partition("http://127.0.0.1:")[2].partition("/")[0])
        for _ in range(n_idle):
            open_now.enter_context(socket.create_connection(("127.0.0.1", port)))
        wait_for(lambda: is_healthy(port), 30)
        assert log.stat().st_size < 1000


def is_healthy(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=30).status_code == 200
    except httpx.TransportError:
        return False


def test_the_number_of_connections_follows_the_limit_of_open_files(monkeypatch):
    limits = {"now": (256, 256)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(now=new))
    assert connections.possible_connections() == 32
    limits["now"] = (256, resource.RLIM_INFINITY)  # macOS
    assert connections.possible_connections() == connections.MOST_CONNECTIONS
    assert limits["now"][0] > 2 * connections.MOST_CONNECTIONS
