"""A batch's record in Redis, and the hold on it. Operations only; no files, and none of the batch's lines.

``stoker:batch:BATCH`` (hash) is the record. Its `next_line` is the first line that was not sent yet; the transaction
that enqueues lines moves it on (sent_lines.py), so that no line is sent twice, even by several processes and with lost
replies. ``stoker:batch::all`` (sorted set) names the batches. All keys of a batch expire: a job waits for at most
`keep_s`, its result is kept for `keep_s`, and the record outlives both.

``stoker:batch:BATCH:holder`` names the output file: only one process at a time takes answers out, else two files would
get half of them each. It expires. A process that is started again after a crash writes to the same file, whose lock it
has, so it need not wait.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from redis.exceptions import OutOfMemoryError

from stoker.operations import Command, Commands, Operation, Watched, ask, undisturbed
from stoker_shared.errors import StokerError
from stoker_shared.wire import BATCH_KEY

INDEX_KEY: Final = "stoker:batch::all"
_OUTLIVES_S: Final = 86_400


class BatchGone(StokerError):
    """There is no such batch in Redis (any more); the message ends with advice."""

    def __init__(self, batch: str, advice: str = "`stoker batch ls` lists the batches") -> None:
        super().__init__(f"no batch {batch} in Redis; {advice}")


class BatchUnreadable(StokerError):
    """Something else than a batch's record is where it should be: any producer may write there."""

    def __init__(self, batch: str) -> None:
        super().__init__(f"the record of batch {batch} in Redis cannot be read")


@dataclass(frozen=True)
class BatchRecord:
    """
    Attributes:
        queue: of its jobs; of a batch with models, those of all of them, with commas between, the cheapest first.
        source: name of the input file, only shown.
        n_requests, n_lines: lines of the input file, without and with blank lines.
        keep_s: how long a job may wait, and how long its result is kept, in seconds.
        created_s: when the batch was made, in Unix seconds.
        next_line: the first line that was not sent.
        n_sent: how many requests are before it.
        n_taken, n_failed: how many answers were taken out, and how many of these are not successes.
        output: identity of the file to which they were written.
        canceled: no more lines are sent, and workers start no more of those that were.
    """

    batch: str
    queue: str
    source: str
    n_requests: int
    n_lines: int
    keep_s: int
    created_s: int
    next_line: int = 1
    n_sent: int = 0
    n_taken: int = 0
    n_failed: int = 0
    output: str = ""
    canceled: bool = False

    @classmethod
    def from_hash(cls, batch: str, fields: Mapping[bytes, bytes]) -> Self:
        text = {name.decode(): value.decode() for name, value in fields.items()}
        numbers = ("n_requests", "n_lines", "keep_s", "created_s", "next_line", "n_sent", "n_taken", "n_failed")
        return cls(
            batch=batch, queue=text["queue"], source=text["source"], output=text.get("output", ""),
            canceled="canceled" in text, **{name: int(text.get(name, 0)) for name in numbers},
        )  # fmt: skip

    @property
    def queues(self) -> list[str]:
        return self.queue.split(",")

    @property
    def all_sent(self) -> bool:
        return self.canceled or self.next_line > self.n_lines

    @property
    def lives_s(self) -> int:
        return 2 * self.keep_s + _OUTLIVES_S


def record_key(batch: str) -> str:
    return BATCH_KEY.format(batch=batch)


def lines_key(batch: str) -> str:
    return f"stoker:batch:{batch}:lines"


def bad_key(batch: str) -> str:
    return f"stoker:batch:{batch}:bad"


def read_record(batch: str) -> Operation[BatchRecord | None]:
    """``None`` when there is no such batch in Redis.

    Raises:
        BatchUnreadable: what is there is no record.
    """
    fields = yield from ask("HGETALL", record_key(batch))
    try:
        return BatchRecord.from_hash(batch, fields) if fields else None
    except (KeyError, ValueError):
        raise BatchUnreadable(batch) from None


def find_record(name: str) -> Operation[BatchRecord]:
    """The batch of this id, or the only one whose id begins with `name`.

    Raises:
        BatchGone: there is none.
        ValueError: there are several.
    """
    record = yield from read_record(name)
    if record is None:
        fitting = [batch for batch in (yield from all_batches()) if batch.startswith(name)]
        if len(fitting) > 1:
            raise ValueError(f"several batches have ids that begin with {name!r}: {', '.join(fitting)}")
        record = (yield from read_record(fitting[0])) if fitting else None
    if record is None:
        raise BatchGone(name)
    return record


