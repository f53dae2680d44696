"""Which servers the worker reaches, and why one is away: in the server's own words, without any part of a command."""

import pytest
from redis.exceptions import AuthenticationError, ConnectionError, OutOfMemoryError, ResponseError, TimeoutError
from tests.support.private_server import private_server

from stoker_shared.errors import RedisUnavailable
from stoker_worker.queue.client import as_redis_unavailable, connect

SECRET = "PatientZero"
FULL = "MISCONF Errors writing to the AOF file: No space left on device"
QUOTED = f"Command # 1 (HSET rq:job:j data {SECRET}) of pipeline caused error: "


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionError("Error 111 connecting to h:1. Connection refused."), "Redis is away: Error 111"),
        (TimeoutError("Timeout reading from socket"), "no answer in time"),
        (AuthenticationError(f"unknown command AUTH {SECRET}"), "refuses the login"),
        (
            OutOfMemoryError("command not allowed when used memory > 'maxmemory'. script: on @user_script:4."),
            "> 'maxmemory'",
        ),
        (OutOfMemoryError(f"{QUOTED}command not allowed when used memory > 'maxmemory'."), "used memory > 'maxmemory'"),
        (ResponseError(FULL), f"Redis refuses to write: {FULL}"),
        (ResponseError(QUOTED + FULL), "No space left on device"),
        (ResponseError("LOADING Redis is loading the dataset in memory"), "LOADING Redis is loading"),
    ],
)
def test_the_reason_is_the_servers_and_quotes_no_command(error, reason):
    with pytest.raises(RedisUnavailable) as refused, as_redis_unavailable():
        raise error
    assert reason in str(refused.value)
    assert "script" not in str(refused.value)
    assert SECRET not in str(refused.value)


def test_a_server_is_reached_by_its_unix_socket(tmp_path):
    with private_server(tmp_path / "server"):
        connection = connect(f"unix://{tmp_path}/server/admin.sock")
        assert connection.ping()
        connection.close()
