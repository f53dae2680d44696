"""The hold on a batch: one process at a time takes answers out, or two files would each get half. Operations only.

``stoker:batch:BATCH:holder`` names the output file and expires. A process that comes back after a crash has the same
file, and its lock, so it need not wait.
"""

from contextlib import suppress
from typing import Any, Final

from redis.exceptions import OutOfMemoryError

from stoker.operations import Command, Operation, Watched, ask, undisturbed
from stoker_shared.errors import StokerError

HOLD_S: Final = 15
RENEW_S: Final = 3.0


class BatchHeld(StokerError):
    """Another process takes the answers of this batch out; the message names its output file."""


def hold(batch: str, identity: str) -> Operation[None]:
    """Take or keep the batch for `HOLD_S`. On a server that is full, a batch that nobody has is not taken: answers
    have to leave it all the same.

    Raises:
        BatchHeld: somebody else has it.
    """
    key = _key(batch)

    def write(replies: list[Any]) -> list[Command] | None:
        if replies[0] is None:
            return [("SET", key, identity, "EX", HOLD_S)]
        if replies[0] != identity.encode():
            holder = replies[0].decode(errors="replace").split(" ", 2)
            raise BatchHeld(f"the answers of {batch} are being written to {holder[-1]} on {holder[0]}")
        return [("EXPIRE", key, HOLD_S)]

    with suppress(OutOfMemoryError):
        yield from undisturbed(Watched([key], [("GET", key)], write))


def release(batch: str, identity: str) -> Operation[None]:
    """Nothing when somebody else has it."""
    key = _key(batch)
    mine = identity.encode()
    yield from undisturbed(Watched([key], [("GET", key)], lambda found: [("DEL", key)] if found[0] == mine else None))


def is_held(batch: str) -> Operation[bool]:
    return bool((yield from ask("EXISTS", _key(batch))))


def _key(batch: str) -> str:
    return f"stoker:batch:{batch}:holder"