def register(record: BatchRecord) -> Operation[BatchRecord]:
    """Write the record unless the batch has one; returns the one in Redis."""

    def write(replies: list[Any]) -> list[Command] | None:
        if replies[0]:
            return None
        fields = ("queue", "source", "n_requests", "n_lines", "keep_s", "created_s", "next_line")
        pairs = [part for name in fields for part in (name, getattr(record, name))]
        return [
            ("HSET", record_key(record.batch), *pairs),
            ("ZADD", INDEX_KEY, record.created_s, record.batch),
            *kept(record),
        ]

    yield from undisturbed(Watched([record_key(record.batch)], [("EXISTS", record_key(record.batch))], write))
    return (yield from read_record(record.batch)) or record


def mark_canceled(record: BatchRecord) -> Operation[None]:
    """Cancel the batch: no more of its lines are sent, or started."""
    key = record_key(record.batch)

    def write(replies: list[Any]) -> list[Command] | None:
        return [("HSET", key, "canceled", 1), *kept(record)] if replies[0] else None

    yield from undisturbed(Watched([key], [("EXISTS", key)], write))


def forget(batch: str) -> Operation[None]:
    """Remove the batch from Redis, but not its jobs. Not a transaction, which Redis 7.0 refuses while it is full; an
    entry that is left in the index is removed by `all_batches`."""
    keys = (record_key(batch), lines_key(batch), bad_key(batch))
    yield Commands([("DEL", *keys), ("ZREM", INDEX_KEY, batch)])


def all_batches() -> Operation[list[str]]:
    """The ids of all batches, the oldest first. Batches whose record has expired are removed from the index."""
    names = [name.decode(errors="replace") for name in (yield from ask("ZRANGE", INDEX_KEY, 0, -1))]
    if not names:
        return []
    exist = yield Commands([("EXISTS", record_key(name)) for name in names])
    if gone := [name for name, exists in zip(names, exist, strict=True) if not exists]:
        yield from ask("ZREM", INDEX_KEY, *gone)
    return [name for name, exists in zip(names, exist, strict=True) if exists]


def kept(record: BatchRecord) -> list[Command]:
    """The commands that postpone the expiry of all keys of a batch."""
    keys = (record_key(record.batch), lines_key(record.batch), bad_key(record.batch))
    return [("EXPIRE", key, record.lives_s) for key in keys]


HOLD_S: Final = 15
RENEW_S: Final = 3.0


class BatchHeld(StokerError):
    """Another process is taking the answers of this batch out; the message names its output file."""


def hold(batch: str, identity: str) -> Operation[None]:
    """Take or keep the batch for `HOLD_S` seconds. A server that is full cannot write a new hold; the answers then
    leave it without one.

    Raises:
        BatchHeld: another process holds it.
    """
    key = _holder_key(batch)

    def write(replies: list[Any]) -> list[Command] | None:
        if replies[0] is None:
            return [("SET", key, identity, "EX", HOLD_S)]
        if replies[0] != identity.encode():
            holder = replies[0].decode(errors="replace").split(" ", 2)
            raise BatchHeld(f"the answers of {batch} are being written to {holder[-1]} on {holder[0]}")
        return [("EXPIRE", key, HOLD_S)]

    try:
        yield from undisturbed(Watched([key], [("GET", key)], write))
    except OutOfMemoryError:
        # Redis 7.0 refuses to renew in a transaction, too. Without one it renews, and on a full server the hold cannot
        # have become another process's meanwhile.
        yield from ask("EXPIRE", key, HOLD_S)


def release(batch: str, identity: str) -> Operation[None]:
    """End this process's hold; does nothing if another process holds the batch."""
    key = _holder_key(batch)
    mine = identity.encode()
    yield from undisturbed(Watched([key], [("GET", key)], lambda found: [("DEL", key)] if found[0] == mine else None))


def is_held(batch: str) -> Operation[bool]:
    return bool((yield from ask("EXISTS", _holder_key(batch))))


def _holder_key(batch: str) -> str:
    return f"stoker:batch:{batch}:holder"
