"""Requests that a page of another site may have caused, and clients that connect and then send little."""

import socket
import threading
import time
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from tests.support.wait import wait_for

from stoker_shared import http_guard
from stoker_shared.http_guard import (
    HEAD_BYTES,
    MOST_CONNECTIONS,
    LimitedHead,
    LimitedThreads,
    is_own_site,
    is_private_name,
)


@pytest.mark.parametrize(
    ("host", "origin", "is_own"),
    [
        ("127.0.0.1:8400", None, True),
        ("[::1]:8400", "http://[::1]:8400", True),
        ("::1", None, True),
        ("LOCALHOST:80", None, True),
        ("localhost", "http://localhost", True),
        ("localhost", "https://evil.example", False),
        ("localhost", "null", False),
        ("localhost", "http://[", False),
        ("evil.example", None, False),
        ("127.0.0.1,evil.example", None, False),
        ("127.0.0.1@evil.example", None, False),
        ("[::1", None, False),
        (None, None, False),
    ],
)
def test_another_sites_page_shows_in_its_headers(host, origin, is_own):
    assert is_own_site(host, origin) is is_own


def test_names_that_no_site_can_have_are_private():
    names = ("127.0.0.1", "10.0.0.7", "::1", "localhost", "worker", "host.docker.internal")
    assert all(map(is_private_name, names))
    assert not any(map(is_private_name, ("evil.example", "127.0.0.1.evil.example", "127.1", "")))


class Server(LimitedThreads, HTTPServer):
    pass


class Handler(LimitedHead, BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=lambda: server.serve_forever(0.02))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def connect(server):
    with ExitStack() as clients:
        yield lambda: clients.enter_context(socket.create_connection(server.server_address, 30))


def is_answered(server):
    return httpx.get(f"http://127.0.0.1:{server.server_port}/", timeout=30).status_code == 200


def test_idle_clients_keep_nobody_out_and_the_oldest_are_closed(server, connect):
    idle = [connect() for _ in range(2 * MOST_CONNECTIONS)]
    assert is_answered(server)
    assert [client.recv(1) for client in idle[:MOST_CONNECTIONS]] == [b""] * MOST_CONNECTIONS
    idle[-1].sendall(b"GET / HTTP/1.0\r\n\r\n")
    assert idle[-1].recv(12) == b"HTTP/1.0 200"


def test_a_request_that_comes_slowly_is_closed(server, connect, monkeypatch):
    monkeypatch.setattr(http_guard, "LIFE_S", 0.2)
    slow = connect()
    wait_for(lambda: is_closed(slow, b"G"))


def test_clients_that_hang_up_and_long_heads_write_no_line(server, connect, capfd):
    connect().close()
    gone = connect()
    gone.sendall(b"GET / HTTP/1.0\r\n")
    gone.close()
    long = connect()
    wait_for(lambda: is_closed(long, b"a: b\r\n" * HEAD_BYTES))
    assert is_answered(server)
    assert capfd.readouterr().err == ""


def is_closed(client, sends):
    try:
        client.sendall(sends)
    except OSError:
        return True
    return False


def test_without_file_descriptors_one_line_is_logged(server, connect, monkeypatch, caplog):
    def none_left(_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(http_guard, "_PAUSE_S", 0.001)
    with monkeypatch.context() as until_there_are_some:
        until_there_are_some.setattr(HTTPServer, "get_request", none_left)
        waiting = connect()
        time.sleep(0.2)
    waiting.sendall(b"GET / HTTP/1.0\r\n\r\n")
    assert waiting.recv(12) == b"HTTP/1.0 200"
    assert [record.getMessage() for record in caplog.records] == ["connections are refused: Too many open files"]
