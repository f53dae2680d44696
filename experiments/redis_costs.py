"""What the product's calls cost a real Redis server: commands, and processor time of the server's main thread.

Owns how that is measured, and how many jobs a second one server can do: the commands that a worker sent for some jobs
are sent again as they were, as fast as the server takes them.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

from common import Json, spread
from redis import Redis
from redis.connection import AbstractConnection

from stoker import Producer
from stoker_shared.wire import LAST_KEY
from stoker_worker.embedded_redis.server import EmbeddedServer
from stoker_worker.ports import Busy, SequenceProgress
from stoker_worker.queue.claimer import Claimer
from stoker_worker.queue.connect import open_queue
from stoker_worker.queue.lease import Lease
from stoker_worker.queue.own_store import OwnStore
from stoker_worker.queue.rq_queue import RqQueue
from stoker_worker.settings import read_settings

QUEUE = "generate"
RESULT = {"text": "word " * 200, "usage": {"prompt_tokens": 4000, "cached_tokens": 3600, "completion_tokens": 200}}
STORE, MODEL = OwnStore("mac", "bucket"), "model"
IN_FLIGHT = 16
LEASE_S = 600.0
READ_JOBS = 500


# --- what is sent ---


@contextmanager
def recorded() -> Iterator[list[bytes]]:
    """The bytes that this thread sends to any server, meanwhile."""
    sent: list[bytes] = []
    plain, me = AbstractConnection.send_packed_command, threading.get_ident()

    def send(connection: Any, command: Any, *args: Any, **options: Any) -> Any:
        if threading.get_ident() == me:
            sent.extend([command] if isinstance(command, bytes) else command)
        return plain(connection, command, *args, **options)

    with patch.object(AbstractConnection, "send_packed_command", send):
        yield sent


def commands(sent: list[bytes]) -> Iterator[list[bytes]]:
    """The commands in what was sent, each as its words."""
    text, at = b"".join(sent), 0

    def number() -> int:
        nonlocal at
        begin, at = at + 1, text.index(b"\r\n", at) + 2
        return int(text[begin : at - 2])

    while at < len(text):
        words = []
        for _ in range(number()):
            length = number()
            words.append(text[at : at + length])
            at += length + 2
        yield words


def packed(words: list[bytes]) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


# --- what a call costs ---


class Meter:
    """Measures calls with a client of its own."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    def cost(self, call: Callable[[], object], times: int, *, rounds: int = 5) -> Json:
        """Commands of one call, and the least of the rounds' microseconds of the server: another program on its core
        only adds to them."""
        call()  # scripts are loaded, connections are open
        server_us, n_sent = [], 0
        for _ in range(rounds):
            with recorded() as sent:
                before = self._server_s()
                for _ in range(times):
                    call()
                server_us.append(1e6 * (self._server_s() - before) / times)
                n_sent = sum(1 for words in commands(sent) if words[0] != b"INFO")
        return {"commands": round(n_sent / times, 2), "server_us": round(min(server_us), 1),
                "rounds_us": spread(server_us, digits=1)}  # fmt: skip

    def _server_s(self) -> float:
        found: Any = self._connection.info("cpu")
        ends = "_main_thread" if "used_cpu_user_main_thread" in found else ""
        return float(found[f"used_cpu_user{ends}"] + found[f"used_cpu_sys{ends}"])


