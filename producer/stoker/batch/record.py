"""A batch in Redis: its record, the hold on it, and its lines. Operations only; no files.

``stoker:batch:BATCH`` (hash) is the record. Its `next_line` is the first line that was not sent yet. The transaction
that enqueues lines moves it on, so no line is sent twice, even by several processes and with lost replies.
``stoker:batch::all`` (sorted set) names the batches. All keys of a batch expire: a job waits for at most `keep_s`, its
result is kept for `keep_s`, and the record outlives both.

``stoker:batch:BATCH:holder`` names the output file: only one process at a time takes answers out, because two files
would get half of them each. It expires. A process that starts again after a crash writes to the same file, whose lock
it has, so it need not wait.

``stoker:batch:BATCH:lines`` (sorted set, by line number) has every line that was sent and not taken out again. Such a
line is either a job or a bad line, whose answer is ready (``stoker:batch:BATCH:bad``, hash).
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self

from redis.exceptions import OutOfMemoryError
from rq.job import Job, JobStatus
from rq.results import Result

from stoker.api.chat import CHAT_URL, TEXT_URL
from stoker.api.responses import RESPONSES
from stoker.batch.input_file import Line, job_id_for
from stoker.canceling import cancel_job
from stoker.job_record import ENDED, ENDED_REGISTRIES, registry_key
from stoker.new_job import NewJob, make_queue_known, push
from stoker.operations import Command, Commands, Operation, Watched, ask, undisturbed
from stoker_shared.errors import JobNotFound, StokerError
from stoker_shared.wire import BATCH_KEY, FIELD_BATCH, FIELD_PACKED, PACKED_WITH_ZLIB

INDEX_KEY: Final = "stoker:batch::all"
_OUTLIVES_S: Final = 86_400


class BatchGone(StokerError):
    """The batch is not in Redis (any more); the message ends with advice."""

    def __init__(self, batch: str, advice: str = "`stoker batch ls` lists the batches") -> None:
        super().__init__(f"no batch {batch} in Redis; {advice}")


class BatchUnreadable(StokerError):
    """The key of a batch's record has other content; any client may write there."""

    def __init__(self, batch: str) -> None:
        super().__init__(f"the record of batch {batch} in Redis cannot be read")


