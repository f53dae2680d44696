"""Which errors of Redis pass by themselves, so that trying again helps. Pure policy; any thread."""

import re
from typing import Final

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from stoker_shared.errors import RedisUnavailable

_AWAY: Final = (RedisConnectionError, RedisTimeoutError, RedisUnavailable, OutOfMemoryError, ReadOnlyError)

# What a server says that cannot write just now: its disk is full, a long script runs, its replicas are gone. Not each
# has an error class of its own, and inside a transaction (up to Redis 6.2 a script too) other words stand before it.
_CANNOT_WRITE_NOW: Final = re.compile(
    r"(.* of pipeline caused error: |Transaction discarded because of: |Error running script .*: -)?"
    r"(BUSY|LOADING|MISCONF|NOREPLICAS|OOM|READONLY)\b",
    re.DOTALL,
)


def may_pass(error: Exception) -> bool:
    """Whether Redis is away or cannot write just now. Anything else it refuses, it refuses again."""
    if isinstance(error, _AWAY):
        return True
    return isinstance(error, ResponseError) and _CANNOT_WRITE_NOW.match(str(error)) is not None
