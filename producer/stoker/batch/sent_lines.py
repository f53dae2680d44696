"""The lines of a batch that are in Redis: sends each line once, and takes it out again. Operations only; no files.

``stoker:batch:BATCH:lines`` (sorted set, by line number) has every line that was sent and not taken out again. Such a
line is either a job or a bad line, whose answer is ready (``stoker:batch:BATCH:bad``, hash).
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from redis.exceptions import OutOfMemoryError
from rq.job import Job
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry
from rq.results import Result

from stoker.batch.lines import Line
from stoker.batch.naming import job_id_for
from stoker.batch.record import BatchRecord, bad_key, kept, lines_key, record_key
from stoker.job_record import registry_key
from stoker.new_job import NewJob, make_queue_known, push
from stoker.openai.fields import CHAT_URL, TEXT_URL
from stoker.operations import Command, Commands, Operation, Watched, ask, undisturbed
from stoker_shared.wire import FIELD_BATCH, FIELD_PACKED, PACKED_WITH_ZLIB

_MARKS: Final = {CHAT_URL: "chat", TEXT_URL: "text"}
_URLS: Final = {mark: url for url, mark in _MARKS.items()}
_BAD: Final = "bad"
_REGISTRIES: Final = (FinishedJobRegistry, FailedJobRegistry, CanceledJobRegistry)


@dataclass(frozen=True)
class SentLine:
    """A line that is in Redis.

    Attributes:
        custom_id: ``None`` for a bad line.
    """

    number: int
    member: str
    url: str
    custom_id: str | None

    def job_id(self, batch: str) -> str:
        return job_id_for(batch, self.number, self.custom_id)


def n_in_redis(batch: str) -> Operation[int]:
    return int((yield from ask("ZCARD", lines_key(batch))))


def n_bad(batch: str) -> Operation[int]:
    """Lines that cannot be run and whose answers are in Redis."""
    return int((yield from ask("HLEN", bad_key(batch))))


def send(
    record: BatchRecord, jobs: Sequence[tuple[Line, NewJob]], bad: Mapping[int, Mapping[str, Any]], *, upto: int, n: int
) -> Operation[bool]:
    """Enqueue the lines from `next_line` to before `upto`, all or none.

    Args:
        bad: the answers to lines that cannot be run, by line number.
        n: how many requests are among these lines.

    Returns:
        ``False`` if another process has sent them meanwhile, or has canceled the batch.
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
    pairs = [(entry[0], entry[1]) for entry in found] if found and isinstance(found[0], list | tuple) else _pairs(found)
    return [_sent_line(int(float(number)), member.decode(errors="replace")) for member, number in pairs]


def bad_answers(batch: str, numbers: Sequence[int]) -> Operation[dict[int, dict[str, Any]]]:
    if not numbers:
        return {}
    found = yield from ask("HMGET", bad_key(batch), *numbers)
    return {number: json.loads(text) for number, text in zip(numbers, found, strict=True) if text is not None}


def take_out(record: BatchRecord, lines: Mapping[SentLine, bool], output: str) -> Operation[bool]:
    """Remove answered lines from Redis, with their jobs and results, and count them: all or nothing, each line once.

    A server that is full refuses to count, and Redis 7.0 then refuses every transaction. So what takes up the room is
    removed first, without a transaction. The lines stay until they are counted: an answer is never lost from the count.

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
            commands += [("ZREM", registry_key(registry, queue), *jobs) for registry in _REGISTRIES]
    return commands


def _counts(record: BatchRecord, output: str, n_taken: int, n_failed: int) -> list[Command]:
    key = record_key(record.batch)
    added = (("n_taken", n_taken), ("n_failed", n_failed))
    return [("HSET", key, "output", output), *(("HINCRBY", key, name, n) for name, n in added), *kept(record)]


def _pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _sent_line(number: int, member: str) -> SentLine:
    mark, _, custom_id = member.partition(":")
    return SentLine(number, member, _URLS.get(mark, ""), custom_id if mark in _URLS else None)
