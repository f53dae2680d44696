"""A producer on fakeredis, which handles RQ's keys correctly, or on a real server in tests marked `server`; and a
simulated worker."""

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakeredis import FakeRedis
from redis import Redis
from tests.producer.played_worker import PlayedWorker

from stoker import Producer, operations
from stoker.cli import main


@pytest.fixture
def connection(request: pytest.FixtureRequest) -> Iterator[Redis]:
    if request.node.get_closest_marker("server"):
        with Redis.from_url(request.getfixturevalue("redis_url")) as connection:
            yield connection
    else:
        with FakeRedis() as connection:
            yield connection
            connection.flushall()


@pytest.fixture
def server(redis_url: str) -> Iterator[Redis]:
    """The connection of the test itself, beside the producer's own."""
    with Redis.from_url(redis_url) as server:
        yield server


@pytest.fixture
def producer(request: pytest.FixtureRequest, connection: Redis) -> Iterator[Producer]:
    is_real = request.node.get_closest_marker("server")
    with Producer(request.getfixturevalue("redis_url") if is_real else connection) as producer:
        yield producer


EachStep = Callable[[Callable[[operations.Step], operations.Step | None]], None]


@pytest.fixture
def each_step(monkeypatch: pytest.MonkeyPatch) -> EachStep:
    """Calls a function with each step before it is sent to the server; a step that it returns is sent instead."""
    answer_to = operations.answer_to

    def use(seen: Callable[[operations.Step], operations.Step | None]) -> None:
        async def answered(connection: Any, step: operations.Step) -> Any:
            return await answer_to(connection, seen(step) or step)

        monkeypatch.setattr(operations, "answer_to", answered)

    return use


@pytest.fixture
def worker(connection: Redis) -> PlayedWorker:
    return PlayedWorker(connection)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def as_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Terminal]:
    """Makes stderr a terminal with this many columns, and gives the text written to it. Call it in the test itself,
    because pytest puts its own stderr there when the test begins."""

    def make(columns: int) -> Terminal:
        terminal = Terminal()
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setenv("COLUMNS", str(columns))
        return terminal

    return make


@pytest.fixture
def stoker(
    redis_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int | str | None, str, str]]:
    """Run the command on a real server, with nothing in its stdin but `stdin`; gives (exit code, stdout, stderr)."""
    monkeypatch.setenv("STOKER_REDIS_URL", redis_url)

    def run(*arguments: str, stdin: bytes = b"") -> tuple[int | str | None, str, str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        out, err = capsys.readouterr()
        return left.value.code, out, err

    return run
