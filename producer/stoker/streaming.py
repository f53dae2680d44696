"""Reads a job's text as it is generated: requests the stream, and follows it to the job's end. Owns the reader's
position.

The stream brings the result's text, only sooner: the chunks since the last `Restarted` together are exactly that text.
The job's hash decides when the job is over. The reader also waits for an entry in the job's results, because a short
answer can end before its worker knows of the reader.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from rq.job import Job
from rq.results import Result

from stoker.job_record import NO_ENTRY, JobRecord, is_end
from stoker.operations import Command, Entries, Operation, Watched, ask, stream_entries, undisturbed
from stoker.waiting import Patience, timed_out
from stoker_shared.answer_parts import Markers
from stoker_shared.errors import JobNotFound
from stoker_shared.wire import FIELD_STREAM, STREAM_KEY

_MOST_ENTRIES: Final = 1000


@dataclass(frozen=True)
class TextChunk:
    """The next piece of the text.

    Attributes:
        markers: the answer's markers; ``None`` if unknown, and for text read from the job's result.
    """

    text: str
    markers: Markers | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Restarted:
    """The text begins again, because the worker was lost or the job is retried; discard the text so far."""


StreamEvent: TypeAlias = TextChunk | Restarted


class StreamReader:
    """One reader of one job. `is_over` is true once all text has been read.

    Args:
        timeout_s: how long to read, in seconds; ``None`` until the job ends, 0 for the text so far.
        slice_s: longest blocking read, as `blocking_slice_s` of the connection.
        was_answered: as for `Patience`.
    """

    def __init__(self, job_id: str, timeout_s: float | None, slice_s: float, *, was_answered: bool = False) -> None:
        self.is_over = False
        self._job_id = job_id
        self._patience = Patience(timeout_s, was_answered=was_answered)
        self._slice_s = slice_s
        self._asked = False
        self._may_be_over = False
        self._text_key, self._results_key = STREAM_KEY.format(job_id=job_id), Result.get_key(job_id)
        self._last_ids = {self._text_key: NO_ENTRY, self._results_key: NO_ENTRY}
        self._shown = ""
        self._markers: Markers | None = None

    def read(self) -> Operation[list[StreamEvent]]:
        """Waits for the next events; may return none. Raises `JobFailed`, `JobCanceled`, `JobNotFound`, `ResultTimeout`
        as `Ticket.result`, and `redis.exceptions.RedisError` as `Patience.enduring`."""
        return (yield from self._patience.enduring(self._next())) or []

    def _next(self) -> Operation[list[StreamEvent]]:
        if not self._asked:
            self._may_be_over = yield from self._ask()
            self._asked = True
        if not self._may_be_over:
            events = yield from self._follow()
            if events:
                return events
        record = yield from JobRecord.read(self._job_id)
        self._may_be_over = False
        if record.has_ended:
            self.is_over = True
            return self._whole(record.outcome().text, None)
        if self._patience.left_s <= 0:
            raise (yield from timed_out(record, self._patience.timeout_s or 0.0))
        return []

    def _ask(self) -> Operation[bool]:
        """Request the stream; returns whether the job is over already. Raises `JobNotFound`: there is no such job;
        nothing is written then, because a write would make one."""
        key = Job.key_for(self._job_id)
        states: list[bytes | None] = []

        def write(replies: list[list[bytes | None]]) -> list[Command] | None:
            [[state, asked]] = replies
            states.append(state)
            if state is None or asked is not None or is_end(state):
                return None
            return [("HSET", key, FIELD_STREAM, 1)]

        # A running job's hash changes twice a second, so the transaction may need several tries.
        yield from undisturbed(Watched([key], [("HMGET", key, "status", FIELD_STREAM)], write))
        state = states[-1]
        if state is None:
            raise JobNotFound(self._job_id)
        return is_end(state)

    def _follow(self) -> Operation[list[StreamEvent]]:
        """The events of the stream's next entries; none if no entry comes within a blocking read."""
        block_ms = max(1, int(1000 * min(self._slice_s, self._patience.left_s)))  # 0 would block for ever
        options = ("COUNT", _MOST_ENTRIES, "BLOCK", block_ms)
        reply = yield from ask("XREAD", *options, "STREAMS", *self._last_ids, *self._last_ids.values())
        found: dict[str, Entries] = stream_entries(reply)
        self._last_ids |= {key: entries[-1][0].decode() for key, entries in found.items() if entries}
        self._may_be_over |= self._results_key in found  # a failed try that is retried has an entry too
        events: list[StreamEvent] = []
        for _, fields in found.get(self._text_key, []):
            events += self._event(fields)
        return _joined(events)

    def _event(self, fields: Mapping[bytes, bytes]) -> list[StreamEvent]:
        kind, text = fields.get(b"kind"), fields.get(b"text", b"").decode(errors="replace")
        if kind == b"end":
            self._may_be_over = True
            return []
        if kind == b"whole":
            self._markers = _markers(fields.get(b"markers", b""))
        return self._whole(text if kind == b"whole" else self._shown + text, self._markers)

    def _whole(self, text: str, markers: Markers | None) -> list[StreamEvent]:
        """The events that bring a reader from the text shown so far to this text."""
        goes_on = text.startswith(self._shown)
        new = text[len(self._shown) :] if goes_on else text
        self._shown = text
        chunk: list[StreamEvent] = [TextChunk(new, markers)] if new else []
        return chunk if goes_on else [Restarted(), *chunk]


def _markers(value: bytes) -> Markers | None:
    """``None`` if the worker writes no markers, or a form that this code does not know."""
    with suppress(ValueError):
        return Markers.model_validate_json(value)
    return None


def _joined(events: list[StreamEvent]) -> list[StreamEvent]:
    """The events, with consecutive chunks joined into one."""
    joined: list[StreamEvent] = []
    for event in events:
        if joined and isinstance(event, TextChunk) and isinstance(joined[-1], TextChunk):
            joined[-1] = TextChunk(joined[-1].text + event.text, event.markers)
        else:
            joined.append(event)
    return joined
