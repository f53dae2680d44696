"""An agent's transcript in versions, and the answers to its jobs, in the store's database. Any thread.

Owns the tables `agents`, `turns` and `deliveries`. Functions with a connection run inside `Database.snapshot` or a
change of `Database.commit`; records have no I/O.

A version's row has how much of its parent's token ids, messages and text it keeps, and what follows, so its size does
not grow with the conversation. Every `FULL_EVERY` versions a row has the whole transcript: no read needs more rows.

An agent is found by its id and, over a second index, by the hash of its id: a damaged page can hide a row from one of
them, and an agent that one index knows is never taken for a new one.

A repeated delivery gets the answer that is kept here while its job can live in Redis. With a shared store, the answer
may be in the version that the delivery made there; its row here then has only the version's number.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Final, Literal, NamedTuple, Self

import numpy as np
from pydantic import TypeAdapter, ValidationError

from stoker_shared.message import Message
from stoker_worker.memory.database import Connection, Damaged, agent_checksum, count_bytes, key_of, row_checksum
from stoker_worker.ports import AgentVersion, CachedPrefix, Delivery, EndedBy, Transcript
from stoker_worker.ports.memory import StoredMessage, common_length, is_stored_alike

FULL_EVERY: Final = 16

COLUMNS: Final = (
    "version, parent, delivery, about, keep_tokens, keep_messages, keep_text, new_tokens, new_messages, new_text, "
    "checksum"
)
"""The columns of a version, in the order of `TurnRecord.to_row`."""

MadeBy = Literal["turn", "fork", "rollback", "closed"]
"""``closed``: the version before it again, so that no version that is on its way can take its number."""


@dataclass(frozen=True)
class About:
    """The small facts of a version, one JSON object in the row. Times are Unix times.

    Attributes:
        carry_text: the end of the last answer, if no token covers it.
        tokenizer: fingerprint of the tokenizer and chat template of the token ids.
        job_id: ``None`` for a command.
        answer_until: until when the delivery may be repeated, so that its answer must be kept.
        tokens: length of the transcript.
        since_full: versions since the last row with the whole transcript; 0 for such a row.
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


_MESSAGE: Final[TypeAdapter[StoredMessage]] = TypeAdapter(StoredMessage)
_MESSAGES: Final[TypeAdapter[tuple[StoredMessage, ...]]] = TypeAdapter(tuple[StoredMessage, ...])
_ABOUT: Final = TypeAdapter(About)