def costs(url: str, members: tuple[int, ...], *, times: int) -> Json:
    """The parts of what a worker with a shared store sends, with `IN_FLIGHT` jobs that run; the one that depends on it
    by the members."""
    found: Json = {}
    with Redis.from_url(url) as connection, Producer(connection) as producer, _opened(url) as queue:
        meter = Meter(connection)
        found["job"] = meter.cost(lambda: _one_job(producer, queue), times)
        found["submit"] = meter.cost(lambda: producer.submit(agent_id="later", prompt="x"), times)
        connection.delete(f"rq:queue:{QUEUE}")
        producer.submit_many([{"agent_id": f"agent {n}", "prompt": "x" * 500} for n in range(IN_FLIGHT)])
        while len(queue._in_flight) < IN_FLIGHT:
            queue.claim(IN_FLIGHT, Busy())
        found["look"] = meter.cost(lambda: queue._claim_order.claimers[QUEUE].read_ahead(0, Busy()), times)
        found["beat"] = meter.cost(queue.beat, max(5, times // 10))
        found["watch"] = meter.cost(lambda: queue.withdrawn(_progress(queue)), max(5, times // 10))
        found |= _waiting(connection, producer, queue, meter, max(2, times // 100))
        found["members look"] = {str(n): _look_at(connection, queue, meter, n, times) for n in members}
        found["agent's entry, bytes"] = _entry_bytes(connection, 20 * times)
    return found


def least(one: Json, other: Json) -> Json:
    """Of each call the measurement with less time of the server."""
    if "server_us" in one:
        return min(one, other, key=lambda cost: cost["server_us"])
    return {name: least(found, other[name]) if isinstance(found, dict) else found for name, found in one.items()}


@contextmanager
def _opened(url: str) -> Iterator[RqQueue]:
    settings = read_settings({"redis_url": url, "lease_ttl_s": LEASE_S, "name": "mac"})
    with open_queue(settings, url, store=STORE, model=MODEL) as opened:
        yield opened.rq_queue


def _one_job(producer: Producer, queue: RqQueue) -> None:
    """From its submission to its result, as when places become free one by one."""
    producer.submit(agent_id=f"agent {time.monotonic_ns()}", prompt="x" * 500)
    for job in queue.claim(1, Busy()):
        job.finish(RESULT)
        job.release()


_tokens = iter(range(1 << 60))


def _progress(queue: RqQueue) -> dict[str, SequenceProgress]:
    """Each job has generated more since the last look."""
    return {job.job_id: SequenceProgress("decode", next(_tokens), 20.0) for job in queue.in_flight()}


def _join(connection: Redis, number: int) -> str:
    """One more member, which is ready; its name as an RQ worker."""
    name = f"mac{number:04}"
    worker = f"stoker-{name}-01234567"
    lease = Lease(
        connection, name, [QUEUE], worker_name=worker, ttl_s=LEASE_S, store=name, shared=STORE.shared, model=MODEL
    )
    lease.acquire()
    lease.announce({"loading": False})
    return worker


def _waiting(connection: Redis, producer: Producer, queue: RqQueue, meter: Meter, times: int) -> Json:
    """A waiting job read; and claimed, if it is left to another worker then."""
    worker = _join(connection, 0)
    producer.submit_many([{"agent_id": f"there {n}", "prompt": "x" * 500} for n in range(READ_JOBS)])
    last = LAST_KEY.format(queue=QUEUE)
    connection.hset(last, mapping={f"there {n}": f"{worker} 1" for n in range(READ_JOBS)})
    placement = queue._claim_order.claimers[QUEUE]._placement

    def read_all() -> Claimer:
        claimer = Claimer(connection, QUEUE, queue._lease, placement, patience_s=60.0)
        claimer.read_ahead(0, Busy())
        while claimer.has_unread:
            claimer.read_ahead(0, Busy())
        return claimer

    def pass_all() -> None:
        claimer = read_all()
        while claimer.agents():
            claimer.claim(1, Busy())

    read, passed = (meter.cost(call, times) for call in (read_all, pass_all))
    connection.delete(f"rq:queue:{QUEUE}", last)
    each = {kind: {"read": read[kind], "pass": passed[kind] - read[kind]} for kind in ("commands", "server_us")}
    return {name: {kind: round(each[kind][name] / READ_JOBS, 3) for kind in each} for name in ("read", "pass")}


def _look_at(connection: Redis, queue: RqQueue, meter: Meter, n_members: int, times: int) -> Json:
    n_there: Any = connection.hlen("stoker:members")
    for n in range(n_there, n_members):
        _join(connection, n)
    return meter.cost(queue._members.look, max(5, times // 20))


def _entry_bytes(connection: Redis, n_agents: int) -> float:
    """What an agent's entry in `last` takes of the server's memory."""
    before: Any = connection.info("memory")
    key = LAST_KEY.format(queue=QUEUE)
    for start in range(0, n_agents, 1000):
        names = {f"agent-{n:08}": f"stoker-mac{n % 100:04}-01234567 12" for n in range(start, start + 1000)}
        connection.hset(key, mapping=names)
    after: Any = connection.info("memory")
    connection.delete(key)
    return round((after["used_memory"] - before["used_memory"]) / n_agents, 1)


# --- how many jobs a second ---


def saturation(folder: Path, jobs: int, rounds: int) -> Json:
    """Jobs a second of one server: all commands of a worker that claims, starts and finishes jobs one by one, sent
    again without waiting for replies."""
    with EmbeddedServer(folder / "recorded", has_password=False) as server:
        state, sent = _recording(server.url, jobs)
    opening = [packed(words) for words in commands(sent["opening"]) if words[0] == b"SCRIPT"]
    with EmbeddedServer(folder / "replayed", has_password=False) as server, Redis.from_url(server.url) as connection:
        taken, finished = [], []
        for _ in range(rounds):
            connection.flushall()  # a server of this function
            for key, (ttl_ms, value) in state.items():
                connection.restore(key, ttl_ms, value)
            _replay(server.url, b"".join(opening))
            taken.append(jobs / _replay(server.url, b"".join(sent["jobs"])))
            finished.append(connection.zcard(f"rq:finished:{QUEUE}"))
    n_commands = sum(1 for _ in commands(sent["jobs"]))
    return {
        "jobs": jobs,
        "commands_a_job": round(n_commands / jobs, 2),
        "jobs_per_s": spread(taken, digits=0),
        "commands_per_s": round(max(taken) * n_commands / jobs),
        "all_finished": set(finished) == {jobs},
    }


def _recording(url: str, jobs: int) -> tuple[dict[bytes, tuple[int, bytes]], dict[str, list[bytes]]]:
    """The keys before the first claim, and what was sent before and after."""
    with ExitStack() as stack:
        connection = stack.enter_context(Redis.from_url(url))
        producer = stack.enter_context(Producer(connection))
        opening = stack.enter_context(recorded())
        queue = stack.enter_context(_opened(url))
        producer.submit(agent_id="first", prompt="x")
        _finish_all(queue, 1)
        producer.submit_many([{"agent_id": f"agent {n}", "prompt": "x" * 500} for n in range(jobs)])
        connection.delete(f"rq:finished:{QUEUE}")
        dump: Any = connection.dump
        ttl: Any = connection.pttl
        state = {key: (max(0, ttl(key)), dump(key)) for key in connection.scan_iter(count=1000)}
        before = list(opening)
        with recorded() as sent:
            _finish_all(queue, jobs)
    return state, {"opening": before, "jobs": sent}


def _finish_all(queue: RqQueue, jobs: int) -> None:
    left = jobs
    while left:
        for job in queue.claim(1, Busy()):
            job.finish(RESULT)
            job.release()
            left -= 1


def _replay(url: str, sent: bytes) -> float:
    """Seconds until the server has answered all of it."""
    where, last = urlsplit(url), b"this was the last command"
    with socket.create_connection((where.hostname, where.port)) as wire:
        begin = time.perf_counter()
        sender = threading.Thread(target=wire.sendall, args=(sent + packed([b"ECHO", last]),))
        sender.start()
        tail = b""
        while last not in tail:
            tail = tail[-len(last) :] + wire.recv(1 << 20)
        took = time.perf_counter() - begin
        sender.join()
    return took
