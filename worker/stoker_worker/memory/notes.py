"""Facts about the store that may be written a little later, in a transaction of their own: no turn waits for them, and
most are many. Any thread.

If the process dies before, an agent counts as used a little earlier, and an answer is kept longer.
"""

import itertools
import logging
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from stoker_worker.memory import agent_table, cache_index, deliveries
from stoker_worker.memory.connection import Connection
from stoker_worker.memory.files import allocated_bytes, is_there
from stoker_worker.memory.store_parts import StoreParts

_log = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")

_MOST: Final = 256
"""In one transaction, so that no turn waits long for it."""

_MOST_KEPT: Final = 4 * _MOST


class Notes:
    """Kept in memory until `write`, which `Upkeep` calls every second; whoever brings one too many writes them too."""

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._uses: dict[str, float] = {}
        self._ended: dict[bytes, tuple[str, float]] = {}
        self._read: dict[str, float] = {}
        self._missing: dict[Path, None] = {}
        self._pieces: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._uses) + len(self._ended) + len(self._read) + len(self._missing) + len(self._pieces)

    def used(self, agent_id: str) -> None:
        with self._lock:
            self._uses[agent_id] = time.time()

    def read(self, block: str) -> None:
        """A job without an agent used the blocks up to this address."""
        with self._lock:
            self._read[block] = time.time()
        self.write_if_many()

    def saved(self, agent_id: str) -> None:
        """Its row has the time of the save."""
        with self._lock:
            self._uses.pop(agent_id, None)

    def ended(self, agent_id: str, delivery: bytes, until: float) -> None:
        """The answer to this delivery (its key) is needed until then (Unix time)."""
        with self._lock:
            self._ended[delivery] = agent_id, until
        self.write_if_many()

    def missing(self, blocks: Iterable[Path]) -> None:
        """There are no files (any more) for these blocks."""
        with self._lock:
            self._missing.update(dict.fromkeys(blocks))

    def pieces_changed(self, agent_id: str) -> None:
        """The files of the agent's tail and snapshots are not those that its row counts."""
        with self._lock:
            self._pieces[agent_id] = None

    def write_if_many(self) -> None:
        if len(self) >= _MOST_KEPT:
            self.write()

    def write(self) -> None:
        """Write all of them. Never raises: what the disk refuses waits for the next time."""
        while len(self):
            with self._lock:
                some = _Some(
                    self._parts,
                    _first(self._uses),
                    _first(self._ended),
                    _first(self._read),
                    _first(self._missing),
                    _first(self._pieces),
                )
            try:
                self._parts.database.commit(some.write)
            except OSError as error:
                _log.warning("uses of agents and ends of jobs are noted later: %s", error)
                return
            except Exception as error:  # notes that a damaged row refuses would keep all others waiting
                _log.warning("some uses of agents and ends of jobs cannot be noted: %s", error)
            with self._lock:
                _remove(self._uses, some.uses)
                _remove(self._ended, some.ended)
                _remove(self._read, some.read)
                _remove(self._missing, some.missing)
                _remove(self._pieces, some.pieces)


@dataclass(frozen=True)
class _Some:
    """As many notes of each kind as one transaction writes: Unix times of uses, agents and times of ends, Unix times
    at which blocks were read."""

    parts: StoreParts
    uses: dict[str, float]
    ended: dict[bytes, tuple[str, float]]
    read: dict[str, float]
    missing: dict[Path, None]
    pieces: dict[str, None]

    def write(self, connection: Connection) -> None:
        cache_index.touch(connection, self.uses.items())
        for key, (agent_id, until) in self.ended.items():
            deliveries.keep_until(connection, agent_id, key, until)
        cache_index.touch_blocks(connection, self.read.items())
        for path in self.missing:
            if not is_there(path):  # else it has been saved meanwhile
                cache_index.remove_block(connection, path.stem, now=time.time())
        for agent_id in self.pieces:
            row = agent_table.find_agent(connection, agent_id)
            if row is not None and row.problem is None:
                with suppress(OSError):  # the walk measures them again
                    n_bytes = sum(map(allocated_bytes, self.parts.pieces.paths(agent_id, row.version)))
                    cache_index.set_piece_bytes(connection, row.number, n_bytes)


def _first(notes: dict[K, V]) -> dict[K, V]:
    return dict(itertools.islice(notes.items(), _MOST))


def _remove(notes: dict[K, V], written: dict[K, V]) -> None:
    """Remove what is written, unless it has changed meanwhile."""
    for key, value in written.items():
        if key in notes and notes[key] == value:
            del notes[key]