@dataclass(frozen=True)
class TurnRecord:
    """One version of an agent: after `agent_id`, the fields are in the order of `COLUMNS`.

    Attributes:
        parent: checksum of the row before it; ``None`` when this one keeps nothing of that.
        delivery: `delivery_key` of the delivery that made it; ``None`` for a command.
        keep_text: characters kept.
        new_messages, new_text: ``None`` when the transcript has none.
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
        """The record in `row`. Raises `Damaged`: the row is not as it was written, or of another agent or version."""
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
    """The fields of a `TurnRecord` that turn `base`, the transcript of the row with checksum `parent`, into `new`.
    Without `base`, or where nothing of it is kept, the field `parent` is ``None``."""
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
    """The transcript after `records`: at least one, oldest first; the first keeps nothing. Raises `Damaged`: a record
    keeps more than its parent has."""
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
    # Python's own JSON: it keeps NaN, and escapes the lone surrogates that a tool call may contain.
    return json.dumps([message.model_dump(exclude_defaults=True) for message in messages], separators=(",", ":"))


def _messages_of(text: str) -> tuple[Message, ...]:
    """Raises `ValueError`, `TypeError`."""
    try:
        return _MESSAGES.validate_json(text)
    except ValidationError:  # pydantic refuses lone surrogates, which a tool call may contain
        return tuple(_MESSAGE.validate_python(fields) for fields in json.loads(text))


def _common_messages(left: tuple[Message, ...], right: tuple[Message, ...]) -> int:
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: is_stored_alike(*pair), pairs))


_COLUMNS: Final = "number, agent_id, key, version, head, unsaved, checksum, last_block, piece_bytes, evicted"
"""In the order of `row_of`."""
_FIND: Final = (
    f"SELECT 1, (SELECT max(version) FROM turns WHERE agent = number), {_COLUMNS} FROM agents WHERE agent_id = ?"
    f" UNION ALL SELECT 2, 0, number{', NULL' * _COLUMNS.count(',')} FROM agents INDEXED BY agents_by_key WHERE key = ?"
)
IS_OF_SESSION: Final = "agent_id < ' '"
"""The condition for rows of `agents` that belong to sessions, not to agents (see `sessions`)."""
_CLOCK: Final = "(SELECT clock_s FROM store)"
_LAST_USED: Final = "last_used = max(CAST(last_used AS REAL), ?)"
_NOTE_CLOCK: Final = f"UPDATE agents SET used_clock_s = {_CLOCK}"
"""Run only where the value changes, so that its index is not written for nothing."""

_TEXTS_AND_BLOBS: Final = ("parent", "delivery", "about", "new_tokens", "new_messages", "new_text", "checksum")
_SIZES: Final = " + ".join(f"coalesce(length(CAST({name} AS BLOB)), 0)" for name in _TEXTS_AND_BLOBS)
VERSION_BYTES: Final = f"SELECT coalesce(sum({_SIZES}), 0) FROM turns"
"""Selects the bytes of all versions; a condition may follow."""
_RECORD: Final = f"SELECT {COLUMNS} FROM turns WHERE agent = ? AND version = ?"


@dataclass(frozen=True)
class AgentRow:
    """An agent's row in `agents`.

    Attributes:
        number: the agent's key in the other tables.
        head: checksum of the newest version's row; empty at version 0, if that row is not here, and for sessions.
        unsaved: whether the last finished turn is missing from the transcript.
        last_block: address of the last block of its cache in the cache index.
        piece_bytes: allocated bytes of its tail and snapshots.
        evicted: whether cache of its newest version was evicted.
        problem: why the row cannot be trusted; `version` is then the highest number in `turns`, or if the id is lost,
            the row's own.
    """

    number: int
    agent_id: str
    version: int
    head: bytes = b""
    unsaved: bool = False
    last_block: bytes | None = None
    piece_bytes: int = 0
    evicted: bool = False
    problem: str | None = None


def row_of(columns: Sequence[Any]) -> AgentRow:
    """Raises `Damaged` unless the columns are as they were written."""
    number, agent_id, key, version, head, unsaved, checksum, last_block, piece_bytes, evicted = columns
    if not isinstance(agent_id, str) or key != key_of(agent_id):
        raise Damaged("its row is not the agent's")
    if checksum != agent_checksum(number, agent_id, version, head, unsaved):
        raise Damaged("the checksum of its row does not match")
    # No checksum covers the rest: it only decides evictions, and damage there must not stop them.
    last_block = last_block if isinstance(last_block, bytes) else None
    piece_bytes = piece_bytes if isinstance(piece_bytes, int) else 0
    return AgentRow(number, agent_id, version, head, bool(unsaved), last_block, piece_bytes, bool(evicted))


def read_chain(connection: Connection, row: AgentRow, version: int, head: bytes | None) -> list[TurnRecord]:
    """The records to replay for `version`, oldest first, from the last one that keeps nothing. `head`: the checksum
    that the version's row must have; ``None``: any. Raises `Damaged`: a record is missing, damaged, or another one."""
    chain: list[TurnRecord] = []
    expected = head
    while not (chain and chain[-1].keeps_nothing):
        found = connection.execute(_RECORD, (row.number, version)).fetchone()
        if found is None:
            raise Damaged(f"version {version} is missing")
        if expected is not None and found[-1] != expected:
            raise Damaged(f"version {version} is not the one that was written")
        try:
            chain.append(TurnRecord.of_row(row.agent_id, version, found))
        except Damaged as damage:
            raise Damaged(f"version {version} is unusable: {damage}") from None
        version, expected = version - 1, chain[-1].parent
    return chain[::-1]


def read_version(connection: Connection, row: AgentRow, version: int) -> tuple[Transcript, CachedPrefix | None]:
    """The transcript at `version`, and the part of it that was cached then. Raises `Damaged` as `read_chain`."""
    chain = read_chain(connection, row, version, row.head if version == row.version else None)
    return replay(chain), chain[-1].about.cache


