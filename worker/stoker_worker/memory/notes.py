"""Facts about the store that may be written a little later, in a transaction of their own: no turn waits for them, and
there are many. Any thread.

If the process dies before, an agent counts as used a little earlier, and an answer is kept longer.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from stoker_worker.memory import agent_table, cache_index, deliveries
from stoker_worker.memory.connection import Connection, DatabaseFailed
from stoker_worker.memory.files import allocated_bytes, is_there
from stoker_worker.memory.store_parts import StoreParts

_log = logging.getLogger(__name__)

_MOST: Final = 256
"""In one transaction, so that no turn waits long for it."""

_MOST_KEPT: Final = 4 * _MOST

_Note = Callable[[Connection], None]


class Notes:
    """Kept in memory until `write`, which `Upkeep` calls every second; whoever brings one too many writes them too."""

    def __init__(self, parts: StoreParts) -> None:
        self._pieces = parts.pieces
        self._database = parts.database
        self._lock = threading.Lock()
        self._notes: dict[object, _Note] = {}  # a newer note of the same key replaces it

    def __len__(self) -> int:
        return len(self._notes)

    def used(self, agent_id: str) -> None:
        self._keep(("used", agent_id), partial(agent_table.note_use, agent_id=agent_id, used_at=time.time()))

    def saved(self, agent_id: str) -> None:
        """Its row has the time of the save."""
        with self._lock:
            self._notes.pop(("used", agent_id), None)

    def read(self, block: str) -> None:
        """A job without an agent used the blocks up to this address."""
        self._keep(("read", block), partial(cache_index.touch_block, address=block, used_at=time.time()))
        self._write_if_many()

    def ended(self, agent_id: str, delivery: bytes, until: float) -> None:
        """The answer to this delivery (its key) is needed until then (Unix time)."""
        self._keep(delivery, partial(deliveries.keep_until, agent_id=agent_id, key=delivery, until=until))
        self._write_if_many()

    def block_changed(self, path: Path) -> None:
        """The block's file is gone, or not as long as its row has it."""
        self._keep(path, partial(_measure_block, path=path))

    def pieces_changed(self, agent_id: str) -> None:
        """The files of the agent's tail and snapshots are not those that its row counts."""
        self._keep(("pieces", agent_id), partial(self._measure_pieces, agent_id=agent_id))

    def write(self) -> None:
        """Write all of them. Never raises: what the disk refuses waits for the next time."""
        while self._notes:
            with self._lock:
                some = dict(itertools.islice(self._notes.items(), _MOST))
            try:
                self._database.commit(partial(_write, notes=some.values()))
            except DatabaseFailed:  # logged as an outage of the store
                return
            except OSError as error:
                _log.warning("uses of agents and ends of jobs are noted later: %s", error)
                return
            except Exception as error:  # notes that a damaged row refuses would keep all others waiting
                _log.warning("some uses of agents and ends of jobs cannot be noted: %s", error)
            with self._lock:
                for key, note in some.items():
                    if self._notes.get(key) is note:  # else it has changed meanwhile
                        del self._notes[key]

    def _keep(self, key: object, note: _Note) -> None:
        with self._lock:
            self._notes[key] = note

    def _write_if_many(self) -> None:
        if len(self) >= _MOST_KEPT:
            self.write()

    def _measure_pieces(self, connection: Connection, agent_id: str) -> None:
        row = agent_table.find_agent(connection, agent_id)
        if row is not None and row.problem is None:
            with suppress(OSError):  # the walk measures them again
                n_bytes = sum(map(allocated_bytes, self._pieces.paths(agent_id, row.version)))
                cache_index.set_piece_bytes(connection, row.number, n_bytes)


def _measure_block(connection: Connection, path: Path) -> None:
    if is_there(path):
        cache_index.correct_size(connection, path.stem, allocated_bytes(path))
    else:
        cache_index.remove_block(connection, path.stem, now=time.time())


def _write(connection: Connection, notes: Iterable[_Note]) -> None:
    for note in notes:
        note(connection)
