"""Operations: work on Redis as a sequence of steps, independent of how a client carries them out. No I/O.

An operation is a generator. It yields steps, receives the answer to each, and returns its result; an error of redis-py
is raised at the `yield` of the step that failed. `driver.run` carries operations out on redis-py and `async_driver.run`
on redis.asyncio, so that each operation is written once::

    def tokens_of(job_id: str) -> Operation[int]:
        status, tokens = yield from ask("HMGET", Job.key_for(job_id), "status", FIELD_TOKENS)
        if status is None:
            raise JobNotFound(job_id)
        return int(tokens or 0)


    run(connection, tokens_of("j"))  # or: await async_driver.run(connection, tokens_of("j"))

`yield from` runs one operation inside another. Replies are bytes, as redis-py parses them; `stream_entries` reads those
of XREAD. redis-py sends a step again when its reply is lost, so a write that must happen once has to be a `Watched`.
After some milliseconds of work an operation yields `Pause(0)`, because other tasks may wait for its event loop.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from redis.exceptions import WatchError

T = TypeVar("T")
_TRIES: Final = 100
Command: TypeAlias = Sequence[Any]
"""A command's name and arguments, as `execute_command` takes them."""
Entries: TypeAlias = list[tuple[bytes, dict[bytes, bytes]]]
"""Entries of a stream: id and fields, in order."""


@dataclass(frozen=True)
class Commands:
    """Commands that are sent together, not as a transaction; the answer is the list of their replies.

    Attributes:
        errors_as_replies: make a command's error its reply instead of raising it.
    """

    commands: Sequence[Command]
    errors_as_replies: bool = False


@dataclass(frozen=True)
class Watched:
    """A transaction that the server refuses with `WatchError` if one of `keys` changed after `reads` began.

    Attributes:
        reads: commands that run one by one once the keys are watched.
        write: makes the transaction's commands from the replies to `reads`; ``None`` for no transaction. No I/O.

    The answer is the list of the transaction's replies, or ``None`` without a transaction.
    """

    keys: Sequence[str]
    reads: Sequence[Command]
    write: Callable[[list[Any]], Sequence[Command] | None]


@dataclass(frozen=True)
class Pause:
    """Waits; 0 seconds lets other tasks of the event loop run, if there is one."""

    seconds: float


Step: TypeAlias = Commands | Watched | Pause
Operation: TypeAlias = Generator[Step, Any, T]


def undisturbed(step: Watched) -> Operation[Any]:
    """The answer to a transaction, which is tried again as long as other clients write to its keys; `write` is called
    each time.

    Raises:
        redis.exceptions.WatchError: none of 100 tries came through.
    """
    for _ in range(_TRIES):
        with suppress(WatchError):
            return (yield step)
    return (yield step)


def ask(*command: Any) -> Operation[Any]:
    """Sends one command; returns its reply."""
    [reply] = yield Commands([command])
    return reply


def stream_entries(reply: Any) -> dict[str, Entries]:
    """The reply of XREAD by key, empty if there is none. redis-py's form of the reply depends on the protocol."""
    found = reply.items() if isinstance(reply, Mapping) else reply or ()
    return {key.decode(): [entry for entry in entries if entry] for key, entries in found}