def read_history(connection: Connection, row: AgentRow) -> Iterator[tuple[TurnRecord, bool]]:
    """Every version that is kept and whole, oldest first, and whether `read_version` can return it."""
    before: tuple[int, bytes] | None = None
    for columns in connection.execute(f"SELECT {COLUMNS} FROM turns WHERE agent = ? ORDER BY version", (row.number,)):
        try:
            record = TurnRecord.of_row(row.agent_id, columns[0], columns)
        except Damaged:
            before = None
            continue
        can_return = record.keeps_nothing or before == (record.version - 1, record.parent)
        before = (record.version, columns[-1]) if can_return else None
        yield record, can_return


def _prune(connection: Connection, row: AgentRow, newest: int, keep_versions: int) -> int:
    """Delete versions beyond the newest `keep_versions` that none of these needs; returns their bytes."""
    oldest = newest - keep_versions + 1
    if oldest <= 1:
        return 0
    deleted = connection.execute(
        "DELETE FROM turns WHERE agent = ?1 AND version < (SELECT max(version) FROM turns"
        f" WHERE agent = ?1 AND version <= ?2 AND parent IS NULL) RETURNING {_SIZES}",
        (row.number, oldest),
    )
    return sum(n_bytes for (n_bytes,) in deleted.fetchall())


@dataclass(frozen=True)
class AgentState:
    """An agent's state. `row`: ``None`` if unknown. `problem`: why the transcript cannot be trusted. `version`: the
    newest one, or with a `problem`, the one that a full replacement may continue from."""

    version: AgentVersion
    row: AgentRow | None = None
    problem: str | None = None


def read_agent(connection: Connection, agent_id: str) -> AgentState:
    """The agent's state; damage to a version becomes its `problem`. Raises `Damaged`: it is unknown whether there is
    such an agent; `sqlite3.Error`: the same, or the disk failed."""
    row = find_agent(connection, agent_id)
    if row is None:
        return AgentState(AgentVersion(agent_id, 0, None))
    base = AgentVersion(agent_id, row.version, None, head=row.head, evicted=row.evicted)
    if row.problem is not None:
        return AgentState(base, row, row.problem)
    problem = "its last turn was not saved" if row.unsaved else None
    if not row.version:
        return AgentState(base, row, problem)
    try:
        records = read_chain(connection, row, row.version, row.head)
        transcript = replay(records)
    except Damaged as damage:
        return AgentState(base, row, str(damage))
    about = records[-1].about
    version = replace(base, transcript=transcript, cache=about.cache, since_full=about.since_full)
    return AgentState(version, row, problem)


def find_agent(connection: Connection, agent_id: str) -> AgentRow | None:
    """The agent's row, with a `problem` if its content is damaged or its id was lost. Raises `Damaged`: its two indexes
    disagree, or its newest version is unknown."""
    found = {row[0]: row[1:] for row in connection.execute(_FIND, (agent_id, key_of(agent_id))).fetchall()}
    if not found:
        return None
    by_id, by_key = found.get(1), found.get(2)
    if by_id is None or by_key is None or by_id[1] != by_key[1]:
        return _find_lost(connection, agent_id)
    newest, number = by_id[0] or 0, by_id[1]
    if not isinstance(newest, int):
        raise Damaged("its versions cannot be told")
    try:
        row = row_of(by_id[1:])
        if row.agent_id != agent_id:
            raise Damaged("its index leads to the row of another agent")
        if newest > row.version:
            raise Damaged("its row lacks the newest version")
        return row
    except Damaged as damage:
        return AgentRow(number, agent_id, newest, problem=str(damage))


_LOST_NAME: Final = re.compile(r"lost id [0-9a-f]{64}")


def lost_name(key: bytes) -> str:
    """The name of an agent whose id was lost with its conversation: only the hash of the id is known."""
    return f"lost id {key.hex()}"


def is_lost(name: str) -> bool:
    return _LOST_NAME.fullmatch(name) is not None


