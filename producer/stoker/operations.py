"""Operations: what is asked of Redis, in which order, and what follows from the answers. No I/O in here.

An operation is a generator. It yields steps, is sent the answer to each, and returns its result; an error of redis-py
is raised at the `yield` whose step met it. `driver.run` carries operations out on redis-py and `async_driver.run` on
redis.asyncio, so that each is written once::

    def tokens_of(job_id: str) -> Operation[int]:
        status, tokens = yield from ask("HMGET", Job.key_for(job_id), "status", FIELD_TOKENS)
        if status is None:
            raise JobNotFound(job_id, "not found")
        return int(tokens or 0)


    run(connection, tokens_of("j"))  # or: await async_driver.run(connection, tokens_of("j"))

`yield from` runs one operation inside another. Replies are bytes, as redis-py parses them; `stream_entries` reads those
of XREAD. redis-py sends a step again when its reply is lost, so a write that must happen once is a `Watched`. After
some milliseconds of work an operation yields `Pause(0)`: others may wait for the event loop it runs in.
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
    """Commands sent together; the answer is the list of their replies.

    Attributes:
        atomic: as one transaction.
        errors_as_replies: an error of one command is its reply, instead of being raised.
    """

    commands: Sequence[Command]
    atomic: bool = False
    errors_as_replies: bool = False


@dataclass(frozen=True)
class Watched:
    """A transaction that the server refuses with `WatchError` if one of `keys` changed since it was looked at.

    Attributes:
        reads: commands run one by one once the keys are watched.
        write: makes the transaction's commands out of the replies to `reads`; ``None`` for no transaction. No I/O.

    The answer is the list of the transaction's replies; ``None`` without one.
    """

    keys: Sequence[str]
    reads: Sequence[Command]
    write: Callable[[list[Any]], Sequence[Command] | None]


@dataclass(frozen=True)
class Pause:
    """Nothing for so long; 0 lets others have the event loop where there is one."""

    seconds: float


Step: TypeAlias = Commands | Watched | Pause
Operation: TypeAlias = Generator[Step, Any, T]


def undisturbed(step: Watched) -> Operation[Any]:
    """The answer to a transaction that is tried again while others write to its keys; `write` finds out what was done.

    Raises:
        redis.exceptions.WatchError: they do so all the time.
    """
    for _ in range(_TRIES):
        with suppress(WatchError):
            return (yield step)
    return (yield step)


def ask(*command: Any) -> Operation[Any]:
    """One command; returns its reply."""
    [reply] = yield Commands([command])
    return reply


def stream_entries(reply: Any) -> dict[str, Entries]:
    """The reply of XREAD by key, whichever of its forms redis-py gives (it depends on the protocol); empty for none."""
    found = reply.items() if isinstance(reply, Mapping) else reply or ()
    return {key.decode(): [entry for entry in entries if entry] for key, entries in found}
