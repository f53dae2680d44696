"""The part of redis-cli that docs/producers.md needs, for machines without it: a command, or lines of them on stdin."""

import shlex
import sys
from collections.abc import Iterator
from typing import Any

from redis import Redis


def lines_of(reply: Any) -> Iterator[str]:
    """A reply as redis-cli prints it into a pipe: one line for each string or number in it."""
    if isinstance(reply, dict):
        reply = [part for pair in reply.items() for part in pair]
    if isinstance(reply, list | tuple):
        for part in reply:
            yield from lines_of(part)
    else:
        yield reply.decode() if isinstance(reply, bytes) else str(reply)


def main(option: str, url: str, *command: str) -> None:
    assert option == "-u"
    with Redis.from_url(url, socket_timeout=None) as redis, redis.client() as connection:
        for words in [command] if command else map(shlex.split, sys.stdin):
            print(*lines_of(connection.execute_command(*words)), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
