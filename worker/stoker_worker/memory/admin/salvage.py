"""Makes a new database from what can be read of a damaged one. No worker has the store open.

Every row proves itself by its checksum, and a chain of versions by the checksums that its rows have of each other. What
proves nothing is not taken over, but an agent that was there stays known. Where a newer version may be lost, the agent
is put at that version, which it does not have: a job that appends to it fails by name.
"""

import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stoker_shared.errors import StoreUnusable
from stoker_worker.memory import agent_row, agent_table, turn_table
from stoker_worker.memory.admin.damaged_file import DamagedFile, Row
from stoker_worker.memory.admin.restore import Exchanged, draft_folder, exchange
from stoker_worker.memory.agent_row import AgentRow
from stoker_worker.memory.checksum import Damaged, agent_checksum, row_checksum
from stoker_worker.memory.connection import Connection
from stoker_worker.memory.database import NAME
from stoker_worker.memory.database_file import create_database, refused_if_damaged
from stoker_worker.memory.deliveries import FORGETTER
from stoker_worker.memory.files import Disk
from stoker_worker.memory.turn_record import COLUMNS, TurnRecord
from stoker_worker.memory.witness import Witness

_BAD_FRAMES_OF_ONE_FAULT: Final = 2
"""A frame that names a wrong checksum makes the next one look wrong too."""
_LOST: Final = "lost id "
"""Before the hash of an agent's id that no page has any more."""


@dataclass(frozen=True)
class Salvaged(Exchanged):
    """
    Attributes:
        whole: agents that go on as if nothing had happened.
        refused: agents whose newest version is not proved, and why: `append` is refused until a rollback or a turn that
            brings its whole conversation.
        lost: agents of which no version can be read, and why: `append` is refused until such a turn.
    """

    whole: int
    refused: dict[str, str]
    lost: dict[str, str]


def salvage(folder: Path) -> Salvaged:
    """Replace the store's database by what can be proved of it, and the index of the cache files by what their files
    say.

    Raises:
        StoreUnusable: there is nothing to take over, or a worker has the store; nothing has changed.
        OSError: it could not be read or written; nothing has changed, or the next start finishes it.
    """
    with draft_folder(folder) as draft, refused_if_damaged(folder):
        if not (folder / NAME).exists():
            raise StoreUnusable(f"there is no database at {folder}, so there is nothing to salvage: restore a backup")
        create_database(draft, Disk())
        (whole, refused, lost), done = exchange(folder, draft, lambda connection: _Salvage(connection, folder).run())
    return Salvaged(done.blocks, done.kept, whole, refused, lost)


