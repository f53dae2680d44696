"""Opens the connection to Redis, and describes its errors in one line without the password.

It owns no keys and no jobs. redis-py's clients are thread-safe, so any thread may use this module.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from stoker_shared.environment import REDIS_URL_VARIABLE, default_redis_url
from stoker_shared.errors import QueueError, RedisUnavailable
from stoker_shared.text import mask_text, refusal_line

# Set explicitly, because redis-py 5 has no limit by default and redis-py 8 has five seconds.
_SOCKET_TIMEOUT_S = 5.0
_MOST_CONNECTIONS = 2**31  # as in redis-py 5; redis-py 8 has 100, and the 101st thread or stream gets an error
_RETRIES = 4  # 1.5 s in all if no server listens: enough for a short outage, bearable after a mistyped address
REFUSED = (AuthenticationError, AuthorizationError)  # connection errors to redis-py, but waiting does not help
AnyRedis: TypeAlias = Redis | AsyncRedis
_Client = TypeVar("_Client", Redis, AsyncRedis)
LOST: tuple[type[Exception], ...] = (RedisConnectionError, RedisTimeoutError)
_OTHER_TYPE = re.compile(r"\bWRONGTYPE\b")  # in a pipeline or a script, other words precede it


class WrongKeyType(QueueError):
    """A key in Redis has another type than stoker's; any client may write there."""


def usual_url() -> str:
    """The server to use if none is named: ``$STOKER_REDIS_URL``, else as `default_redis_url`."""
    return os.environ.get(REDIS_URL_VARIABLE) or default_redis_url()


def open_connection(redis: "str | Redis") -> Redis:
    """A client for the URL (nothing is sent yet), or the given client unchanged. Raises `ValueError`: not a Redis URL,
    or a client that decodes responses, with which RQ cannot work. Raises `TypeError`: neither a string nor a client."""
    return _opened(redis, Redis, Retry)


def open_async_connection(redis: "str | AsyncRedis") -> AsyncRedis:
    """As `open_connection`, on redis.asyncio."""
    return _opened(redis, AsyncRedis, AsyncRetry)


def _opened(redis: Any, client: type[_Client], retry: Any) -> _Client:
    connection = _from_url(redis, client, retry) if isinstance(redis, str) else redis
    if not isinstance(connection, client):
        wanted = f"{client.__module__.removesuffix('.client')}.{client.__name__}"
        raise TypeError(f"expected a Redis URL or a {wanted} connection, not {type(redis).__name__}")
    if _kwargs(connection).get("decode_responses"):
        raise ValueError("the Redis connection has decode_responses=True, but RQ needs responses as bytes")
    return connection


def _from_url(url: str, client: type[_Client], retry: Any) -> _Client:
    try:
        return client.from_url(
            url,
            socket_timeout=_SOCKET_TIMEOUT_S,
            socket_connect_timeout=_SOCKET_TIMEOUT_S,
            health_check_interval=30,
            retry=retry(ExponentialBackoff(cap=1.0, base=0.05), _RETRIES),
            retry_on_error=list(LOST),
            max_connections=_MOST_CONNECTIONS,
        )
    except (ValueError, TypeError):
        # The parser's message can quote a piece of the password.
        raise ValueError("not a Redis URL; expected redis://[[user]:password@]host[:port][/db]") from None


def address(connection: AnyRedis) -> str:
    """The server's address as people read it, without user and password."""
    kwargs = _kwargs(connection)
    if path := kwargs.get("path"):
        return f"unix:{path}"
    return f"{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}/{kwargs.get('db') or 0}"


def blocking_slice_s(connection: AnyRedis) -> float:
    """How long one blocking read may last, in seconds: less than the client's own socket timeout."""
    timeout_s = _kwargs(connection).get("socket_timeout", _SOCKET_TIMEOUT_S)
    return 1.0 if timeout_s is None else min(1.0, timeout_s / 2)


@contextmanager
def redis_errors(connection: AnyRedis) -> Iterator[None]:
    """Turns every error of redis-py into `RedisUnavailable` (no server answers, or it refused the command) or
    `WrongKeyType` (the command does not fit the key's type)."""
    try:
        yield
    except RedisError as error:
        # Not chained: some servers quote the whole AUTH command in their error, and a traceback would show it.
        if _is_of_other_type(error):
            raise WrongKeyType(described(connection, error)) from None
        unavailable = RedisUnavailable(described(connection, error))
        unavailable.is_lost = _is_lost(error)
        raise unavailable from None


def described(connection: AnyRedis, error: RedisError) -> str:
    """The error and the server's address, in one line without the password."""
    where = address(connection)
    problem = f"no Redis server answers at {where}" if _is_lost(error) else f"refused by the Redis server at {where}"
    if _is_of_other_type(error):
        problem = f"a key at {where} is of another type than stoker's"
    return f"{problem}: {mask_text(refusal_line(error), _kwargs(connection).get('password'))}"


def _is_lost(error: RedisError) -> bool:
    return isinstance(error, LOST) and not isinstance(error, REFUSED)


def _is_of_other_type(error: RedisError) -> bool:
    return isinstance(error, ResponseError) and _OTHER_TYPE.search(str(error)) is not None


def _kwargs(connection: AnyRedis) -> dict[str, Any]:
    kwargs: dict[str, Any] = connection.connection_pool.connection_kwargs
    return kwargs
