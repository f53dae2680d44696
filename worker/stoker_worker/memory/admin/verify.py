"""Reads a whole store and names what is wrong with it. Changes nothing; any thread, also beside a worker.

A cache file without a row, or a row without its file, is no problem: files come and go while this looks, and `Upkeep`
finds what a crash left. A file that is there must be intact and belong to its place. What is read at once is an agent,
an answer or a part of a file, so that memory does not grow with the store.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from stoker_worker.memory import agent_table, deliveries
from stoker_worker.memory.admin.cache_check import check_block, check_piece, read_intact
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.connection import Connection
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.memory.turn_record import COLUMNS, TurnRecord

_AT_ONCE: Final = 100
"""Agents or answers in one look at the database: during a long one, the worker's WAL only grows."""
_BLOCK: Final = re.compile(r"([0-9a-f]{1,16})/([0-9a-f]{2})/(\2[0-9a-f]{62})\.safetensors")
_PIECE: Final = re.compile(r"([0-9a-f]{2})/(\1[0-9a-f]{30})-([1-9]\d{0,15})-(?:tail|snapshot-(\d))\.safetensors")
_NO_AGENT: Final = "NOT EXISTS (SELECT 1 FROM agents WHERE number = agent)"
_LOST: Final = {
    "agent number {0} has versions and no row": f"SELECT DISTINCT agent FROM turns WHERE {_NO_AGENT}",
    "agent number {0} has answers and no row": "SELECT DISTINCT agent FROM deliveries"
    f" WHERE agent != {deliveries.FORGETTER} AND {_NO_AGENT}",
    "agent {0!r} uses a block that the index of cache files lacks": "SELECT agent_id FROM agents"
    " WHERE last_block NOTNULL AND NOT EXISTS (SELECT 1 FROM blocks WHERE address = last_block)",
    "its cache files take {0} bytes one by one, and {1} bytes together": "SELECT counted, cache_bytes FROM store,"
    " (SELECT (SELECT ifnull(sum(n_bytes), 0) FROM blocks) + (SELECT ifnull(sum(piece_bytes), 0) FROM agents)"
    " AS counted) WHERE counted != cache_bytes",
}
"""Rows that do not go together: a line for each row that the SQL finds."""


def verify_store(parts: StoreParts) -> Iterator[str]:
    """One line for everything that is not as it was written.

    Raises:
        OSError: the store cannot be read now.
    """
    for look in (_tables, _agents, _answers, _blocks, _pieces):
        try:
            yield from look(parts)
        except Damaged as damage:  # so that this part cannot be read to its end
            yield f"{parts.database.path}: {damage}"


def _tables(parts: StoreParts) -> Iterator[str]:
    for form, sql in {"{0}": f"PRAGMA integrity_check({_AT_ONCE})", **_LOST}.items():
        with parts.database.snapshot() as connection:
            rows = connection.execute(sql if form == "{0}" else f"{sql} LIMIT {_AT_ONCE}").fetchall()
        yield from (f"{parts.database.path}: {form.format(*row)}" for row in rows if row != ("ok",))


def _agents(parts: StoreParts) -> Iterator[str]:
    last = 0
    while True:
        problems: list[str] = []
        with parts.database.snapshot() as connection:
            sql = "SELECT number, agent_id FROM agents WHERE number > ? ORDER BY number LIMIT ?"
            found = connection.execute(sql, (last, _AT_ONCE)).fetchall()
            for number, agent_id in found:
                problems += (f"agent {agent_id!r}: {problem}" for problem in _agent(connection, number, str(agent_id)))
        yield from problems
        if not found:
            return
        last = found[-1][0]


