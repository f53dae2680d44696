"""Opens the queue: connection, lease, registration; and closes them in reverse. Main thread."""

import logging
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.retry import Retry

from stoker_shared.errors import QueueHeld, RedisUnavailable
from stoker_shared.text import mask_text, mask_url, refusal_line
from stoker_worker.queue.claimed_job import RqClaimedJob
from stoker_worker.queue.client import may_pass, reason_of
from stoker_worker.queue.depths import QueueDepths
from stoker_worker.queue.in_flight import JobsInFlight
from stoker_worker.queue.lease import NO_STORE, Lease, LostData, OwnStore
from stoker_worker.queue.registration import HeartbeatWriter, RqRegistration, new_worker_name
from stoker_worker.queue.rq_queue import RqQueue
from stoker_worker.settings import WorkerSettings

log = logging.getLogger(__name__)

_MIN_SERVER = (6, 2, 0)
_STANDBY_POLL_S = 0.5
EXECUTION_TTL_S: Final = 7 * 86_400
"""How long RQ's own tools leave a started job alone: longer than a Mac sleeps or is down. Our own recovery does not
wait for it."""


_TIMEOUT_S: Final = 25.0
"""A server that hangs must not hang a thread for ever; RQ would raise a lower limit."""

_LOOK_TIMEOUT_S: Final = 1.0
"""A health check has to be answered soon."""


@dataclass(frozen=True)
class OpenQueue:
    registration: RqRegistration
    rq_queue: RqQueue
    depths: QueueDepths


@contextmanager
def open_queue(
    settings: WorkerSettings, redis_url: str, *, store: OwnStore = NO_STORE, model: str = ""
) -> Iterator[OpenQueue]:
    """Be a member of the queues, and registered as an RQ worker, for as long as the context lasts.

    A standby waits while another worker has its name or its queues, or Redis is away, instead of refusing.

    Args:
        store: the worker's.
        model: the name of the one that the worker is going to load.

    Raises:
        RedisUnavailable: no server at the URL, it refuses us, or it is too old.
        QueueHeld: another live worker has this name, or serves a queue that the two may not share.
        StoreUnusable: the conversations of a queue are in another store, or another live worker has a copy of this one.
    """
    with ExitStack() as closing:
        connection = connect(redis_url, wait=settings.standby)
        closing.callback(connection.close)
        in_flight = JobsInFlight[RqClaimedJob]()
        lease, registration = _new_member(settings, connection, in_flight, store, model)
        closing.callback(registration.unsubscribe)
        _take_over_at(redis_url, lease, registration, standby=settings.standby)
        log.info("worker %s holds %s, as %s", registration.name, settings.queues, lease.member)
        # Two tries within the time that is left after a beat.
        beating = _client(redis_url, timeout_s=(settings.lease_ttl_s - settings.heartbeat_s) / 3)
        closing.callback(beating.close)
        rq_queue = RqQueue(
            connection,
            registration=registration,
            lease=lease,
            heartbeat=HeartbeatWriter(beating, registration, lease),
            in_flight=in_flight,
            patience_s=settings.patience_s,
        )
        closing.callback(_sign_off, rq_queue)
        depths = QueueDepths(_client(redis_url, timeout_s=_LOOK_TIMEOUT_S), settings.queue_names)
        closing.callback(depths.close)
        yield OpenQueue(registration, rq_queue, depths)


