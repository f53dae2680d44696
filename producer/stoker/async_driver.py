"""Carries out operations on redis.asyncio, in the caller's event loop. Owns no keys and no connection."""

import asyncio
from typing import Any

from redis.asyncio import Redis

from stoker.connection import redis_errors
from stoker.operations import Command, Commands, Operation, Pause, Step, T, Watched


async def run(connection: Redis, operation: Operation[T]) -> T:
    """
    Raises:
        RedisUnavailable: no server answered, or it refused a command, and the operation did not handle that.
        WrongKeyType: the same of a command that is not for a key of this type.
    """
    answer: Any = None
    with redis_errors(connection):
        while True:
            try:
                step = operation.throw(answer) if isinstance(answer, Exception) else operation.send(answer)
            except StopIteration as returned:
                result: T = returned.value
                return result
            try:
                answer = await carry_out(connection, step)
            except Exception as raised:
                answer = raised


async def carry_out(connection: Redis, step: Step) -> Any:
    """The answer to one step."""
    if isinstance(step, Pause):
        return await asyncio.sleep(step.seconds)
    if isinstance(step, Watched):
        return await _watched(connection, step)
    if len(step.commands) == 1 and not step.errors_as_replies:
        return [await _execute(connection, step.commands[0])]
    return await _together(connection, step)


async def _together(connection: Redis, step: Commands) -> Any:
    async with connection.pipeline(transaction=False) as pipeline:
        for command in step.commands:
            _execute(pipeline, command)
        return await pipeline.execute(raise_on_error=not step.errors_as_replies)


async def _watched(connection: Redis, step: Watched) -> Any:
    async with connection.pipeline(transaction=True) as pipeline:
        await pipeline.watch(*step.keys)
        commands = step.write([await _execute(pipeline, command) for command in step.reads])
        if commands is None:
            return None
        pipeline.multi()  # type: ignore[no-untyped-call]
        for command in commands:
            _execute(pipeline, command)
        return await pipeline.execute()


def _execute(client: Redis, command: Command) -> Any:
    return client.execute_command(*command)  # type: ignore[no-untyped-call]
