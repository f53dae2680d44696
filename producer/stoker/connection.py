"""The connection to Redis: opened from a URL or taken over, and its errors said in our words without the password.

Owns no keys and no jobs. redis-py's clients are thread-safe, so everything here may be used from any thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from stoker_shared.errors import RedisUnavailable

# redis-py 5 waits for ever by default and redis-py 8 five seconds, so that nothing here is left to the default.
_SOCKET_TIMEOUT_S = 5.0
_RETRIES = 4  # 1.5 s in all when nobody listens: long enough for a hiccup, short enough for a typing error
REFUSED = (AuthenticationError, AuthorizationError)  # redis-py calls them connection errors; waiting does not help
AnyRedis: TypeAlias = Redis | AsyncRedis
_Client = TypeVar("_Client", Redis, AsyncRedis)
LOST: tuple[type[Exception], ...] = (RedisConnectionError, RedisTimeoutError)


def open_connection(redis: "str | Redis") -> Redis:
    """A client for the URL (nothing is sent yet), or the given one as it is.

    Raises:
        ValueError: the URL is not one, or the connection decodes responses, which RQ cannot work with.
        TypeError: it is neither.
    """
    return _opened(redis, Redis, Retry(_backoff(), _RETRIES))


def open_async_connection(redis: "str | AsyncRedis") -> AsyncRedis:
    """The same on redis.asyncio.

    Raises:
        ValueError, TypeError: as `open_connection`.
    """
    return _opened(redis, AsyncRedis, AsyncRetry(_backoff(), _RETRIES))


def _backoff() -> ExponentialBackoff:
    return ExponentialBackoff(cap=1.0, base=0.05)


def _opened(redis: Any, client: type[_Client], retry: Any) -> _Client:
    connection = _from_url(redis, client, retry) if isinstance(redis, str) else redis
    if not isinstance(connection, client):
        wanted = f"{client.__module__.removesuffix('.client')}.{client.__name__}"
        raise TypeError(f"expected a Redis URL or a {wanted} connection, not {type(redis).__name__}")
    if _kwargs(connection).get("decode_responses"):
        raise ValueError("the Redis connection has decode_responses=True; RQ needs one that leaves bytes alone")
    return connection


def _from_url(url: str, client: type[_Client], retry: Any) -> _Client:
    try:
        return client.from_url(
            url,
            socket_timeout=_SOCKET_TIMEOUT_S,
            socket_connect_timeout=_SOCKET_TIMEOUT_S,
            health_check_interval=30,
            retry=retry,
            retry_on_error=list(LOST),
        )
    except (ValueError, TypeError):
        # The parser's own text can quote a piece of the password.
        raise ValueError("not a Redis URL; expected redis://[[user]:password@]host[:port][/db]") from None


def address(connection: AnyRedis) -> str:
    """Where the server is, for people: never the user or the password."""
    kwargs = _kwargs(connection)
    if path := kwargs.get("path"):
        return f"unix:{path}"
    return f"{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}/{kwargs.get('db') or 0}"


def blocking_slice_s(connection: AnyRedis) -> float:
    """How long one blocking read may last, in seconds, so that the client's own socket timeout never cuts it off."""
    timeout_s = _kwargs(connection).get("socket_timeout", _SOCKET_TIMEOUT_S)
    return 1.0 if timeout_s is None else min(1.0, timeout_s / 2)


@contextmanager
def redis_errors(connection: AnyRedis) -> Iterator[None]:
    """Turn every error of redis-py into `RedisUnavailable`.

    Raises:
        RedisUnavailable: no server, or it refused the command.
    """
    try:
        yield
    except RedisError as error:
        # Not chained: some servers quote the whole AUTH command in their error, and a traceback would show that.
        raise RedisUnavailable(in_our_words(connection, error)) from None


def in_our_words(connection: AnyRedis, error: RedisError) -> str:
    """What went wrong and where, in one line without the password."""
    lost = isinstance(error, LOST) and not isinstance(error, REFUSED)
    what = "no Redis server answers at" if lost else "refused by the Redis server at"
    return f"{what} {address(connection)}: {_without_password(connection, error)}"


def _without_password(connection: AnyRedis, error: RedisError) -> str:
    text = str(error)
    for password in filter(None, [_kwargs(connection).get("password")]):
        text = text.replace(str(password), "***")
    return text


def _kwargs(connection: AnyRedis) -> dict[str, Any]:
    kwargs: dict[str, Any] = connection.connection_pool.connection_kwargs
    return kwargs