def _find_lost(connection: Connection, agent_id: str) -> AgentRow:
    """The row of an agent whose id was lost, by that id or by `lost_name`. Raises `Damaged`: there is none."""
    names = (agent_id, lost_name(key_of(agent_id)))
    sql = "SELECT number, agent_id, version, head, unsaved, checksum, key FROM agents WHERE agent_id IN (?, ?)"
    for *proof, written, key in connection.execute(sql, names).fetchall():
        if isinstance(key, bytes) and proof[1] == lost_name(key) and written == agent_checksum(*proof):
            return AgentRow(proof[0], agent_id, proof[2], proof[3], problem="its id was lost, and its conversation")
    raise Damaged("its indexes do not agree on the agent")


def _take_over(connection: Connection, row: AgentRow) -> None:
    """Give a damaged row its agent's id and key again, which its indexes have; or the id that was lost."""
    if is_lost(row.agent_id):
        return
    # Otherwise SQLite refuses to change a row that is not as its indexes have it.
    connection.execute("PRAGMA writable_schema=ON").fetchall()
    try:
        sql = "UPDATE agents SET agent_id = ?, key = ? WHERE number = ?"
        connection.execute(sql, (row.agent_id, key_of(row.agent_id), row.number))
    finally:
        connection.execute("PRAGMA writable_schema=OFF").fetchall()


def has_agents(connection: Connection) -> bool:
    """True if an agent has a version: without one, there is nothing to share."""
    return (
        connection.execute(f"SELECT 1 FROM agents WHERE version > 0 AND NOT {IS_OF_SESSION} LIMIT 1").fetchone()
        is not None
    )


def advance_clock(connection: Connection, seconds: float) -> None:
    """Add to the store's clock the time that a worker has run since the last call."""
    connection.execute("UPDATE store SET clock_s = clock_s + ?", (seconds,))


def note_use(connection: Connection, agent_id: str, used_at: float) -> None:
    """Note that the agent is used at this Unix time. `last_used` never goes back, even if the clock was set back."""
    connection.execute(f"UPDATE agents SET {_LAST_USED} WHERE agent_id = ?", (used_at, agent_id))
    connection.execute(f"{_NOTE_CLOCK} WHERE agent_id = ? AND used_clock_s IS NOT {_CLOCK}", (agent_id,))


def unused_s(connection: Connection, agent_id: str) -> float | None:
    """Seconds that workers have run since the agent's last use; ``None`` for an unknown agent."""
    sql = f"SELECT CAST({_CLOCK} - used_clock_s AS REAL) FROM agents WHERE agent_id = ?"
    row = connection.execute(sql, (agent_id,)).fetchone()
    return None if row is None else float(row[0])


def unused_agents(
    connection: Connection, *, for_s: float, after: tuple[float, int], limit: int, where: str
) -> list[tuple[float, int, str]]:
    """Agents that nobody used while workers ran for `for_s` seconds: the store's clock at their last use, their numbers
    and ids, in this order. `after`: the first two values of the last known one. `where`: an SQL condition."""
    return connection.execute(
        f"SELECT used_clock_s, number, agent_id FROM agents WHERE used_clock_s < {_CLOCK} - ?"
        f" AND (used_clock_s, number) > (?, ?) AND {where}"
        " ORDER BY used_clock_s, number LIMIT ?",
        (for_s, *after, limit),
    ).fetchall()


