"""Summaries of a store's agents and their versions, as plain values. Reads only; also beside a worker."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Self

from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.agent_index import AgentIndexEntry
from stoker_worker.memory.gc import size_of
from stoker_worker.memory.record import NO_JOB, TurnRecord


@dataclass(frozen=True)
class AgentSummary:
    """One agent. ``None``: unknown, or not applicable. Sizes in bytes.

    Attributes:
        turns: jobs whose results are remembered; a fork starts without those of its source.
        messages, text_chars: of the conversation; one of them is ``None``.
        cached_tokens: how many of `tokens` have a cache.
        blocks: how many of its blocks are on disk, with `block_bytes`; other agents use `shared_bytes` of them too.
        last_used: when its newest version was saved, ISO 8601, UTC.
        state: ``unsaved``: the last turn is not in its transcript, so `append` is refused. `problem` gives the reason.
    """

    agent_id: str | None
    version: int
    turns: int
    tokens: int | None
    messages: int | None
    text_chars: int | None
    cached_tokens: int
    record_bytes: int
    tail_bytes: int
    snapshot_bytes: int
    blocks: int
    block_bytes: int
    shared_bytes: int
    last_used: str | None
    state: Literal["ok", "unsaved", "unreadable"]
    problem: str | None
    folder: str

    @classmethod
    def of(cls, entry: AgentIndexEntry, users: Mapping[Path, int]) -> Self:
        """`users`: how many agents use each block."""
        state, transcript = entry.state, entry.state.version.transcript
        there = [path for path in entry.blocks if path.exists()]
        return cls(
            agent_id=entry.agent_id,
            version=state.version.number,
            turns=sum(delivery != NO_JOB for delivery in state.version.results),
            tokens=None if transcript is None else len(transcript.token_ids),
            messages=None if transcript is None or transcript.messages is None else len(transcript.messages),
            text_chars=None if transcript is None or transcript.text is None else len(transcript.text),
            cached_tokens=0 if state.cache is None else state.cache.tokens,
            record_bytes=size_of(entry.folder.glob("*.json")),
            tail_bytes=size_of(entry.folder.glob("tail-*")),
            snapshot_bytes=size_of(entry.folder.glob("snapshot-*")),
            blocks=len(there),
            block_bytes=size_of(there),
            shared_bytes=size_of(path for path in there if users[path] > 1),
            last_used=_time_of(entry.folder / "HEAD") or _time_of(entry.folder / "HEAD.unsaved"),
            state="ok" if state.problem is None else "unsaved" if entry.is_unsaved else "unreadable",
            problem=state.problem,
            folder=str(entry.folder),
        )


@dataclass(frozen=True)
class VersionSummary:
    """One version of an agent.

    Attributes:
        job_id: the job that made it; ``None``: a command did.
        made_by: ``turn``, ``fork`` (from another agent) or ``rollback`` (to an earlier version).
        tokens: in the transcript; `new_tokens` of them are not in the version before.
        finish_reason: of the job's result; `ended_by` is more exact: ``eos``, ``stop`` or ``length``.
        saved_at: ISO 8601, UTC.
        can_return: whether `rollback` can restore it.
    """

    version: int
    job_id: str | None
    made_by: Literal["turn", "fork", "rollback"]
    ended_by: str
    finish_reason: str | None
    tokens: int
    new_tokens: int
    cached_tokens: int
    saved_at: str | None
    can_return: bool


def versions_of(store: StoreAccess, entry: AgentIndexEntry) -> list[VersionSummary]:
    """Every version of the agent whose record can be read, oldest first."""
    if entry.agent_id is None:
        return []
    folder = store.agent(entry.agent_id)
    return [
        VersionSummary(
            version=number,
            job_id=None if record.delivery == NO_JOB else record.delivery.job_id,
            made_by=_made_by(record),
            ended_by=record.ended_by,
            finish_reason=_text(record.result.get("finish_reason")),
            tokens=record.keep_tokens + len(record.new_tokens),
            new_tokens=len(record.new_tokens),
            cached_tokens=record.cache.tokens if record.cache else 0,
            saved_at=_time_of(folder.record_path(number)),
            can_return=is_readable and number < entry.state.version.number,
        )
        for number, (record, is_readable) in folder.read_history().items()
        if number <= entry.state.version.number
    ]


def _made_by(record: TurnRecord) -> Literal["turn", "fork", "rollback"]:
    action = record.result.get("action")
    if action == "rollback":
        return "rollback"
    return "fork" if action == "fork" or "forked_from" in record.result else "turn"


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _time_of(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    return None
