"""A batch's record in Redis: where it is. Operations only; no files, and none of its lines.

``stoker:batch:BATCH`` (hash) is the record. Its `next_line` is the first that was not sent yet; it moves in the
transaction that enqueues the lines before it (sent_lines.py), so that nothing is sent twice, whoever sends and whatever
gets lost. ``stoker:batch::all`` (sorted set) names the batches. All keys of a batch expire: a job waits `keep_s` at the
most, its result is kept for `keep_s`, and the rest outlives both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from stoker.operations import Command, Commands, Operation, Watched, ask, undisturbed
from stoker_shared.errors import StokerError

INDEX_KEY: Final = "stoker:batch::all"
_OUTLIVES_S: Final = 86_400


class BatchGone(StokerError):
    """There is no such batch in Redis (any more)."""


@dataclass(frozen=True)
class BatchRecord:
    """
    Attributes:
        source: name of the input file, for people.
        n_requests, n_lines: of the input file, without and with blank lines.
        next_line: the first line that was not sent.
        n_sent: requests before it.
        n_taken, n_failed: answers that were taken out, and those of them that did not succeed.
        output: the file they were written to.
        canceled: nothing more is sent.
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
    def all_sent(self) -> bool:
        return self.canceled or self.next_line > self.n_lines

    @property
    def lives_s(self) -> int:
        return 2 * self.keep_s + _OUTLIVES_S


def record_key(batch: str) -> str:
    return f"stoker:batch:{batch}"


def lines_key(batch: str) -> str:
    return f"stoker:batch:{batch}:lines"


def bad_key(batch: str) -> str:
    return f"stoker:batch:{batch}:bad"


def read_record(batch: str) -> Operation[BatchRecord | None]:
    """``None`` when there is no such batch in Redis."""
    fields = yield from ask("HGETALL", record_key(batch))
    return BatchRecord.from_hash(batch, fields) if fields else None


def register(record: BatchRecord) -> Operation[BatchRecord]:
    """The record of this batch as it is, or this one."""

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
    """From now on nothing more of it is sent."""
    key = record_key(record.batch)

    def write(replies: list[Any]) -> list[Command] | None:
        return [("HSET", key, "canceled", 1), *kept(record)] if replies[0] else None

    yield from undisturbed(Watched([key], [("EXISTS", key)], write))


def forget(batch: str) -> Operation[None]:
    """The batch, not its jobs."""
    keys = (record_key(batch), lines_key(batch), bad_key(batch))
    yield Commands([("DEL", *keys), ("ZREM", INDEX_KEY, batch)], atomic=True)


def all_batches() -> Operation[list[str]]:
    """The oldest first. Those whose record has expired are removed from the index."""
    names = [name.decode() for name in (yield from ask("ZRANGE", INDEX_KEY, 0, -1))]
    if not names:
        return []
    exist = yield Commands([("EXISTS", record_key(name)) for name in names])
    if gone := [name for name, exists in zip(names, exist, strict=True) if not exists]:
        yield from ask("ZREM", INDEX_KEY, *gone)
    return [name for name, exists in zip(names, exist, strict=True) if exists]


def kept(record: BatchRecord) -> list[Command]:
    """Commands that let all of a batch live on."""
    keys = (record_key(record.batch), lines_key(record.batch), bad_key(record.batch))
    return [("EXPIRE", key, record.lives_s) for key in keys]
