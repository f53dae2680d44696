"""`stoker serve` in a thread, on a private server, beside a played worker that does what a prompt says."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from openai import OpenAI
from redis import Redis
from tests.producer.played_worker import PlayedWorker, playing, result_fields
from tests.support.server_fixture import require_server_program
from tests.support.wait import wait_for

from stoker.api.fields import BodyOptions
from stoker.serve.app import build_app
from stoker.serve.server import web_server
from stoker.serve.settings import ServeSettings
from stoker_shared.answer_parts import Markers
from stoker_shared.wire import SERVED_KEY
from stoker_worker.embedded_redis import EmbeddedServer

PLAIN = Markers()


class Hand(PlayedWorker):
    """Does what the last line of a prompt says: ``say TEXT``, ``fail REASON``, ``give JSON`` (fields of the result), or
    ``wait``, which leaves the job in the queue."""

    def request(self, job_id: str) -> dict[str, Any]:
        return self.job(job_id).kwargs["request"]

    def waiting(self) -> list[str]:
        return [job_id.decode() for job_id in self._connection.lrange("rq:queue:generate", 0, -1)]

    def wait_for_one(self) -> str:
        """The id of the one job that waits."""
        return wait_for(lambda: [job for job in self.waiting() if self.line(self.request(job)) == "wait"], 20)[0]

    def all_jobs(self) -> list[str]:
        """The ids of all jobs, the oldest first."""
        jobs = [self.job(key.decode().removeprefix("rq:job:")) for key in self._connection.scan_iter("rq:job:*")]
        return [job.id for job in sorted(jobs, key=lambda job: job.created_at)]

    def register(self, record: dict[str, Any]) -> None:
        """Appear among the live workers."""
        self._connection.sadd("rq:workers", "rq:worker:hand")
        self._connection.set("stoker:worker:hand", json.dumps(record))

    def unregister(self) -> None:
        self._connection.srem("rq:workers", "rq:worker:hand")
        self._connection.delete("stoker:worker:hand")

    def say(self, job_id: str, run: str, kind: str, text: str = "", markers: Markers | None = PLAIN) -> None:
        """An entry of the job's stream; with `markers` ``None`` as an older worker writes it."""
        fields: dict[Any, Any] = {"run": run, "kind": kind, "text": text}
        if markers is not None and kind == "whole":
            fields["markers"] = markers.model_dump_json()
        self._connection.xadd(f"stoker:stream:{job_id}", fields)

    def finish(self, job_id: str, value: object = None, text: str = "hello") -> None:
        super().finish(job_id, value, text)
        self.say(job_id, "last", "end")

    def line(self, request: dict[str, Any]) -> str:
        return str(request.get("prompt") or request["messages"][-1]["content"]).splitlines()[-1]

    def answer(self, job_id: str) -> None:
        word, _, rest = self.line(self.request(job_id)).partition(" ")
        if word == "fail":
            self.fail(job_id, rest)
            self.say(job_id, "last", "end")
        elif word != "wait":
            given = json.loads(rest) if word == "give" else {"text": rest}
            self.finish(job_id, {**result_fields(job_id), **given})


@dataclass(frozen=True)
class Serving:
    url: str
    clients: ExitStack

    def client(self, token: str = "none", **options: Any) -> OpenAI:
        made = OpenAI(base_url=f"{self.url}/v1", api_key=token, max_retries=0, **options)
        return self.clients.enter_context(made)


@contextmanager
def serving_at(redis_url: str, *, grace_s: int = 30, **settings: Any) -> Iterator[Serving]:
    with TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listening:
        usual = {"batch_store": Path(folder), "body_options": BodyOptions(any_model=True)}
        server = web_server(build_app(redis_url, ServeSettings(**{**usual, **settings})))
        server.config.timeout_graceful_shutdown = grace_s
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        try:
            with ExitStack() as clients:
                yield Serving(f"http://127.0.0.1:{listening.getsockname()[1]}", clients)
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of this module's own: its worker stays registered from test to test."""
    require_server_program()
    with EmbeddedServer(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(scope="module")
def hand(server_url: str) -> Iterator[Hand]:
    with Redis.from_url(server_url) as connection:
        hand = Hand(connection)
        with playing(connection, hand.answer):
            yield hand


@pytest.fixture(scope="module")
def served(server_url: str, hand: Hand) -> Iterator[Serving]:
    with serving_at(server_url) as serving:
        yield serving


@pytest.fixture(scope="module")
def client(served: Serving) -> OpenAI:
    return served.client()


@pytest.fixture
def serve(server_url: str, hand: Hand) -> Iterator[Callable[..., Serving]]:
    """Another process's server, with settings of its own."""
    with ExitStack() as servers:
        yield lambda **settings: servers.enter_context(serving_at(server_url, **settings))


@pytest.fixture
def nobody(server_url: str, hand: Hand) -> Iterator[None]:
    """No worker is alive."""
    key = SERVED_KEY.format(queue="generate")
    with Redis.from_url(server_url) as connection:
        connection.delete(key)
        yield
        connection.set(key, "played")
