"""Summaries of an agent and its versions, as plain values. Any thread; reads only, inside one `Database.snapshot`."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Self

from stoker_worker.memory import cache_index
from stoker_worker.memory.database import Connection
from stoker_worker.memory.transcripts import AgentRow, AgentState, MadeBy, read_history
from stoker_worker.ports.memory import common_length


@dataclass(frozen=True)
class AgentSummary:
    """One agent. ``None``: unknown, or not applicable. Sizes in bytes.

    Attributes:
        turns: jobs that made one of its versions; a fork starts without those of its source.
        messages, text_chars: of the conversation; one of them is ``None``.
        cached_tokens: how many of `tokens` had a cache when the newest version was saved.
        transcript_bytes: of all versions that are kept.
        piece_bytes: its tail and snapshots on disk.
        blocks: blocks of its cache on disk, with `block_bytes` without their checkpoints; other agents may use some
            too.
        last_used: ISO 8601, UTC.
        state: ``unsaved``: the last turn is not in its transcript, so `append` is refused. `problem` gives the reason.
    """

    agent_id: str
    version: int
    turns: int
    tokens: int | None
    messages: int | None
    text_chars: int | None
    cached_tokens: int
    transcript_bytes: int
    piece_bytes: int
    blocks: int
    block_bytes: int
    last_used: str | None
    state: Literal["ok", "unsaved", "unreadable"]
    problem: str | None

    @property
    def own_bytes(self) -> int:
        """Without the blocks."""
        return self.transcript_bytes + self.piece_bytes

    @classmethod
    def of(cls, connection: Connection, state: AgentState) -> Self:
        """The summary of an agent that exists (`state.row`). Raises `sqlite3.Error`."""
        row, transcript = state.row, state.version.transcript
        assert row is not None
        names = ("turns", "transcript_bytes", "piece_bytes", "last_used")
        counts = ", ".join(f"CAST({name} AS INTEGER)" for name in names)  # no checksum covers them
        found = connection.execute(f"SELECT {counts} FROM agents WHERE number = ?", (row.number,)).fetchone()
        turns, transcript_bytes, piece_bytes, last_used = found
        blocks = list(cache_index.chain_back(connection, row.last_block))
        is_unsaved = row.problem is None and row.unsaved
        return cls(
            agent_id=row.agent_id,
            version=row.version,
            turns=turns,
            tokens=None if transcript is None else len(transcript.token_ids),
            messages=None if transcript is None or transcript.messages is None else len(transcript.messages),
            text_chars=None if transcript is None or transcript.text is None else len(transcript.text),
            cached_tokens=state.version.cache.tokens if state.version.cache else 0,
            transcript_bytes=transcript_bytes,
            piece_bytes=piece_bytes,
            blocks=len(blocks),
            block_bytes=sum(block.n_bytes for block in blocks),
            last_used=iso(last_used),
            state="ok" if state.problem is None else "unsaved" if is_unsaved else "unreadable",
            problem=state.problem,
        )


@dataclass(frozen=True)
class VersionSummary:
    """One version of an agent.

    Attributes:
        job_id: the job that made it; ``None`` for a command.
        made_by: ``turn``, ``fork`` (from another agent), ``rollback`` (to an earlier version) or ``closed`` (the one
            before it again).
        tokens: in the transcript; `new_tokens` of them are not in the version before, as far as that is kept.
        finish_reason: of the job's result; `ended_by` is more exact: ``eos``, ``stop`` or ``length``.
        saved_at: ISO 8601, UTC.
        can_return: whether it is an older version that `rollback` can restore.
    """

    version: int
    job_id: str | None
    made_by: MadeBy
    ended_by: str
    finish_reason: str | None
    tokens: int
    new_tokens: int
    cached_tokens: int
    saved_at: str | None
    can_return: bool


def versions_of(connection: Connection, row: AgentRow) -> list[VersionSummary]:
    """Every kept and readable version of the agent, oldest first. Raises `sqlite3.Error`."""
    versions: list[VersionSummary] = []
    tokens: tuple[int, ...] = ()
    for record, is_whole in read_history(connection, row):
        if record.version > row.version:
            continue
        before, about = tokens, record.about
        tokens = (*tokens[: record.keep_tokens], *record.new_tokens) if is_whole else ()
        kept = common_length(before, tokens) if record.keeps_nothing else record.keep_tokens
        versions.append(
            VersionSummary(
                version=record.version,
                job_id=about.job_id,
                made_by=about.made_by,
                ended_by=about.ended_by,
                finish_reason=about.finish_reason,
                tokens=about.tokens,
                new_tokens=about.tokens - kept,
                cached_tokens=about.cache.tokens if about.cache else 0,
                saved_at=iso(about.saved_at),
                can_return=is_whole and record.version < row.version,
            )
        )
    return versions


def iso(unix_s: float) -> str | None:
    """A Unix time, to the second; ``None`` if it is out of range."""
    try:
        return datetime.fromtimestamp(int(unix_s), UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        return None
