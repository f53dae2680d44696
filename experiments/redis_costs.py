"""What the product's calls cost a real Redis server: commands, and processor time of the server's main thread."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from common import Json, spread
from redis import Redis

from stoker import Producer
from stoker_shared.wire import LAST_KEY
from stoker_worker.ports import Busy, SequenceProgress
from stoker_worker.queue.claim import Claimer
from stoker_worker.queue.lease import Lease, OwnStore
from stoker_worker.queue.rq_queue import RqQueue, open_queue
from stoker_worker.settings import read_settings

QUEUE = "generate"
RESULT = {"text": "word " * 200, "usage": {"prompt_tokens": 4000, "cached_tokens": 3600, "completion_tokens": 200}}
STORE, MODEL = OwnStore("mac", "bucket"), "model"
IN_FLIGHT = 16
LEASE_S = 600.0
WAITING_JOBS = 500
ROUNDS = 10


class Meter:
    """Measures calls on a server that nobody else uses."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    def cost(self, call: Callable[[], object], times: int) -> Json:
        """Commands of one call, those of its scripts included, and the least of the rounds' microseconds of the server:
        another program on its core only adds to them."""
        call()  # scripts are loaded, connections are open
        server_us, n_commands = [], 0
        for _ in range(ROUNDS):
            self._connection.config_resetstat()
            before = self._server_s()
            for _ in range(times):
                call()
            server_us.append(1e6 * (self._server_s() - before) / times)
            found: Any = self._connection.info("commandstats")
            n_commands = sum(one["calls"] for name, one in found.items() if name not in ("cmdstat_info", _RESET))
        return {"commands": round(n_commands / times, 2), "server_us": round(min(server_us), 1),
                "rounds_us": spread(server_us, digits=1)}  # fmt: skip

    def _server_s(self) -> float:
        found: Any = self._connection.info("cpu")
        ends = "_main_thread" if "used_cpu_user_main_thread" in found else ""
        return float(found[f"used_cpu_user{ends}"] + found[f"used_cpu_sys{ends}"])


_RESET = "cmdstat_config|resetstat"


def costs(url: str, members: tuple[int, ...], *, times: int) -> Json:
    """The parts of what a worker with a shared store sends, with `IN_FLIGHT` jobs that run."""
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
        found |= _waiting(connection, producer, queue, meter)
        found["members look"] = {str(n): _look_at(connection, queue, meter, n, max(5, times // 20)) for n in members}
    return found


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
    store = {"store": name, "shared": STORE.shared, "model": MODEL}
    lease = Lease(connection, name, [QUEUE], worker_name=worker, ttl_s=LEASE_S, **store)
    lease.acquire()
    lease.announce({"loading": False})
    return worker


def _waiting(connection: Redis, producer: Producer, queue: RqQueue, meter: Meter) -> Json:
    """A waiting job read; and a claim that leaves one to another worker."""
    worker, last = _join(connection, 0), LAST_KEY.format(queue=QUEUE)
    producer.submit_many([{"agent_id": f"there {n}", "prompt": "x" * 500} for n in range(WAITING_JOBS)])
    connection.hset(last, mapping={f"there {n}": f"{worker} 1" for n in range(WAITING_JOBS)})
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

    read, passed = (meter.cost(call, 2) for call in (read_all, pass_all))
    connection.delete(f"rq:queue:{QUEUE}", last)
    kinds = ("commands", "server_us")
    each = {"read": {kind: read[kind] for kind in kinds}, "pass": {kind: passed[kind] - read[kind] for kind in kinds}}
    return {name: {kind: round(n / WAITING_JOBS, 2) for kind, n in found.items()} for name, found in each.items()}


def _look_at(connection: Redis, queue: RqQueue, meter: Meter, n_members: int, times: int) -> Json:
    """A look at the members."""
    n_there: Any = connection.hlen("stoker:members")
    for n in range(n_there, n_members):
        _join(connection, n)
    return meter.cost(queue._members.look, times)