class _Salvage:
    """Fills a new database.

    Attributes:
        _doubt: why no agent's newest version is proved.
        _names: by agents' numbers: the ids that may be theirs.
        _newest: by agents' numbers: the highest version that a row names.
    """

    def __init__(self, connection: Connection, folder: Path) -> None:
        self._to = connection
        self._roots = dict(connection.execute("SELECT name, rootpage FROM sqlite_schema WHERE rootpage > 0").fetchall())
        self._file, self._doubt = _open(folder, self._roots["store"])
        self._columns = {
            table: [row[1] for row in connection.execute(f"PRAGMA table_info({table})").fetchall()]
            for table in ("agents", "turns", "deliveries")
        }
        self._names: dict[int, set[str]] = {}
        self._newest: dict[int, int] = {}

    def run(self) -> tuple[int, dict[str, str], dict[str, str]]:
        """`Salvaged.whole`, `.refused` and `.lost`. Raises `StoreUnusable`: there is no agent."""
        for row in self._file.rows(self._roots.values()):
            self._take_agent(row)
        rows = self._to.execute("SELECT number, agent_id FROM agents").fetchall()
        without_row = self._names.keys() - {number for number, _ in rows}
        self._names |= {number: {agent_id} for number, agent_id in rows}
        for row in self._file.rows(self._roots.values()):
            if len(row.values) == len(self._columns["turns"]) and row.number is not None:
                self._take_turn(row.values)
            elif len(row.values) == len(self._columns["deliveries"]) and row.number is None:
                self._take_answer(row.values)
        self._make_rows(without_row)
        self._to.execute("DELETE FROM turns WHERE agent NOT IN (SELECT number FROM agents)")
        return self._sort(without_row)

    def _take_agent(self, row: Row) -> None:
        """A row of `agents`, or an id in its index."""
        if row.number is None:
            match row.values:
                case (str() as agent_id, int() as number):
                    self._names.setdefault(number, set()).add(agent_id)
            return
        if len(row.values) != len(self._columns["agents"]):
            return
        found = dict(zip(self._columns["agents"], row.values, strict=True)) | {"number": row.number}
        proof = [found[name] for name in ("number", "agent_id", "key", "version", "head", "unsaved", "checksum")]
        try:
            agent = agent_row.row_of([*proof, None, 0, found["evicted"] == 1])
        except Damaged:
            if isinstance(found["agent_id"], str):
                self._names.setdefault(row.number, set()).add(found["agent_id"])
            return
        same, key = "FROM agents WHERE number = ? OR agent_id = ?", (agent.number, agent.agent_id)
        # Of two rows of one agent, one lies in a page that lacks its newest change.
        others = self._to.execute(f"SELECT number, version {same}", key).fetchall()
        if any(tuple(other) >= (agent.number, agent.version) for other in others):
            return
        self._to.execute(f"DELETE {same}", key)
        used, turns = found["last_used"], found["turns"]
        used = used if isinstance(used, int | float) and 0 < used < 1e10 else 0
        turns = turns if isinstance(turns, int) and 0 <= turns <= agent.version else 0
        agent_table.put_row(self._to, agent, last_used=used)
        self._to.execute("UPDATE agents SET turns = ?, evicted = ? WHERE number = ?", (turns, agent.evicted, key[0]))

    def _take_turn(self, values: tuple[Any, ...]) -> None:
        number, version, *_ = values
        if not isinstance(number, int) or not isinstance(version, int):
            return
        for agent_id in self._names.get(number, ()):
            self._newest[number] = max(self._newest.get(number, 0), min(version, 1 << 31))
            with suppress(Damaged):
                TurnRecord.of_row(agent_id, version, values[1:])
                places = ", ".join("?" * len(values))
                self._to.execute(f"INSERT OR IGNORE INTO turns (agent, {COLUMNS}) VALUES ({places})", values)
                self._names[number] = {agent_id}
                return

    def _take_answer(self, values: tuple[Any, ...]) -> None:
        number, key, result, expires, written = values
        is_known = number == FORGETTER or number in self._names
        if is_known and isinstance(expires, int | float) and row_checksum((number, key, result)) == written:
            sql = "INSERT OR IGNORE INTO deliveries (agent, key, result, expires, checksum) VALUES (?, ?, ?, ?, ?)"
            self._to.execute(sql, values)

    def _make_rows(self, numbers: Iterable[int]) -> None:
        """For agents whose own rows are lost: from their ids, or the hashes of them, in the two indexes."""
        for number in numbers:
            sql = "SELECT max(version) FROM turns WHERE agent = ?"
            (newest,) = self._to.execute(sql, (number,)).fetchone()
            version = max((newest or 0) + 1, self._newest.get(number, 0))
            for agent_id in self._names[number]:
                row = AgentRow(number, agent_id, version, b"", False, None, 0, False)
                agent_table.put_row(self._to, row, last_used=time.time(), or_else="OR IGNORE")
        for found in self._file.rows_below([self._roots["agents_by_key"]]):
            match found.values:
                case (bytes() as key, int() as number) if number not in self._names:
                    # Under another id, with this key: neither unknown nor usable.
                    row = AgentRow(number, _LOST + key.hex(), 1, b"", False, None, 0, False)
                    agent_table.put_row(self._to, row, last_used=time.time(), or_else="OR IGNORE")
                    self._to.execute("UPDATE OR IGNORE agents SET key = ? WHERE agent_id = ?", (key, row.agent_id))

    def _sort(self, without_row: Collection[int]) -> tuple[int, dict[str, str], dict[str, str]]:
        """Which agents are whole, which refuse, which are lost."""
        whole = 0
        refused: dict[str, str] = {}
        lost: dict[str, str] = {}
        for number, agent_id in self._to.execute("SELECT number, agent_id FROM agents ORDER BY agent_id").fetchall():
            if agent_id.startswith(_LOST):
                lost[agent_id] = "its id is lost; the name is the SHA-256 of the id"
                continue
            state = agent_table.read_agent(self._to, agent_id)
            assert state.row is not None
            is_readable = state.version.transcript is not None or not state.row.version
            reason = self._doubt if is_readable else state.problem
            if reason is None:
                whole += 1
                continue
            if is_readable:
                self._put_beyond(state.row)
            elif number in without_row:
                reason = "its row is damaged: a newer version may be lost"
            can_return = any(can_return for _, can_return in turn_table.read_history(self._to, state.row))
            (refused if can_return else lost)[agent_id] = reason
        if not whole and not refused and not lost:
            raise StoreUnusable("no agent is left in it: restore a backup, or move the folder away to begin anew")
        return whole, refused, lost

    def _put_beyond(self, row: AgentRow) -> None:
        """A newer version may be lost."""
        version, head = row.version + 1, b""
        checksum = agent_checksum(row.number, row.agent_id, version, head, int(row.unsaved))
        sql = "UPDATE agents SET version = ?, head = ?, checksum = ? WHERE number = ?"
        self._to.execute(sql, (version, head, checksum, row.number))


def _open(folder: Path, root: int) -> tuple[DamagedFile, str | None]:
    """The database, and why no agent's newest version in it is proved, if that is so. `root`: page of table `store`."""
    path, testified = folder / NAME, Witness(folder).read()
    file = DamagedFile(path, whole_log=False)
    if testified is not None and (_commits(file, root) or 0) >= testified:
        return file, None
    file = DamagedFile(path, whole_log=True)
    commits = _commits(file, root)
    if testified is not None and commits is not None and commits < testified:
        return file, f"the newest {testified - commits} transactions of the database are missing"
    if file.bad_frames > _BAD_FRAMES_OF_ONE_FAULT:
        return file, "the newest transactions of the database are damaged"
    return file, None


def _commits(file: DamagedFile, root: int) -> int | None:
    for row in file.rows_in(root):
        if row.number == 1 and len(row.values) > 1 and isinstance(row.values[1], int):
            return row.values[1]
    return None
