"""Reads the ends of lines' jobs from Redis, and puts them into OpenAI's form. Operations only; writes nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rq.results import Result

from stoker.batch import answers
from stoker.batch.lines import BadLine
from stoker.batch.naming import answer_id_for
from stoker.batch.sent_lines import SentLine, bad_answers
from stoker.job_record import KEPT_RESULTS, JobRecord
from stoker.operations import Commands, Entries, Operation, ask, stream_entries
from stoker_shared.errors import JobCanceled, JobFailed, JobNotFound
from stoker_shared.result import Usage

_CLOCK_JUMP_MS: Final = 60_000


@dataclass(frozen=True)
class End:
    """
    Attributes:
        usage: token counts of a job that succeeded, else ``None``.
        n_bytes: about how much was read from Redis for it.
    """

    answer: Mapping[str, Any]
    usage: Usage | None = None
    n_bytes: int = 0


def ends_of(
    batch: str, lines: Sequence[SentLine], *, before_ms: int, look_at_all: bool
) -> Operation[dict[SentLine, End]]:
    """The ends of those of `lines` that have ended, in their order.

    Args:
        before_ms: omit jobs that ended at this time of the server or later. The lines of one agent end in their order;
            with the same time for all lines, a later one is never found without the earlier ones.
        look_at_all: also find jobs that ended without an entry in their stream (canceled, deleted, expired); this costs
            a command for each line.
    """
    bad = yield from bad_answers(batch, [line.number for line in lines if line.custom_id is None])
    jobs = [line for line in lines if line.custom_id is not None]
    streams = yield from _streams([line.job_id(batch) for line in jobs])
    fresh = {job_id for job_id, entries in streams.items() if _is_since(before_ms, entries)}
    jobs = [line for line in jobs if line.job_id(batch) not in fresh]
    seen = [line for line in jobs if look_at_all or line.job_id(batch) in streams]
    hashes = []
    if seen:
        hashes = yield Commands([JobRecord.hash_command(line.job_id(batch)) for line in seen])
    # A job that ended between the two reads has its entry by now, and is found next time.
    late = [line.job_id(batch) for line, values in zip(seen, hashes, strict=True) if values[0] is not None]
    late_streams = yield from _streams([job_id for job_id in late if job_id not in streams])
    found = {line: End(bad[line.number]) for line in lines if line.number in bad}
    for line, values in zip(seen, hashes, strict=True):
        job_id = line.job_id(batch)
        end = _end(line, job_id, values, streams.get(job_id, []))
        if end is not None and job_id not in late_streams:
            found[line] = end
    return {line: found[line] for line in lines if line in found}


def canceled(number: int, custom_id: str | None, job_id: str, why: str) -> dict[str, Any]:
    """The answer of a line that is not run because its batch, or its job, was canceled."""
    return answers.not_run(answer_id_for(job_id), BadLine(number, custom_id, "batch_cancelled", why))


def _streams(job_ids: Sequence[str]) -> Operation[dict[str, Entries]]:
    if not job_ids:
        return {}
    keys = {Result.get_key(job_id): job_id for job_id in job_ids}
    [reply] = yield Commands([("XREAD", "COUNT", KEPT_RESULTS, "STREAMS", *keys, *["0-0"] * len(keys))])
    return {keys[key]: entries for key, entries in stream_entries(reply).items()}


def server_ms() -> Operation[int]:
    """The server's time, which also numbers the entries of streams."""
    seconds, microseconds = yield from ask("TIME")
    return int(seconds) * 1000 + int(microseconds) // 1000


def _is_since(before_ms: int, entries: Entries) -> bool:
    """Whether the end is that recent. An end far in the future is older: the server's clock was set back after it."""
    return before_ms <= _ended_ms(entries) < before_ms + _CLOCK_JUMP_MS


def _ended_ms(entries: Entries) -> int:
    return int(entries[-1][0].split(b"-")[0])


def _end(line: SentLine, job_id: str, values: Sequence[Any], entries: Entries) -> End | None:
    answer_id, custom_id = answer_id_for(job_id), line.custom_id or ""
    record = JobRecord.from_replies(job_id, values, entries[::-1])
    if record is not None and not record.has_ended:
        return None
    try:
        if record is None:
            raise JobNotFound(job_id, "gone: it, or its result, has expired, or it was deleted")
        result = record.outcome()
    except JobFailed as failed:
        return End(answers.failure(answer_id, custom_id, job_id, failed.reason, failed.partial_text))
    except JobCanceled as error:
        return End(canceled(line.number, custom_id, job_id, str(error)))
    except JobNotFound as error:
        return End(answers.not_run(answer_id, BadLine(line.number, custom_id, "batch_expired", str(error))))
    answer = answers.success(answer_id, custom_id, line.url, _ended_ms(entries) // 1000, result)
    return End(answer, result.usage, sum(len(value) for _, fields in entries for value in fields.values()))
