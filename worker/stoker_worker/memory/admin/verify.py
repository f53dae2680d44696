"""Reads a store and names what is wrong with it. Changes nothing; any thread, also beside a worker.

A cache file without a row, or a row without its file, is no problem: files come and go meanwhile, and `Upkeep` finds
what a crash left. A file that is there must be intact and belong to its place. One read takes some agents, some answers
or a part of a file, so that memory does not grow with the store.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

from stoker_worker.memory import transcripts
from stoker_worker.memory.admin.cache_files import check_block, check_checkpoint, check_piece, read_intact
from stoker_worker.memory.blocks import BLOCK_FILE, PIECE_FILE
from stoker_worker.memory.cache_index import COUNTED_BYTES
from stoker_worker.memory.database import Connection, Damaged
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.memory.transcripts import COLUMNS, IS_OF_SESSION, TurnRecord, replay

Snapshot = Callable[[], AbstractContextManager[Connection]]

_AT_ONCE: Final = 100
"""Agents or answers in one read of the database: during a long one, the worker's WAL only grows."""
_NO_AGENT: Final = "NOT EXISTS (SELECT 1 FROM agents WHERE number = agent)"
_LOST: Final = {
    "{0}": "PRAGMA integrity_check",
    "agent number {0} has versions and no row": f"SELECT DISTINCT agent FROM turns WHERE {_NO_AGENT}",
    "agent number {0} has answers and no row": "SELECT DISTINCT agent FROM deliveries"
    f" WHERE agent != {transcripts.FORGETTER} AND {_NO_AGENT}",
    "agent {0!r} uses a block that the index of cache files lacks": "SELECT agent_id FROM agents"
    " WHERE last_block NOTNULL AND NOT EXISTS (SELECT 1 FROM blocks WHERE address = last_block)",
    "its cache files take {0} bytes one by one, and {1} bytes together": "SELECT counted, cache_bytes"
    f" FROM store, (SELECT {COUNTED_BYTES} AS counted) WHERE counted != cache_bytes",
}
"""Rows of the database that do not match: the form of a line, and the SQL that finds what to name in it."""


def verify_store(parts: StoreParts) -> Iterator[str]:
    """One line for everything that is not as it was written. Raises `OSError`: the store cannot be read now."""
    snapshot = parts.database.snapshot
    blocks, pieces = _files(parts, parts.blocks.path, _check_block), _files(parts, parts.pieces.path, _check_piece)
    for look in (_tables(parts), damaged_agents(snapshot), damaged_answers(snapshot), blocks, pieces):
        try:
            yield from look
        except Damaged as damage:  # this part cannot be read any further
            yield f"{parts.database.path}: {damage}"


def damaged_agents(snapshot: Snapshot) -> Iterator[str]:
    """A line for every damaged or missing row of an agent or a version. Raises `OSError`, `Damaged`."""
    sql = f"SELECT number, agent_id FROM agents WHERE number > ?1 AND NOT {IS_OF_SESSION} ORDER BY number LIMIT ?3"
    return _rows(snapshot, sql, (0, ""), "agent {1!r}", _agent)


def damaged_answers(snapshot: Snapshot) -> Iterator[str]:
    """A line for every damaged answer to a job. Raises `OSError`, `Damaged`."""
    sql = "SELECT agent, key FROM deliveries WHERE (agent, key) > (?, ?) ORDER BY agent, key LIMIT ?"
    return _rows(snapshot, sql, (-1, b""), "agent number {0}", _answer)


def _tables(parts: StoreParts) -> Iterator[str]:
    for form, sql in _LOST.items():
        with parts.database.snapshot() as connection:
            rows = list(islice(connection.execute(sql), _AT_ONCE))
        yield from (f"{parts.database.path}: {form.format(*row)}" for row in rows if row != ("ok",))


def _rows(
    snapshot: Snapshot, sql: str, last: tuple[Any, ...] | None, name: str, look: Callable[..., Iterator[str]]
) -> Iterator[str]:
    while last is not None:
        with snapshot() as connection:
            rows = connection.execute(sql, (*last, _AT_ONCE)).fetchall()
            lines = [f"{name.format(*row)}: {problem}" for row in rows for problem in look(connection, *row)]
            following = rows[-1] if rows else None
            step = "SELECT (?, ?) > (?, ?)"
            is_ahead = following is None or connection.execute(step, (*following, *last)).fetchone()[0]
        yield from lines
        if not is_ahead:  # else the same rows would be read for ever
            raise Damaged("its rows are out of order")
        last = following


