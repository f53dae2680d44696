"""Clients of the dashboard and of the metrics that connect and then send little: they end, and keep nobody out."""

import socket
import threading
import time
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from stoker_shared import limited_threads
from stoker_shared.limited_threads import HEAD_BYTES, MOST_CONNECTIONS, LimitedHead, LimitedThreads


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
    monkeypatch.setattr(limited_threads, "LIFE_S", 0.2)
    slow, end = connect(), time.monotonic() + 30
    while not is_closed(slow, b"G"):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_clients_that_hang_up_and_long_heads_write_no_line(server, connect, capfd):
    connect().close()
    gone = connect()
    gone.sendall(b"GET / HTTP/1.0\r\n")
    gone.close()
    long, end = connect(), time.monotonic() + 30
    while not is_closed(long, b"a: b\r\n" * HEAD_BYTES):
        assert time.monotonic() < end
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

    monkeypatch.setattr(limited_threads, "_PAUSE_S", 0.001)
    with monkeypatch.context() as until_there_are_some:
        until_there_are_some.setattr(HTTPServer, "get_request", none_left)
        waiting = connect()
        time.sleep(0.2)
    waiting.sendall(b"GET / HTTP/1.0\r\n\r\n")
    assert waiting.recv(12) == b"HTTP/1.0 200"
    assert [record.getMessage() for record in caplog.records] == ["connections are refused: Too many open files"]