def _agent(connection: Connection, number: int, agent_id: str) -> Iterator[str]:
    """What is wrong with an agent's rows."""
    try:
        row = agent_table.find_agent(connection, agent_id)
        if row is None or row.number != number:
            raise Damaged("its row is not the agent's")
        if row.problem is not None:
            raise Damaged(row.problem)
    except Damaged as damage:
        yield str(damage)
        return
    before: tuple[int, bytes] | None = None
    n_problems = 0
    for columns in connection.execute(f"SELECT {COLUMNS} FROM turns WHERE agent = ? ORDER BY version", (number,)):
        problem = _version(agent_id, columns, before)
        before = columns[0], columns[-1]
        if problem is not None:
            n_problems += 1
            yield f"version {columns[0]} {problem}"
    state = agent_table.read_agent(connection, agent_id)
    if state.problem is not None and not row.unsaved and not n_problems:
        yield state.problem
    if before is not None and before[0] > row.version:
        yield f"version {before[0]} is newer than its newest, {row.version}"


def _version(agent_id: str, columns: tuple[Any, ...], before: tuple[int, bytes] | None) -> str | None:
    """What is wrong with a version's row."""
    try:
        record = TurnRecord.of_row(agent_id, columns[0], columns)
    except Damaged as damage:
        return f"is unusable: {damage}"
    follows = record.keeps_nothing or before == (record.version - 1, record.parent)
    return None if follows else "does not follow the one before it"


def _answers(parts: StoreParts) -> Iterator[str]:
    last = (-1, b"")
    while True:
        problems: list[str] = []
        with parts.database.snapshot() as connection:
            sql = "SELECT agent, key FROM deliveries WHERE (agent, key) > (?, ?) ORDER BY agent, key LIMIT ?"
            found = connection.execute(sql, (*last, _AT_ONCE)).fetchall()
            for agent, key in found:
                try:
                    deliveries.read_answer(connection, agent, key)
                except Damaged as damage:
                    problems.append(f"agent number {agent}: {damage}")
        yield from problems
        if not found:
            return
        last = found[-1]


def _blocks(parts: StoreParts) -> Iterator[str]:
    for path in _files_below(parts.blocks.path):
        name = _BLOCK.fullmatch(path.relative_to(parts.blocks.path).as_posix())
        try:
            if name is None:
                raise Damaged("has no name of a block")
            model, parent = check_block(path, name[3])
            if model[:16] != name[1]:
                raise Damaged("is another model's")
            with parts.database.snapshot() as connection:
                sql = "SELECT lower(hex(parent)), model FROM blocks WHERE address = ?"
                row = connection.execute(sql, (bytes.fromhex(name[3]),)).fetchone()
            if row not in (None, (parent, name[1])):
                raise Damaged("has another parent or model in the index")
        except Damaged as damage:
            yield _line(path, damage)
        except FileNotFoundError:
            continue


def _line(path: Path, damage: Damaged) -> str:
    """Of a file; its index is in the database, which may be at fault itself."""
    return str(damage) if str(damage).startswith("the database") else f"{path}: it {damage}"


def _pieces(parts: StoreParts) -> Iterator[str]:
    for path in _files_below(parts.pieces.path):
        name = _PIECE.fullmatch(path.relative_to(parts.pieces.path).as_posix())
        try:
            if name is None:
                raise Damaged("has no name of a tail or snapshot")
            problem = _piece(parts, path, name)
            # A worker may have replaced the version between the two looks.
            if problem is not None and _piece(parts, path, name) == problem:
                raise Damaged(problem)
        except Damaged as damage:
            yield _line(path, damage)


def _piece(parts: StoreParts, path: Path, name: re.Match[str]) -> str | None:
    """What is wrong with a tail or snapshot. A crash may have left some of another version, which are never read."""
    key = bytes.fromhex(name[2])
    with parts.database.snapshot() as connection:
        rows = agent_table.agent_rows(connection, "WHERE key BETWEEN ? AND ?", (key, key + b"\xff" * 16))
        state = agent_table.read_agent(connection, rows[0].agent_id) if rows else None
    with suppress(FileNotFoundError):
        try:
            if state is None or state.version.number != int(name[3]) or state.version.transcript is None:
                read_intact(path)
            else:
                check_piece(path, state.version, int(name[4]) if name[4] else None)
        except Damaged as damage:
            return str(damage)
    return None


def _files_below(folder: Path) -> Iterator[Path]:
    """Folder by folder, in order; without those that go meanwhile."""
    for path, folders, files in os.walk(folder):
        folders.sort()
        yield from (Path(path, name) for name in sorted(files))