@dataclass(frozen=True)
class BatchRecord:
    """
    Attributes:
        queue: the queue of its jobs; with models, the queues of all of them, the cheapest first, separated by commas.
        source: name of the input file, only for display.
        n_requests, n_lines: lines of the input file, without and with blank lines.
        keep_s: how long a job may wait, and how long its result is kept, in seconds.
        created_s: when the batch was made, in Unix seconds.
        next_line: the first line that was not sent.
        n_sent: the number of requests before it.
        n_taken, n_failed: the number of answers taken out, and of those among them that are not successes.
        output: identity of the file to which they were written.
        canceled: no more lines are sent, and workers start none of those that were.
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
    """``None`` if the batch is not in Redis. Raises `BatchUnreadable`."""
    fields = yield from ask("HGETALL", record_key(batch))
    try:
        return BatchRecord.from_hash(batch, fields) if fields else None
    except (KeyError, ValueError):
        raise BatchUnreadable(batch) from None


def find_record(name: str) -> Operation[BatchRecord]:
    """The batch with this id, or the only one whose id begins with `name`. Raises `BatchGone`: there is none;
    `ValueError`: there are several, or `name` is empty."""
    if not name:  # an unset variable of a shell: `cancel --forget` would remove the only batch
        raise ValueError("the id of a batch is empty")
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
    """Remove the batch from Redis, but not its jobs. Not a transaction, because Redis 7.0 refuses one while it is full;
    `all_batches` removes an entry left in the index."""
    keys = (record_key(batch), lines_key(batch), bad_key(batch))
    yield Commands([("DEL", *keys), ("ZREM", INDEX_KEY, batch)])


def all_batches() -> Operation[list[str]]:
    """The ids of all batches, the oldest first. Batches whose record has expired are removed from the index."""
    names = [name.decode(errors="replace") for name in (yield from ask("ZRANGE", INDEX_KEY, 0, -1))]
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
    """Take or keep the batch for `HOLD_S` seconds. A full server cannot write a new hold; the batch is then taken
    without one. Raises `BatchHeld`: another process holds it."""
    key = _holder_key(batch)

    def write(replies: list[Any]) -> list[Command] | None:
        if replies[0] is None:
            return [("SET", key, identity, "EX", HOLD_S)]
        if replies[0] != identity.encode():
            holder = replies[0].decode(errors="replace").split(" ", 2)
            where = f"{holder[-1]} on {holder[0]}"
            raise BatchHeld(f"the answers of {batch} are being written to {where}, or were {HOLD_S} s ago; try again")
        return [("EXPIRE", key, HOLD_S)]

    try:
        yield from undisturbed(Watched([key], [("GET", key)], write))
    except OutOfMemoryError:
        # Redis 7.0 refuses the renewal in a transaction, but not outside one; and on a full server, no other process
        # can have taken the hold meanwhile.
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


_MARKS: Final = {CHAT_URL: "chat", TEXT_URL: "text", RESPONSES.url: "responses"}
_URLS: Final = {mark: url for url, mark in _MARKS.items()}
_BAD: Final = "bad"


@dataclass(frozen=True)
class SentLine:
    """A line that is in Redis; `custom_id` is ``None`` for a bad line."""

    number: int
    member: str
    url: str
    custom_id: str | None

    def job_id(self, batch: str) -> str:
        return job_id_for(batch, self.number, self.custom_id)


def n_in_redis(batch: str) -> Operation[int]:
    return int((yield from ask("ZCARD", lines_key(batch))))


def n_bad(batch: str) -> Operation[int]:
    """The number of lines that cannot be run and whose answers are in Redis."""
    return int((yield from ask("HLEN", bad_key(batch))))


def send(
    record: BatchRecord, jobs: Sequence[tuple[Line, NewJob]], bad: Mapping[int, Mapping[str, Any]], *, upto: int, n: int
) -> Operation[bool]:
    """Enqueue the lines from `next_line` to before `upto`, all or none. Returns ``False`` if another process has sent
    them meanwhile, or has canceled the batch.

    Args:
        bad: the answers to lines that cannot be run, by line number.
        n: the number of requests among these lines.
    """
    batch, key = record.batch, record_key(record.batch)

    def write(replies: list[Any]) -> list[Command] | None:
        next_line, canceled = replies[0]
        if canceled is not None or next_line is None or int(next_line) != record.next_line:
            return None
        commands: list[Command] = [("HSET", key, "next_line", upto), ("HINCRBY", key, "n_sent", n)]
        members: list[Any] = []
        for queue in dict.fromkeys(job.queue for _, job in jobs):
            commands.append(make_queue_known(queue))
            commands += push(queue, [job for _, job in jobs if job.queue == queue], at_front=False)
        for line, job in jobs:
            fields = (FIELD_PACKED, PACKED_WITH_ZLIB, FIELD_BATCH, batch)
            commands += [*job.commands(deferred=False), ("HSET", job.key, *fields)]
            members += [line.number, f"{_MARKS[line.url]}:{line.custom_id}"]
        for number, answer in bad.items():
            commands.append(("HSET", bad_key(batch), number, json.dumps(answer)))
            members += [number, f"{_BAD}:{number}"]
        if members:
            commands.append(("ZADD", lines_key(batch), *members))
        return [*commands, *kept(record)]

    replies = yield from undisturbed(Watched([key], [("HMGET", key, "next_line", "canceled")], write))
    return replies is not None


def sent_lines(batch: str, after: int, count: int) -> Operation[list[SentLine]]:
    """The next `count` lines in Redis after the line number `after`, sorted by number."""
    found = yield from ask("ZRANGEBYSCORE", lines_key(batch), f"({after}", "(+inf", "WITHSCORES", "LIMIT", 0, count)
    # The reply is flat in RESP2 and has pairs in RESP3.
    pairs = found if found and isinstance(found[0], list | tuple) else zip(found[::2], found[1::2], strict=True)
    return [_sent_line(int(float(number)), member.decode(errors="replace")) for member, number in pairs]


def bad_answers(batch: str, numbers: Sequence[int]) -> Operation[dict[int, dict[str, Any]]]:
    if not numbers:
        return {}
    found = yield from ask("HMGET", bad_key(batch), *numbers)
    return {number: json.loads(text) for number, text in zip(numbers, found, strict=True) if text is not None}


def take_out(record: BatchRecord, lines: Mapping[SentLine, bool], output: str) -> Operation[bool]:
    """Remove answered lines from Redis, with their jobs and results, and count them: all or nothing, each line once.

    A full server refuses to count, and Redis 7.0 then refuses every transaction. So the large keys are removed first,
    without a transaction. The lines stay until they are counted, so no answer is missing from the count.

    Args:
        lines: the lines, and whether each succeeded. Their answers are in the output file already.

    Returns:
        ``False`` if the server is full even so: the lines are still there, and have to be taken out again.
    """
    taken, keys = list(lines), [lines_key(record.batch), record_key(record.batch)]
    answers = _answer_removals(record, taken)

    def write(replies: list[Any]) -> list[Command]:
        scores, is_there = replies
        there = [line for line, score in zip(taken, scores, strict=True) if score is not None]
        counts = _counts(record, output, len(there), sum(not lines[line] for line in there)) if is_there else []
        return [*answers, *_entry_removals(record, taken), *counts]

    reads = [("ZMSCORE", keys[0], *(line.member for line in taken)), ("EXISTS", keys[1])]
    whole = Watched(keys, reads, write)
    with suppress(OutOfMemoryError):
        yield from undisturbed(whole)
        return True
    yield Commands(answers)
    with suppress(OutOfMemoryError):
        yield from undisturbed(whole)
        return True
    return False


def _answer_removals(record: BatchRecord, lines: Sequence[SentLine]) -> list[Command]:
    """Each may be repeated, and needs no memory."""
    commands: list[Command] = []
    if jobs := [line.job_id(record.batch) for line in lines if line.custom_id is not None]:
        commands.append(("DEL", *(key for job_id in jobs for key in (Job.key_for(job_id), Result.get_key(job_id)))))
    if bad := [line.number for line in lines if line.custom_id is None]:
        commands.append(("HDEL", bad_key(record.batch), *bad))
    return commands


def _entry_removals(record: BatchRecord, lines: Sequence[SentLine]) -> list[Command]:
    commands: list[Command] = [("ZREM", lines_key(record.batch), *(line.member for line in lines))]
    if jobs := [line.job_id(record.batch) for line in lines if line.custom_id is not None]:
        for queue in record.queues:
            commands += [("ZREM", registry_key(registry, queue), *jobs) for registry in ENDED_REGISTRIES]
    return commands


def _counts(record: BatchRecord, output: str, n_taken: int, n_failed: int) -> list[Command]:
    key = record_key(record.batch)
    added = (("n_taken", n_taken), ("n_failed", n_failed))
    return [("HSET", key, "output", output), *(("HINCRBY", key, name, n) for name, n in added), *kept(record)]


def _sent_line(number: int, member: str) -> SentLine:
    mark, _, custom_id = member.partition(":")
    return SentLine(number, member, _URLS.get(mark, ""), custom_id if mark in _URLS else None)


_PAGE: Final = 500


def cancel_batch(record: BatchRecord, *, remove: bool) -> Operation[int]:
    """Cancel the batch; returns the number of jobs canceled here. One write is enough, because workers start no line of
    a canceled batch. The rest stops the running lines, and takes the waiting ones out of the queue at once. `remove`:
    also remove the answers and the batch from Redis."""
    yield from mark_canceled(record)
    after, n_canceled = 0, 0
    while lines := (yield from sent_lines(record.batch, after, _PAGE)):
        n_canceled += yield from _cancel(record.batch, lines)
        if remove:
            yield from take_out(record, dict.fromkeys(lines, False), "")
        after = lines[-1].number
    if remove:
        yield from forget(record.batch)
    return n_canceled


def _cancel(batch: str, lines: list[SentLine]) -> Operation[int]:
    jobs = [line.job_id(batch) for line in lines if line.custom_id is not None]
    states = yield Commands([("HGET", Job.key_for(job_id), "status") for job_id in jobs])
    n_canceled = 0
    for job_id, state in zip(jobs, states, strict=True):
        if state is not None and state.decode(errors="replace") not in ENDED:
            with suppress(JobNotFound):  # it has just expired, or was deleted
                n_canceled += yield from cancel_job(job_id)
    return n_canceled


@dataclass(frozen=True)
class BatchStatus:
    """The requests of a batch by state, each counted once.

    Attributes:
        not_sent: only in the input file so far.
        waiting, running: in Redis, not ended.
        done, failed: ended, taken out or not.
        to_fetch: ended and still in Redis.
    """

    not_sent: int
    waiting: int
    running: int
    done: int
    failed: int
    to_fetch: int

    @property
    def state(self) -> str:
        if self.not_sent + self.waiting + self.running:
            return "running" if self.running or self.done or self.failed else "waiting"
        return "ended" if self.to_fetch else "fetched"


def status_of(record: BatchRecord) -> Operation[BatchStatus]:
    """Count the requests, with one command for each job in Redis."""
    counts: Counter[str] = Counter()
    after, n_there = 0, 0
    while lines := (yield from sent_lines(record.batch, after, _PAGE)):
        counts.update((yield from _states(record.batch, lines)))
        after, n_there = lines[-1].number, n_there + len(lines)
    failed, ended = counts["failed"], counts["failed"] + counts["done"]
    n_gone = max(0, record.n_sent - n_there)  # lines that an earlier start found in its output file count as done
    return BatchStatus(
        not_sent=max(0, record.n_requests - record.n_sent),
        waiting=counts["waiting"],
        running=counts["running"],
        done=max(0, n_gone - record.n_failed) + counts["done"],
        failed=record.n_failed + failed,
        to_fetch=ended,
    )


def _states(batch: str, lines: Sequence[SentLine]) -> Operation[list[str]]:
    jobs = [line for line in lines if line.custom_id is not None]
    found = yield Commands([("HGET", Job.key_for(line.job_id(batch)), "status") for line in jobs])
    return ["failed"] * (len(lines) - len(jobs)) + [_state(status) for status in found]


def _state(status: bytes | None) -> str:
    text = (status or b"").decode(errors="replace")
    if text == JobStatus.FINISHED.value:
        return "done"
    if text == JobStatus.STARTED.value:
        return "running"
    return "failed" if status is None or text in ENDED else "waiting"
