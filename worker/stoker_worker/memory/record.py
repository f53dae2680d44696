"""One turn of an agent as a record: what it changed in the transcript, and the result it gave. Pure, any thread.

A record is a delta, so that a turn's share on disk does not grow with the conversation: how much of the parent's
token ids, messages and text it keeps, and what is new. Owns the encoding and the replay; reads no files.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from stoker_shared.request import Message
from stoker_worker.memory.blocks import common_length
from stoker_worker.memory.sealed import Damaged, checksum, seal, unseal
from stoker_worker.ports import Delivery, EndedBy, Transcript

NO_JOB: Final = Delivery("", "")
"""Delivery of a version that no job made; a job's id is never empty."""

MOST_SNAPSHOTS: Final = 2
"""Of one version: one before the prompt's last token, one at the end of the turn."""


@dataclass(frozen=True)
class CachedPrefix:
    """Which cache an agent has on disk: the first `tokens` tokens of its transcript.

    The full blocks of them are in the shared block folder, the rest (`tokens` modulo the block size) in its tail; the
    state of window and recurrent layers is in its snapshots.

    Attributes:
        model: fingerprint of the model that made it.
        last_block: address of the last full block (the chain's root when there is none).
        snapshots: after how many tokens each snapshot stands, ascending.
    """

    model: str
    salt: str | None
    tokens: int
    last_block: str
    snapshots: tuple[int, ...] = ()


def are_snapshots(counts: Sequence[int], most_tokens: int) -> bool:
    """Whether a version's snapshots may stand after so many tokens each."""
    return len(counts) <= MOST_SNAPSHOTS and all(x < y for x, y in pairwise([0, *counts, most_tokens + 1]))


class TurnRecord(BaseModel):
    """Version `version` of an agent. `new_messages` and `new_text` are ``None`` when the transcript has none.

    Attributes:
        parent: checksum of the record before it; ``None`` when this one keeps nothing of it.
        keep_text: characters kept.
        tokenizer: fingerprint of the tokenizer and template that `new_tokens` belong to.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    agent_id: str
    version: PositiveInt
    parent: str | None
    keep_tokens: NonNegativeInt
    new_tokens: tuple[int, ...]
    keep_messages: NonNegativeInt
    new_messages: tuple[Message, ...] | None
    keep_text: NonNegativeInt
    new_text: str | None
    ended_by: EndedBy
    carry_text: str
    tokenizer: str
    delivery: Delivery
    result: dict[str, Any]
    cache: CachedPrefix | None

    @property
    def keeps_nothing(self) -> bool:
        return self.parent is None

    def encode(self) -> bytes:
        return seal("stoker-record", self.model_dump_json(exclude_defaults=True).encode() + b"\n")

    @classmethod
    def decode(cls, data: bytes, *, agent_id: str, version: int) -> Self:
        """Read a record that stands where version `version` of `agent_id` belongs.

        Raises:
            Damaged: it is damaged, or another agent's or version's.
        """
        body = unseal("stoker-record", data)
        try:
            record = cls.model_validate_json(body)
        except ValidationError:
            raise Damaged("its content is not a record") from None
        if record.agent_id != agent_id:
            raise Damaged("it belongs to another agent")
        if record.version != version:
            raise Damaged(f"it is version {record.version}")
        return record


def record_checksum(encoded: bytes) -> str:
    """What a child's `parent` and HEAD say of a record."""
    return checksum(encoded.partition(b"\n")[2])


def delta(base: Transcript | None, new: Transcript) -> dict[str, Any]:
    """The fields of a `TurnRecord` that turn `base` into `new`; without `base` the record keeps nothing."""
    keep_tokens = common_length(base.token_ids, new.token_ids) if base else 0
    keep_messages = _common_messages(base.messages or (), new.messages or ()) if base else 0
    keep_text = common_length(base.text or "", new.text or "") if base else 0
    return {
        "keep_tokens": keep_tokens,
        "new_tokens": new.token_ids[keep_tokens:],
        "keep_messages": keep_messages,
        "new_messages": None if new.messages is None else new.messages[keep_messages:],
        "keep_text": keep_text,
        "new_text": None if new.text is None else new.text[keep_text:],
        "ended_by": new.ended_by,
        "carry_text": new.carry_text,
        "tokenizer": new.tokenizer_fingerprint,
    }


def replay(records: Iterable[TurnRecord]) -> Transcript:
    """The transcript after `records`: at least one, oldest first, the first of which keeps nothing.

    Raises:
        Damaged: a record keeps more than there is.
    """
    tokens: list[int] = []
    messages: list[Message] = []
    text = ""
    for record in records:
        if record.keep_tokens > len(tokens) or record.keep_messages > len(messages) or record.keep_text > len(text):
            raise Damaged(f"record {record.version} keeps more than its parent has")
        del tokens[record.keep_tokens :], messages[record.keep_messages :]
        tokens += record.new_tokens
        messages += record.new_messages or ()
        text = text[: record.keep_text] + (record.new_text or "")
    return Transcript(
        token_ids=tuple(tokens),
        tokenizer_fingerprint=record.tokenizer,
        messages=None if record.new_messages is None else tuple(messages),
        text=None if record.new_text is None else text,
        ended_by=record.ended_by,
        carry_text=record.carry_text,
    )


def _common_messages(left: tuple[Message, ...], right: tuple[Message, ...]) -> int:
    shared = 0
    for ours, theirs in zip(left, right, strict=False):
        if not ours.is_exactly(theirs):
            break
        shared += 1
    return shared
