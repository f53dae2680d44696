"""One version of an agent as a record: the change of its transcript, and the job's result. Pure, any thread.

A record is a delta, so that its size does not grow with the conversation: how much of the parent's token ids, messages
and text it keeps, and what follows. Owns the encoding and the replay; reads no files.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from stoker_shared.request import Message
from stoker_worker.memory.block_chain import BlockChain, common_length
from stoker_worker.memory.checksummed_file import Damaged, checksum, seal, unseal
from stoker_worker.ports import AgentVersion, Delivery, EndedBy, Transcript

NO_JOB: Final = Delivery("", "")
"""Delivery of a version that a command made; a job's id is never empty."""

MOST_SNAPSHOTS: Final = 2
"""Of one version: one before the prompt's last token, and one at the end of the turn."""


@dataclass(frozen=True)
class CachedPrefix:
    """The part of a transcript whose cache is on disk: its first `tokens` tokens.

    Their full blocks are in the shared block folder, the rest (`tokens` modulo the block size) is in the agent's tail,
    and the state of window and recurrent layers is in its snapshots.

    Attributes:
        model: fingerprint of the model that made it.
        last_block: address of the last full block (the chain's root when there is none).
        snapshots: after how many tokens each snapshot was taken, ascending.
    """

    model: str
    salt: str | None
    tokens: int
    last_block: str
    snapshots: tuple[int, ...] = ()

    @classmethod
    def of(cls, chain: BlockChain, snapshots: tuple[int, ...] = ()) -> Self:
        return cls(chain.model, chain.salt, len(chain.token_ids), chain.last, snapshots)

    def chain(self, token_ids: tuple[int, ...]) -> BlockChain:
        """Its blocks; `token_ids` are the transcript's."""
        return BlockChain(self.model, self.salt, token_ids[: self.tokens])


def are_snapshots(counts: Sequence[int], most_tokens: int) -> bool:
    """Whether a version's snapshots may be after these numbers of tokens."""
    return len(counts) <= MOST_SNAPSHOTS and all(x < y for x, y in pairwise([0, *counts, most_tokens + 1]))


class TurnRecord(BaseModel):
    """One version of an agent. `new_messages` and `new_text` are ``None`` when the transcript has none.

    Attributes:
        parent: checksum of the record before it; ``None`` when this one keeps nothing of that.
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
        """Read the record at the place of version `version` of `agent_id`.

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
    """The checksum that the next record's `parent`, or HEAD, has of a record."""
    return checksum(encoded.partition(b"\n")[2])


def delta(base: Transcript | None, new: Transcript, parent: str | None = None) -> dict[str, Any]:
    """The fields of a `TurnRecord` that turn `base`, the transcript of record `parent`, into `new`. Without `base` the
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
        "ended_by": new.ended_by,
        "carry_text": new.carry_text,
        "tokenizer": new.tokenizer_fingerprint,
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


@dataclass(frozen=True)
class Head:
    """Version 0 is an agent whose first turn has not been committed yet.

    Attributes:
        record: checksum of the newest record, so that a removed, changed or exchanged record is noticed.
    """

    version: int
    record: str = ""

    def encode(self) -> bytes:
        return seal("stoker-head", json.dumps(asdict(self)).encode() + b"\n")

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises `Damaged`."""
        body = unseal("stoker-head", data)
        try:
            return cls(**json.loads(body))
        except (TypeError, ValueError):
            raise Damaged("its content is not a head") from None


@dataclass(frozen=True)
class AgentState:
    """An agent's state.

    Attributes:
        version: the newest version; after a `problem`, the one that a full replacement may continue from.
        record: checksum of the version's record, if its transcript could be read; the next record's `parent`.
        cache: how much of the transcript is cached.
        head: HEAD, byte for byte; empty when there is none.
        problem: why the transcript cannot be trusted; ``None`` when it can.
        unreadable: the error when even the names of the records are unknown: then nothing may be written there.
        record_bytes: size of the records on disk, as a measure of their size in memory.
    """

    version: AgentVersion
    record: str | None = None
    cache: CachedPrefix | None = None
    head: bytes = b""
    problem: str | None = None
    unreadable: OSError | None = None
    record_bytes: int = 0