def usual_name() -> str:
    """This machine's, as far as it can be a member's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64] or "worker"


def _sign_off(rq_queue: RqQueue) -> None:
    try:
        rq_queue.sign_off()
    except RedisError as error:  # the server is gone; the lease expires by itself
        log.warning("not signed off: %s", type(error).__name__)


def _new_member(
    settings: WorkerSettings, connection: Redis, in_flight: JobsInFlight[RqClaimedJob], store: OwnStore, model: str
) -> tuple[Lease, RqRegistration]:
    member = settings.name or store.name or usual_name()
    registration = RqRegistration(
        settings.queue_names,
        connection,
        name=new_worker_name(member),
        worker_ttl_s=settings.lease_ttl_s,
        execution_ttl_s=EXECUTION_TTL_S,
        heartbeat_s=settings.heartbeat_s,
        in_flight=in_flight,
    )
    lease = Lease(
        connection,
        member,
        settings.queue_names,
        worker_name=registration.name,
        ttl_s=settings.lease_ttl_s,
        store=store.name,
        shared=store.shared,
        has_agents=store.has_agents,
        model=model,
        new_store=settings.new_store,
        lost_data=LostData(in_flight.snapshot),
    )
    return lease, registration


def _take_over_at(redis_url: str, lease: Lease, registration: RqRegistration, *, standby: bool) -> None:
    """Take over, or raise the errors of `open_queue`."""
    try:
        _take_over(lease, registration, standby=standby)
    except RedisError as error:  # a replica, or an ACL that forbids a worker's commands
        lease.release_quietly()
        reason = _without_password(error, registration.connection)
        raise RedisUnavailable(f"{mask_url(redis_url)} refused this worker: {reason}") from None


def _take_over(lease: Lease, registration: RqRegistration, *, standby: bool) -> None:
    """Hold the queues and be registered, both or neither: a half-done take-over is undone, or expires by itself.

    Raises:
        QueueHeld: as for `open_queue`, and `standby` is not asked for.
        StoreUnusable: as for `open_queue`.
        RedisError: Redis is away, and `standby` is not asked for; or it refuses us.
    """
    said = ""
    while True:
        try:
            lease.acquire(waits=standby)
            registration.sign_on()
            return
        except QueueHeld as error:
            if not standby:
                raise
            holder = str(error).partition(";")[0]  # the rest is the time left, which changes with each look
            if holder != said:
                log.info("standing by: %s", error)
                said = holder
        except RedisError as error:
            if not (standby and may_pass(error)):
                raise
            lease.release_quietly()
            said = _say_once(error, said)
        time.sleep(_STANDBY_POLL_S)


def connect(redis_url: str, *, wait: bool = False) -> Redis:
    """
    Args:
        wait: for a server that is away or cannot work just now, instead of giving up.

    Raises:
        RedisUnavailable: as for `open_queue`; the message never holds the password.
    """
    shown = mask_url(redis_url)
    try:
        connection = _client(redis_url, timeout_s=_TIMEOUT_S)
    except (ValueError, TypeError):
        # The parser's own text can quote a piece of the password.
        raise RedisUnavailable(f"{shown} is not a Redis URL: redis://[[user]:password@]host[:port][/db]") from None
    try:
        version = tuple(int(part) for part in _version(connection, wait=wait).split(".")[:3])
    except (AuthenticationError, ResponseError) as error:
        raise RedisUnavailable(f"{shown} refused this worker: {_without_password(error, connection)}") from None
    except (RedisError, ValueError, OSError) as error:
        raise RedisUnavailable(f"no Redis at {shown}: {_without_password(error, connection)}") from None
    if version < _MIN_SERVER:
        raise RedisUnavailable(f"{shown} is version {'.'.join(map(str, version))}; 6.2 or newer is needed")
    _warn_if_forgetful(connection, shown)
    return connection


def _client(redis_url: str, *, timeout_s: float) -> Redis:
    """Without hidden retries: a transaction whose reply was lost may have been carried out, and every caller here looks
    before it tries again."""
    return Redis.from_url(
        redis_url,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=timeout_s,
        socket_connect_timeout=min(5.0, timeout_s),
        socket_keepalive=True,
    )


def _version(connection: Redis, *, wait: bool) -> str:
    said = ""
    while True:
        try:
            return str(connection.info("server")["redis_version"])
        except RedisError as error:
            if not (wait and may_pass(error)) or isinstance(error, AuthenticationError):
                raise
            said = _say_once(error, said)
        time.sleep(_STANDBY_POLL_S)


def _say_once(error: RedisError, said: str) -> str:
    kind = type(error).__name__
    if kind != said:
        log.warning("standing by: %s", reason_of(error))
    return kind


def _without_password(error: Exception, connection: Redis) -> str:
    return mask_text(refusal_line(error), connection.connection_pool.connection_kwargs.get("password"))


def _warn_if_forgetful(connection: Redis, shown: str) -> None:
    try:
        # Not by CONFIG, which needs a right to read it, passwords and all.
        persistence, memory = connection.info("persistence"), connection.info("memory")
    except RedisError:  # it went away just now; this is only advice
        return
    if not persistence.get("aof_enabled", 1):
        log.warning("%s keeps no append-only file: queued jobs are lost when it restarts", shown)
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        log.warning("%s may evict keys (%s): jobs can vanish", shown, policy)