def write_version(
    connection: Connection, row: AgentRow | None, record: TurnRecord, *, keep_versions: int, piece_bytes: int = 0
) -> AgentRow:
    """Make `record` the agent's newest version, and prune those beyond `keep_versions`; returns the row as it is now.
    `row`: as just read; ``None`` for a new agent. `piece_bytes`: allocated bytes of its tail and snapshots."""
    if row is None:
        row = insert_agent(connection, record.agent_id, last_used=record.about.saved_at)
    if row.problem is not None:
        _take_over(connection, row)
    columns, cache = record.to_row(), record.about.cache
    head: bytes = columns[-1]
    sql = f"INSERT INTO turns (agent, {COLUMNS}) VALUES (?{', ?' * len(columns)}) RETURNING {_SIZES}"
    ((n_bytes,),) = connection.execute(sql, (row.number, *columns)).fetchall()
    n_bytes -= _prune(connection, row, record.version, keep_versions)
    ((is_of_now,),) = connection.execute(
        "UPDATE agents SET version = ?, head = ?, unsaved = 0, checksum = ?, turns = turns + ?, tokens = ?,"
        " cached_tokens = ?, transcript_bytes = transcript_bytes + ?, piece_bytes = ?, evicted = 0,"
        f" {_LAST_USED} WHERE number = ?"
        f" RETURNING used_clock_s IS {_CLOCK}",
        (
            record.version,
            head,
            agent_checksum(row.number, record.agent_id, record.version, head, 0),
            record.about.job_id is not None,
            record.about.tokens,
            cache.tokens if cache else 0,
            n_bytes,
            piece_bytes,
            record.about.saved_at,
            row.number,
        ),
    ).fetchall()
    if not is_of_now:
        connection.execute(f"{_NOTE_CLOCK} WHERE number = ?", (row.number,))
    count_bytes(connection, piece_bytes - row.piece_bytes)
    row = replace(row, version=record.version, head=head, piece_bytes=piece_bytes)
    return replace(row, unsaved=False, evicted=False, problem=None)


def insert_agent(connection: Connection, agent_id: str, *, last_used: float) -> AgentRow:
    """Insert a new agent at version 0."""
    number = connection.execute("SELECT coalesce(max(number), 0) + 1 FROM agents").fetchone()[0]
    row = AgentRow(number, agent_id, 0)
    put_row(connection, row, last_used=last_used)
    return row


def put_row(connection: Connection, row: AgentRow, *, last_used: float, or_else: Literal["", "OR IGNORE"] = "") -> None:
    """Insert an agent's row; its columns about sizes and cache files are 0 or NULL."""
    proof = (row.version, row.head, int(row.unsaved))
    connection.execute(
        f"INSERT {or_else} INTO agents (number, agent_id, key, version, head, unsaved, checksum, turns, tokens,"
        " cached_tokens, transcript_bytes, piece_bytes, evicted, last_used, used_clock_s)"
        f" VALUES (?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, 0, 0, ?, {_CLOCK})",
        (
            row.number,
            row.agent_id,
            key_of(row.agent_id),
            *proof,
            agent_checksum(row.number, row.agent_id, *proof),
            last_used,
        ),
    )


def set_unsaved(connection: Connection, agent_id: str, *, now: float) -> None:
    """Note that the last finished turn is missing from the transcript. Raises `Damaged`."""
    row = find_agent(connection, agent_id) or insert_agent(connection, agent_id, last_used=now)
    if row.problem is not None:
        _take_over(connection, row)
    checksum = agent_checksum(row.number, agent_id, row.version, row.head, 1)
    connection.execute("UPDATE agents SET unsaved = 1, checksum = ? WHERE number = ?", (checksum, row.number))


def set_missing(connection: Connection, agent_id: str, version: int, *, now: float) -> None:
    """Note that this is the agent's newest version and that it is not here: `append` is refused, and a turn that
    replaces the conversation gets the next number. Raises `Damaged`."""
    row = find_agent(connection, agent_id) or insert_agent(connection, agent_id, last_used=now)
    if row.problem is not None:
        _take_over(connection, row)
    checksum = agent_checksum(row.number, agent_id, version, b"", int(row.unsaved))
    sql = "UPDATE agents SET version = ?, head = x'', checksum = ? WHERE number = ?"
    connection.execute(sql, (version, checksum, row.number))


def session_rows(connection: Connection, names: Sequence[str]) -> list[tuple[AgentRow, int]]:
    """The undamaged rows among these conversations, most recently used first, each with its last prompt's number of
    tokens."""
    sql = f"SELECT tokens, {_COLUMNS} FROM agents WHERE agent_id IN (?{', ?' * (len(names) - 1)})"
    found: list[tuple[AgentRow, int]] = []
    for n_prompt, *columns in connection.execute(f"{sql} ORDER BY last_used DESC", names):
        with suppress(Damaged):
            found.append((row_of(columns), n_prompt if isinstance(n_prompt, int) else 0))
    return found


