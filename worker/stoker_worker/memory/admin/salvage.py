"""Makes a new database from what can be read of a damaged one. No worker has the store open.

A row proves itself by its checksum, and a chain of versions by its rows' checksums of each other. Only what is proved
is taken over, but an agent that was there stays known. Where a newer version may be lost, the agent is put at that
version, which it does not have: a job that appends to it fails by name.
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stoker_shared.errors import StoreUnusable
from stoker_worker.memory import transcripts
from stoker_worker.memory.admin.backup import Exchanged, exchange
from stoker_worker.memory.admin.damaged_file import DamagedFile
from stoker_worker.memory.database import NAME, Connection, Damaged, Witness, row_checksum
from stoker_worker.memory.database_file import (
    create_database,
    finish_replacement,
    has_database,
    refused_if_damaged,
)
from stoker_worker.memory.files import Disk
from stoker_worker.memory.transcripts import FORGETTER, AgentRow, TurnRecord

_BAD_FRAMES_OF_ONE_FAULT: Final = 2
"""A damaged checksum in one frame makes the next frame look damaged, too."""
_LOST_ROW: Final = "its row is damaged: a newer version may be lost"
_AGENT_COLUMNS, _TURN_COLUMNS = 16, 12
_WITHOUT_PARENT: Final = (
    "parent IS NOT NULL AND NOT EXISTS (SELECT 1 FROM turns AS before WHERE before.agent = turns.agent"
    " AND before.version = turns.version - 1 AND before.checksum = turns.parent)"
)
"""A version that keeps something of a lost one, so that it cannot be read."""


@dataclass(frozen=True)
class Salvaged(Exchanged):
    """
    Attributes:
        whole: how many agents go on as if nothing had happened.
        refused: agents whose newest version is not proved, and why: `append` is refused until a rollback or a turn that
            brings its whole conversation.
        lost: agents of which no version can be read, and why: `append` is refused until such a turn.
    """

    whole: int
    refused: dict[str, str]
    lost: dict[str, str]


def salvage(folder: Path) -> Salvaged:
    """Replace the store's database by what can be proved of it, and the index of the cache files by what is on disk.

    Raises:
        StoreUnusable: there is nothing to take over, or a worker has the store; nothing has changed.
        OSError: it could not be read or written; nothing has changed, or the next start finishes it.
    """
    finish_replacement(folder)
    if not has_database(folder):
        raise StoreUnusable(f"there is no database at {folder}, so there is nothing to salvage: restore a backup")
    job = _Salvage(folder)
    with refused_if_damaged(folder):
        done = exchange(folder, lambda draft: create_database(draft, Disk()), job.fill)
    return Salvaged(done.blocks, done.kept, job.whole, job.refused, job.lost)


class _Salvage:
    """Fills a new database.

    Attributes:
        whole, refused, lost: as in `Salvaged`.
        _names: by agents' numbers: the ids that may be theirs.
        _newest: by agents' numbers: the highest version in a row.
    """

    _to: Connection

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.whole = 0
        self.refused: dict[str, str] = {}
        self.lost: dict[str, str] = {}
        self._names: dict[int, set[str]] = {}
        self._newest: dict[int, int] = {}

    def fill(self, connection: Connection) -> None:
        """Raises `StoreUnusable`: there is no agent."""
        self._to = connection
        root = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'store'").fetchone()[0]
        file, doubt = _open(self._folder, root)
        keys = set()
        for row in file.rows():
            match row:
                case int(), (None, str(name), bytes(key), *_) if name == transcripts.lost_name(key):
                    keys.add(key)  # an earlier salvage has named it so
                case int(number), (None, str(agent_id), *rest) if len(rest) == _AGENT_COLUMNS - 2:
                    self._names.setdefault(number, set()).add(agent_id)
                    self._take_agent(number, agent_id, *rest)
                case None, (str(agent_id), int(number)) if not transcripts.is_lost(agent_id):  # of the index by id
                    self._names.setdefault(number, set()).add(agent_id)
        known = dict(connection.execute("SELECT number, agent_id FROM agents").fetchall())
        without_row = sorted(self._names.keys() - known)
        self._names |= {number: {agent_id} for number, agent_id in known.items()}
        for row in file.rows():
            match row:
                case int(), (int(number), int(version), *rest) if len(rest) == _TURN_COLUMNS - 2:
                    self._take_turn(number, version, rest)
                case None, (int(number), bytes(key), str(result), int() | float() as expires, written):
                    if number == FORGETTER or number in self._names:
                        self._take_answer((number, key, result, expires, written))
                case None, (bytes(key), int(number)) if number not in self._names:
                    keys.add(key)
        self._make_rows(without_row, keys)
        connection.execute(f"DELETE FROM agents WHERE {transcripts.IS_OF_SESSION}")  # caches alone are no loss
        connection.execute("DELETE FROM turns WHERE agent NOT IN (SELECT number FROM agents)")
        while connection.execute(f"DELETE FROM turns WHERE {_WITHOUT_PARENT} RETURNING 1").fetchall():
            pass
        connection.execute(f"UPDATE agents SET transcript_bytes = ({transcripts.VERSION_BYTES} WHERE agent = number)")
        for number, agent_id in connection.execute("SELECT number, agent_id FROM agents ORDER BY agent_id").fetchall():
            self._judge(agent_id, doubt, has_row=number in known)
        if not self.whole and not self.refused and not self.lost:
            raise StoreUnusable("no agent is left in it: restore a backup, or move the folder away to begin anew")

    def _take_agent(self, *row: Any) -> None:
        with suppress(Damaged):
            transcripts.row_of((*row[:7], None, 0, False))
            # No checksum covers the others, which count and order.
            counts = (x if isinstance(x, int | float) and abs(x) < 1e18 else 0 for x in row[7:-1])
            places = ", ".join(f"?{place}" for place in range(1, _AGENT_COLUMNS))
            # If an agent has two rows, one is on a page that lacks its newest change.
            self._to.execute(  # the last column is by the old store's clock
                f"INSERT OR REPLACE INTO agents SELECT {places}, 0 WHERE NOT EXISTS (SELECT 1 FROM agents"
                " WHERE (number = ?1 OR agent_id = ?2) AND (number, version) > (?1, ?4))",
                (*row[:7], *counts),
            )

    def _take_turn(self, number: int, version: int, rest: list[Any]) -> None:
        for agent_id in self._names.get(number, ()):
            self._newest[number] = max(self._newest.get(number, 0), min(version, 1 << 31))
            with suppress(Damaged):
                TurnRecord.of_row(agent_id, version, (version, *rest))
                sql = f"INSERT OR IGNORE INTO turns VALUES (?{', ?' * (_TURN_COLUMNS - 1)})"
                self._to.execute(sql, (number, version, *rest))
                self._names[number] = {agent_id}
                return

    def _take_answer(self, row: tuple[Any, ...]) -> None:
        if row_checksum(row[:3]) == row[-1]:
            self._to.execute("INSERT OR IGNORE INTO deliveries VALUES (?, ?, ?, ?, ?)", row)

    def _make_rows(self, numbers: Iterable[int], keys: Iterable[bytes]) -> None:
        """Insert agents whose own rows are lost, from their ids, or the hashes of them, in the two indexes."""
        others: list[str] = []
        for number in numbers:
            agent_id, *also = sorted(self._names[number])
            others += also
            self._put(agent_id, number)
        for agent_id in others:
            self._put(agent_id)
        for key in keys:
            name = f"{key.hex()[:2]}/{key.hex()}.safetensors"
            if not any(self._folder.glob(f"blocks/*/{name}")):  # the index of the last blocks has the same columns
                # With this key, so that the agent is not unknown under its id.
                lost = transcripts.lost_name(key)
                self._put(lost)
                self._to.execute("UPDATE OR IGNORE agents SET key = ? WHERE agent_id = ?", (key, lost))

    def _put(self, agent_id: str, number: int | None = None) -> None:
        """Insert an agent at a version that it does not have."""
        if number is None:
            number = self._to.execute("SELECT coalesce(max(number), 0) + 1 FROM agents").fetchone()[0]
        row = AgentRow(number, agent_id, self._newest.get(number, 0) + 1)
        transcripts.put_row(self._to, row, last_used=time.time(), or_else="OR IGNORE")

    def _judge(self, agent_id: str, doubt: str | None, *, has_row: bool) -> None:
        """Count the agent as whole, refused or lost."""
        if transcripts.is_lost(agent_id):
            self.lost[agent_id] = "its id is lost; the name is the SHA-256 of the id"
            return
        state = transcripts.read_agent(self._to, agent_id)
        row = state.row
        assert row is not None
        is_readable = state.version.transcript is not None or not row.version
        reason = doubt if is_readable else state.problem if has_row else _LOST_ROW
        if reason is None:
            self.whole += 1
            return
        if is_readable:  # a newer version may be lost
            transcripts.set_missing(self._to, agent_id, row.version + 1, now=time.time())
        can_return = self._to.execute("SELECT 1 FROM turns WHERE agent = ?", (row.number,)).fetchone()
        (self.refused if can_return else self.lost)[agent_id] = reason


def _open(folder: Path, root: int) -> tuple[DamagedFile, str | None]:
    """The database, and why no agent's newest version in it is proved, if so. `root`: page of table `store`."""
    path, testified = folder / NAME, Witness(folder).read()
    file = DamagedFile(path, whole_log=False)
    if testified is not None and _commits(file, root) >= testified:
        return file, None
    file = DamagedFile(path, whole_log=True)
    commits = _commits(file, root)
    if testified is not None and 0 <= commits < testified:
        return file, f"the newest {testified - commits} transactions of the database are missing"
    if file.bad_frames > _BAD_FRAMES_OF_ONE_FAULT:
        return file, "the newest transactions of the database are damaged"
    return file, None


def _commits(file: DamagedFile, root: int) -> int:
    """The number of transactions; -1: unknown."""
    found = (values[1] for rowid, values in file.rows_in(root) if rowid == 1 and len(values) > 1)
    return next((commits for commits in found if isinstance(commits, int)), -1)
