"""Carries out operations on redis-py. Owns no keys and no connection; any thread."""

import time
from typing import Any

from redis import Redis

from stoker.connection import redis_errors
from stoker.operations import Command, Commands, Operation, Pause, Step, T, Watched


def run(connection: Redis, operation: Operation[T]) -> T:
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
                answer = carry_out(connection, step)
            except Exception as raised:
                answer = raised


def carry_out(connection: Redis, step: Step) -> Any:
    """The answer to one step."""
    if isinstance(step, Pause):
        return time.sleep(step.seconds) if step.seconds else None
    if isinstance(step, Watched):
        return _watched(connection, step)
    if len(step.commands) == 1 and not step.errors_as_replies:
        return [_execute(connection, step.commands[0])]
    return _together(connection, step)


def _together(connection: Redis, step: Commands) -> Any:
    with connection.pipeline(transaction=False) as pipeline:
        for command in step.commands:
            _execute(pipeline, command)
        return pipeline.execute(raise_on_error=not step.errors_as_replies)


def _watched(connection: Redis, step: Watched) -> Any:
    with connection.pipeline(transaction=True) as pipeline:
        pipeline.watch(*step.keys)  # type: ignore[no-untyped-call]
        commands = step.write([_execute(pipeline, command) for command in step.reads])
        if commands is None:
            return None
        pipeline.multi()
        for command in commands:
            _execute(pipeline, command)
        return pipeline.execute()


def _execute(client: Redis, command: Command) -> Any:
    return client.execute_command(*command)  # type: ignore[no-untyped-call]