def session_names(connection: Connection, start: str) -> list[str]:
    """The conversations whose names begin with `start`."""
    found = connection.execute(
        f"SELECT agent_id FROM agents WHERE {IS_OF_SESSION} AND substr(agent_id, 1, ?) = ?", (len(start), start)
    )
    return [name for (name,) in found]


def write_session(
    connection: Connection, name: str, version: int, *, prompt_tokens: int, cached_tokens: int, now: float
) -> AgentRow:
    """Make `version`, without a transcript, the conversation's newest. Raises `Damaged`."""
    row = find_agent(connection, name) or insert_agent(connection, name, last_used=now)
    if row.problem is not None:
        _take_over(connection, row)
    connection.execute(
        "UPDATE agents SET version = ?, head = x'', unsaved = 0, checksum = ?, turns = turns + 1, tokens = ?,"
        f" cached_tokens = ?, evicted = 0, {_LAST_USED}, used_clock_s = {_CLOCK} WHERE number = ?",
        (
            version,
            agent_checksum(row.number, name, version, b"", 0),
            prompt_tokens,
            cached_tokens,
            now,
            row.number,
        ),
    )
    return replace(row, version=version)


def delete_agent(connection: Connection, row: AgentRow) -> None:
    """Delete the agent, its versions and the answers to its jobs."""
    _take_over(connection, row)  # an index may hide that its id is damaged
    for sql in (
        "DELETE FROM turns WHERE agent = ?",
        "DELETE FROM deliveries WHERE agent = ?",
        "DELETE FROM agents WHERE number = ?",
    ):
        connection.execute(sql, (row.number,))


def agent_rows(connection: Connection, sql: str, parameters: Iterable[Any] = ()) -> Iterator[AgentRow]:
    """The rows that ``SELECT … FROM agents`` + `sql` finds, one by one, without the damaged ones."""
    for columns in connection.execute(f"SELECT {_COLUMNS} FROM agents {sql}", tuple(parameters)):
        with suppress(Damaged):
            yield row_of(columns)


FORGETTER: Final = 0
"""In place of an agent's number in `deliveries`: the delivery forgot its agent, which has no number any more."""

UNTIL_ENDED_S: Final = 366 * 86_400.0
"""How long the answer to a job that never ends is kept: a worker may be away for months, and find the job then."""

KEEP_ENDED_S: Final = 2 * 86_400.0
"""How long the answer to a job that ended on another machine is kept: as long as a result lives."""

_MOST_FORGOTTEN: Final = 256
"""In one transaction, so that no turn waits long for it."""


class Ended(NamedTuple):
    """The version that a delivery made, and the Unix time until which the delivery may be repeated."""

    version: int
    until: float


def delivery_key(agent_id: str, delivery: Delivery) -> bytes:
    """SHA-256 of a delivery to an agent."""
    parts = [agent_id, delivery.job_id, delivery.created_at, None, delivery.request]  # the fourth place is unused
    return hashlib.sha256(json.dumps(parts).encode()).digest()


class AnswerIn(NamedTuple):
    """The answer is in this version in the shared store."""

    version: int


_ANSWER: Final = (
    "SELECT 1, result, checksum FROM deliveries WHERE agent = ?1 AND key = ?2"
    " UNION ALL SELECT 2, about, NULL FROM turns WHERE agent = ?1 AND delivery = ?2"
)


def read_answer(connection: Connection, agent: int, key: bytes) -> Mapping[str, Any] | AnswerIn | None:
    """The result (as JSON) of the delivery, or where it is; ``None``: it has none, or cannot be repeated any more.
    Raises `Damaged`: the result is damaged or gone."""
    rows = connection.execute(_ANSWER, (agent, key)).fetchall()
    if (row := next((row for row in rows if row[0] == 1), None)) is not None:
        version, text = _answer_parts(agent, key, *row[1:])
        with suppress(ValueError):
            if text is not None:
                answer: Mapping[str, Any] | AnswerIn = json.loads(text) if text else AnswerIn(version)
                return answer
        raise Damaged("the answer to this delivery is damaged")
    try:
        may_come_again = bool(rows) and _ABOUT.validate_json(rows[0][1]).answer_until > time.time()
    except ValidationError:
        raise Damaged("its content is not a version") from None
    if may_come_again:
        raise Damaged("this delivery has made a turn, and its answer is missing or forgotten")
    return None


