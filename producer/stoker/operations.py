"""Operations: work on Redis as a sequence of steps, the same for a blocking client and an awaited one.

An operation is a generator. It yields steps, receives the answer to each, and returns its result; an error of redis-py
is raised at the `yield` of the step that failed. Each operation is written once; `run` carries it out on redis-py, and
`run_async` on redis.asyncio::

    def tokens_of(job_id: str) -> Operation[int]:
        status, tokens = yield from ask("HMGET", Job.key_for(job_id), "status", FIELD_TOKENS)
        if status is None:
            raise JobNotFound(job_id)
        return int(tokens or 0)


    run(connection, tokens_of("j"))  # or: await run_async(connection, tokens_of("j"))

`yield from` runs one operation inside another. Replies are bytes, as redis-py parses them; `stream_entries` reads those
of XREAD. redis-py sends a step again when its reply is lost, so a write that must happen once has to be a `Watched`.
After some milliseconds of work an operation yields `Pause(0)`, so that other tasks of its event loop can run.
"""

import asyncio
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, Final, TypeAlias, TypeVar

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import WatchError

from stoker.connection import AnyRedis, redis_errors

T = TypeVar("T")
_TRIES: Final = 100
Command: TypeAlias = Sequence[Any]
"""A command's name and arguments, as `execute_command` takes them."""
Entries: TypeAlias = list[tuple[bytes, dict[bytes, bytes]]]
"""Entries of a stream: id and fields, in order."""


@dataclass(frozen=True)
class Commands:
    """Commands sent together, not as a transaction; the answer is the list of their replies. `errors_as_replies` makes
    a command's error its reply instead of raising it."""

    commands: Sequence[Command]
    errors_as_replies: bool = False


@dataclass(frozen=True)
class Watched:
    """A transaction that the server refuses with `WatchError` if one of `keys` has changed since `reads` began. The
    answer is the list of the transaction's replies, or ``None`` without a transaction.

    Attributes:
        reads: commands that run one by one once the keys are watched.
        write: makes the transaction's commands from the replies to `reads`; ``None`` for no transaction. No I/O.
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
    """The answer to a transaction, tried again as long as other clients write to its keys; `write` is called each time.
    Raises `redis.exceptions.WatchError` after 100 tries."""
    for _ in range(_TRIES):
        with suppress(WatchError):
            return (yield step)
    return (yield step)


def ask(*command: Any) -> Operation[Any]:
    """Sends one command; returns its reply."""
    [reply] = yield Commands([command])
    return reply


def stream_entries(reply: Any) -> dict[str, Entries]:
    """The reply of XREAD by key, empty if there is none. Its form in redis-py depends on the protocol, and a map in it
    may have a list of entries inside another list."""
    found = reply.items() if isinstance(reply, Mapping) else reply or ()
    return {key.decode(): [entry for entry in _flat(entries) if entry] for key, entries in found}


def _flat(entries: Any) -> Any:
    return entries[0] if entries and isinstance(entries[0], list) else entries


def run(connection: Redis, operation: Operation[T]) -> T:
    """Carry out an operation. Any thread.

    Raises:
        RedisUnavailable: no server answered, or it refused a command, and the operation did not handle that.
        WrongKeyType: a command did not fit its key's type, and the operation did not handle that.
    """
    running = run_async(connection, operation)
    try:
        running.send(None)
    except StopIteration as returned:
        result: T = returned.value
        return result
    raise AssertionError("a client that blocks leaves nothing to wait for")


async def run_async(connection: AnyRedis, operation: Operation[T]) -> T:
    """As `run`, in the caller's event loop."""
    answer: Any = None
    with redis_errors(connection):
        while True:
            try:
                step = operation.throw(answer) if isinstance(answer, Exception) else operation.send(answer)
            except StopIteration as returned:
                result: T = returned.value
                return result
            try:
                answer = await answer_to(connection, step)
            except Exception as raised:
                answer = raised


async def answer_to(connection: AnyRedis, step: Step) -> Any:
    """The answer to one step. With a blocking client, it never waits for the event loop."""
    client: Any = connection
    if isinstance(step, Pause):
        if isinstance(connection, AsyncRedis):
            return await asyncio.sleep(step.seconds)
        return time.sleep(step.seconds) if step.seconds else None
    if isinstance(step, Commands) and len(step.commands) == 1 and not step.errors_as_replies:
        return [await _settled(client.execute_command(*step.commands[0]))]
    pipeline = client.pipeline(transaction=isinstance(step, Watched))
    try:
        commands: Sequence[Command] | None
        if isinstance(step, Watched):
            await _settled(pipeline.watch(*step.keys))
            commands = step.write([await _settled(pipeline.execute_command(*read)) for read in step.reads])
            if commands is None:
                return None
            pipeline.multi()
        else:
            commands = step.commands
        for command in commands:
            pipeline.execute_command(*command)
        return await _settled(pipeline.execute(raise_on_error=isinstance(step, Watched) or not step.errors_as_replies))
    finally:
        await _settled(pipeline.reset())


async def _settled(reply: Any) -> Any:
    """A reply of either client: redis-py's is complete, redis.asyncio's has to be awaited."""
    return await reply if isawaitable(reply) else reply