def _agent(connection: Connection, number: int, agent_id: Any) -> Iterator[str]:
    """Each version must be readable and have the checksum of the one before it; the agent's row must have that of the
    newest, whose transcript must be complete."""
    try:
        row = transcripts.find_agent(connection, str(agent_id))
    except Damaged as damage:
        yield str(damage)
        return
    if row is None or row.number != number or row.problem is not None:
        yield "its row is not the agent's" if row is None or row.problem is None else row.problem
        return
    before, is_whole = (0, b""), True
    chain: list[TurnRecord] = []
    for columns in connection.execute(f"SELECT {COLUMNS} FROM turns WHERE agent = ? ORDER BY version", (number,)):
        version, parent, *_, written = columns
        try:
            record = TurnRecord.of_row(row.agent_id, version, columns)
            chain = [record] if record.keeps_nothing else [*chain, record]
            if parent is not None and before != (version - 1, parent):
                yield f"version {version} does not follow the one before it"
                is_whole = False
        except Damaged as damage:
            yield f"version {version} is unusable: {damage}"
            is_whole = False
        before = version, written
    if is_whole and before != (row.version, row.head):
        yield f"version {row.version} is {'missing' if before[0] < row.version else 'not the one that was written'}"
    elif is_whole and chain:
        try:
            replay(chain)
        except Damaged as damage:
            yield str(damage)


def _answer(connection: Connection, agent: int, key: bytes) -> Iterator[str]:
    try:
        transcripts.read_answer(connection, agent, key)
    except Damaged as damage:
        yield str(damage)


def _files(parts: StoreParts, folder: Path, check: Callable[[StoreParts, Path, str], None]) -> Iterator[str]:
    """Folder by folder, in order; without files that go meanwhile."""

    def problem(path: Path) -> str | None:
        try:
            check(parts, path, path.relative_to(folder).as_posix())
        except Damaged as damage:  # of the database, where it has a row for this file
            return str(damage) if str(damage).startswith("the database") else f"{path}: it {damage}"
        except FileNotFoundError:
            pass
        return None

    unread: list[OSError] = []
    for parent, folders, names in os.walk(folder, onerror=unread.append):
        folders.sort()
        for path in (Path(parent, name) for name in sorted(names)):
            # A worker may replace a version between a look at its row and one at its file.
            if (line := problem(path)) is not None and line == problem(path):
                yield line
    for error in unread:
        if not isinstance(error, FileNotFoundError):
            yield f"{error.filename}: it cannot be read: {error.strerror}"


def _check_block(parts: StoreParts, path: Path, name: str) -> None:
    if (match := BLOCK_FILE.fullmatch(name)) is None:
        raise Damaged("has no name of a block")
    if match[4]:
        check_checkpoint(path, match[1], match[3])
        return
    parent = check_block(path, match[1], match[3])
    with parts.database.snapshot() as connection:
        sql = "SELECT lower(hex(parent)), model FROM blocks WHERE address = ?"
        row = connection.execute(sql, (bytes.fromhex(match[3]),)).fetchone()
    if row not in (None, (parent, match[1])):
        raise Damaged("has another parent or model in the index")


def _check_piece(parts: StoreParts, path: Path, name: str) -> None:
    """A crash may have left pieces of another version, which are never read: those need only be intact."""
    if (match := PIECE_FILE.fullmatch(name)) is None:
        raise Damaged("has no name of a tail or snapshot")
    key = bytes.fromhex(match[2])
    with parts.database.snapshot() as connection:
        row = next(transcripts.agent_rows(connection, "WHERE key BETWEEN ? AND ?", (key, key + b"\xff" * 16)), None)
        state: transcripts.AgentState | None = None
        with suppress(Damaged):  # `damaged_agents` names the agent
            state = None if row is None else transcripts.read_agent(connection, row.agent_id)
    if state is None or state.version.number != int(match[3]) or state.version.transcript is None:
        read_intact(path)
    else:
        check_piece(path, state.version, int(match[4]) if match[4] else None)