def remember_answer(connection: Connection, agent: int, key: bytes, result: str, until: float, *, version: int) -> None:
    """Keep the answer (JSON) to the delivery that made `version` until the Unix time `until`."""
    text = f"{version} {result}"
    connection.execute(
        "INSERT OR REPLACE INTO deliveries (agent, key, result, expires, checksum) VALUES (?, ?, ?, ?, ?)",
        (agent, key, text, until, row_checksum((agent, key, text))),
    )


def note_ended(connection: Connection, agent: int, key: bytes, ended: Ended) -> None:
    """Note that a delivery ended in this version, on any machine. An answer that is here stays until then at most."""
    text = f"{ended.version} "
    connection.execute(
        "INSERT INTO deliveries (agent, key, result, expires, checksum) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (agent, key) DO UPDATE SET expires = min(expires, excluded.expires)",
        (agent, key, text, ended.until, row_checksum((agent, key, text))),
    )


def job_has_ended(connection: Connection, agent: int, version: int) -> None:
    """Keep the answer of the job that made this version for `KEEP_ENDED_S` at most: there is a newer version, so the
    job has ended, since an agent's jobs run one after the other."""
    made_it = "SELECT delivery FROM turns WHERE agent = ?1 AND version = ?2"
    sql = f"UPDATE deliveries SET expires = min(expires, ?3) WHERE agent = ?1 AND key = ({made_it})"
    connection.execute(sql, (agent, version, time.time() + KEEP_ENDED_S))


def ends_for(connection: Connection, agent: int) -> dict[bytes, Ended]:
    """The ends of the agent's deliveries that may be repeated, by their keys."""
    columns = "CAST(key AS BLOB), result, checksum, CAST(expires AS REAL)"
    sql = f"SELECT {columns} FROM deliveries WHERE agent = ? AND expires > ?"
    rows = connection.execute(sql, (agent, time.time()))
    return {key: Ended(_answer_parts(agent, key, *answer)[0], until) for key, *answer, until in rows}


def answer_text(connection: Connection, agent: int, key: bytes) -> str | None:
    """The answer as JSON; ``None``: it is not here, or damaged."""
    sql = "SELECT result, checksum FROM deliveries WHERE agent = ? AND key = ?"
    found = connection.execute(sql, (agent, key)).fetchone()
    return _answer_parts(agent, key, *found)[1] or None if found else None


def _answer_parts(agent: int, key: bytes, result: Any, written: Any) -> tuple[int, str | None]:
    """The version, and the answer as JSON; ``None``: the row is damaged. The version may then be wrong, or 0: no harm,
    because an answer is taken from a version only if that is of the same delivery."""
    version, is_damaged = 0, True
    with suppress(ValueError, TypeError, AttributeError):
        number, text = result.split(" ", 1)
        version = int(number)
        is_damaged = row_checksum((agent, key, result)) != written
    return version, None if is_damaged else text


def keep_answer(connection: Connection, agent_id: str, key: bytes, until: float) -> None:
    """Set until which Unix time the answer is kept. A job that is enqueued again after its end needs it longer."""
    connection.execute(
        "UPDATE deliveries SET expires = ?"
        " WHERE agent IN (?, (SELECT number FROM agents WHERE agent_id = ?)) AND key = ?",
        (until, FORGETTER, agent_id, key),
    )


def forget_answers(connection: Connection, now: float) -> bool:
    """Delete some of the expired answers, the oldest first; returns whether there may be more."""
    found = connection.execute(
        "DELETE FROM deliveries WHERE expires < ?1 AND expires <= coalesce("
        "(SELECT expires FROM deliveries ORDER BY expires LIMIT 1 OFFSET ?2), ?1) RETURNING agent",
        (now, _MOST_FORGOTTEN - 1),
    ).fetchall()
    return len(found) >= _MOST_FORGOTTEN
