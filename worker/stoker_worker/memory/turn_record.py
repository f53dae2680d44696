"""One version of an agent as a row of `turns`: the change that its turn made. Pure, any thread.

A record is a delta, so that its size does not grow with the conversation: how much of the parent's token ids, messages
and text it keeps, and what follows. Every `FULL_EVERY` versions it is the whole transcript, so that an agent of ten
thousand turns is read like one of ten. Owns the encoding and the replay; reads no database.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final, Literal, Self

import numpy as np
from pydantic import TypeAdapter, ValidationError

from stoker_shared.message import Message
from stoker_worker.memory.blocks import common_length
from stoker_worker.memory.checksum import Damaged, row_checksum
from stoker_worker.ports import CachedPrefix, EndedBy, Transcript
from stoker_worker.ports.memory import StoredMessage, is_stored_alike

FULL_EVERY: Final = 16

COLUMNS: Final = (
    "version, parent, delivery, about, keep_tokens, keep_messages, keep_text, new_tokens, new_messages, new_text, "
    "checksum"
)
"""Of a row, in the order of `TurnRecord.to_row`."""

MadeBy = Literal["turn", "fork", "rollback", "closed"]
"""``closed``: the version before it again, so that no version that is on its way can take its number."""


@dataclass(frozen=True)
class About:
    """The small facts of a version, one JSON object in the row.

    Attributes:
        carry_text: the end of the last answer, if no token covers it.
        tokenizer: fingerprint of the tokenizer and template that the token ids belong to.
        job_id: ``None``: a command made it.
        answer_until: Unix time until which its delivery may come again, and its answer must be there.
        saved_at: Unix time.
        tokens: in the transcript.
        since_full: versions since the last whole transcript; 0 for a whole one.
    """

    ended_by: EndedBy
    carry_text: str
    tokenizer: str
    cache: CachedPrefix | None
    made_by: MadeBy
    job_id: str | None
    finish_reason: str | None
    answer_until: float
    saved_at: float
    tokens: int
    since_full: int


def answer_until(about: str) -> float:
    """Of the column `about` of a row. Raises `Damaged`."""
    try:
        return _ABOUT.validate_json(about).answer_until
    except ValidationError:
        raise Damaged("its content is not a version") from None


_MESSAGE: Final[TypeAdapter[StoredMessage]] = TypeAdapter(StoredMessage)
_MESSAGES: Final[TypeAdapter[tuple[StoredMessage, ...]]] = TypeAdapter(tuple[StoredMessage, ...])
_ABOUT: Final = TypeAdapter(About)


@dataclass(frozen=True)
class TurnRecord:
    """One version of an agent: the fields are in the order of `COLUMNS`. `new_messages` and `new_text` are ``None``
    when the transcript has none.

    Attributes:
        parent: checksum of the row before it; ``None`` when this one keeps nothing of that.
        delivery: key of the delivery that made it (see `delivery_key`); ``None``: a command did.
        keep_text: characters kept.
    """

    agent_id: str
    version: int
    parent: bytes | None
    delivery: bytes | None
    about: About
    keep_tokens: int
    keep_messages: int
    keep_text: int
    new_tokens: tuple[int, ...]
    new_messages: tuple[Message, ...] | None
    new_text: str | None

    @property
    def keeps_nothing(self) -> bool:
        return self.parent is None

    def to_row(self) -> tuple[Any, ...]:
        """The values of `COLUMNS`; the last one is the checksum."""
        row = (
            self.version,
            self.parent,
            self.delivery,
            _ABOUT.dump_json(self.about).decode(),
            self.keep_tokens,
            self.keep_messages,
            self.keep_text,
            np.asarray(self.new_tokens, dtype="<u4").tobytes(),
            None if self.new_messages is None else _messages_json(self.new_messages),
            self.new_text,
        )
        return (*row, row_checksum((self.agent_id, *row)))

    @classmethod
    def of_row(cls, agent_id: str, version: int, row: Sequence[Any]) -> Self:
        """The record in the row at the place of version `version` of `agent_id`.

        Raises:
            Damaged: it is not as it was written, or another agent's or version's.
        """
        *content, written = row
        try:
            is_whole = row_checksum((agent_id, *content)) == written and content[0] == version
        except UnicodeError:
            is_whole = False
        if not is_whole:
            raise Damaged("its checksum does not match")
        try:
            number, parent, delivery, about, keep_tokens, keep_messages, keep_text, tokens, messages, text = content
            kept = keep_tokens, keep_messages, keep_text
            new_tokens = tuple(np.frombuffer(tokens, dtype="<u4").tolist())
            new_messages = None if messages is None else _messages_of(messages)
            about = _ABOUT.validate_json(about)
            return cls(agent_id, number, parent, delivery, about, *kept, new_tokens, new_messages, text)
        except (ValueError, TypeError):
            raise Damaged("its content is not a version") from None


def delta(base: Transcript | None, new: Transcript, parent: bytes | None = None) -> dict[str, Any]:
    """The fields of a `TurnRecord` that turn `base`, the transcript of row `parent`, into `new`. Without `base` the
    record keeps nothing, and a record that keeps nothing has no parent."""
    keep_tokens = common_length(base.token_ids, new.token_ids) if base else 0
    keep_messages = _common_messages(base.messages or (), new.messages or ()) if base else 0
    keep_text = common_length(base.text or "", new.text or "") if base else 0
    return {
        "parent": parent if keep_tokens or keep_messages or keep_text else None,
        "keep_tokens": keep_tokens,
        "new_tokens": new.token_ids[keep_tokens:],
        "keep_messages": keep_messages,
        "new_messages": None if new.messages is None else new.messages[keep_messages:],
        "keep_text": keep_text,
        "new_text": None if new.text is None else new.text[keep_text:],
    }


def replay(records: Iterable[TurnRecord]) -> Transcript:
    """The transcript after `records`: at least one, oldest first; the first keeps nothing.

    Raises:
        Damaged: a record keeps more than its parent has.
    """
    tokens: list[int] = []
    messages: list[Message] = []
    text = ""
    for record in records:
        if record.keep_tokens > len(tokens) or record.keep_messages > len(messages) or record.keep_text > len(text):
            raise Damaged(f"version {record.version} keeps more than its parent has")
        del tokens[record.keep_tokens :], messages[record.keep_messages :]
        tokens += record.new_tokens
        messages += record.new_messages or ()
        text = text[: record.keep_text] + (record.new_text or "")
    about = record.about
    return Transcript(
        token_ids=tuple(tokens),
        tokenizer_fingerprint=about.tokenizer,
        messages=None if record.new_messages is None else tuple(messages),
        text=None if record.new_text is None else text,
        ended_by=about.ended_by,
        carry_text=about.carry_text,
    )


def _messages_json(messages: tuple[Message, ...]) -> str:
    # Python's own JSON: it keeps NaN, and no text that a tool call may hold is beyond ASCII escapes.
    return json.dumps([message.model_dump(exclude_defaults=True) for message in messages], separators=(",", ":"))


def _messages_of(text: str) -> tuple[Message, ...]:
    """Raises `ValueError`, `TypeError`."""
    try:
        return _MESSAGES.validate_json(text)
    except ValidationError:  # it knows no lone surrogates, which a tool call may hold
        return tuple(_MESSAGE.validate_python(fields) for fields in json.loads(text))


def _common_messages(left: tuple[Message, ...], right: tuple[Message, ...]) -> int:
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: is_stored_alike(*pair), pairs))
