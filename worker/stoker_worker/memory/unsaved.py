"""Notes of the agents whose last turn finished and could not be saved, until the database has them. Loader, finisher
and upkeep threads of the worker, and commands of the shell.

The fact belongs in `agents.unsaved`, but the database has just refused the turn itself. So it is first noted durably in
the file ``STORE/agents.unsaved``, and only then may the job finish. The file is filled with blanks in advance, and a
note overwrites some: a full disk takes it too. Opening the store, and the upkeep, move notes into the database.
"""

import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from time import time
from typing import Final

from stoker_shared.errors import AgentBusy
from stoker_worker.memory import transcripts
from stoker_worker.memory.database import Damaged, Database, checksum
from stoker_worker.memory.files import Disk
from stoker_worker.memory.locks import working_on

NAME: Final = "agents.unsaved"
_NOTE_BYTES: Final = 1024
"""The size of a note: a checksum and the agent's id, which has 800 bytes at most."""
_BLANK: Final = b"\n" * _NOTE_BYTES
"""Not zeros: a file system may reserve no space for them."""
_RESERVED: Final = 128 * _NOTE_BYTES


class UnsavedTurns:
    """The notes of one store, the folder `store`. Raises `OSError`: they cannot be read."""

    def __init__(self, store: Path, database: Database, files: Disk) -> None:
        self._store = store
        self._path = store / NAME
        self._database = database
        self._files = files
        self._lock = threading.Lock()
        self._places = {agent_id: place for place, agent_id in self._on_disk()}
        self._to_blank: set[int] = set()

    def __contains__(self, agent_id: object) -> bool:
        try:
            return self._has_note(agent_id)
        except OSError:
            return True

    def reserve(self) -> None:
        """Make room for notes in advance. Only the store's worker does, and only it adds notes. Never raises: without
        that room, a note needs some on the disk when it is written."""
        with self._lock, suppress(OSError):
            n_bytes = self._path.stat().st_size if self._path.exists() else 0
            if n_bytes < _RESERVED:
                start = n_bytes // _NOTE_BYTES
                self._files.write_at(self._path, start * _NOTE_BYTES, _BLANK * (_RESERVED // _NOTE_BYTES - start))
                self._files.flush(self._store)

    def add(self, agent_id: str) -> None:
        """Note that the agent's last turn is lost, during its own job only. Raises `OSError`: the note could not be
        made durable, and does not count."""
        with self._lock:
            if not self._has_note(agent_id):
                place = next(place for place in count() if place not in self._places.values())
                self._to_blank.add(place)  # unless all of it is durable
                self._files.write_at(self._path, place * _NOTE_BYTES, _note_of(agent_id))
                self._to_blank.discard(place)
                self._places[agent_id] = place
        if not self._database.outage.seconds:
            with suppress(OSError, Damaged):
                self._move(agent_id)

    def discard(self, agent_id: str) -> None:
        """The agent has another version now, or is gone. A note that cannot be blanked has no effect in this process;
        `move_all` blanks it later."""
        with self._lock:
            if (place := self._places.pop(agent_id, None)) is not None:
                self._to_blank.add(place)
                self._blank()

    def move_all(self) -> None:
        """Move the notes into the database, as far as it takes them, except those of agents in use. Never raises."""
        with suppress(OSError):
            with self._lock:
                self._blank()
                on_disk = dict(self._on_disk())
                moved = [agent_id for agent_id, place in self._places.items() if on_disk.get(place) != agent_id]
                for agent_id in moved:  # by a command
                    del self._places[agent_id]
                agents = list(self._places)
            for agent_id in agents:
                with suppress(AgentBusy, Damaged), working_on(self._store, agent_id):
                    self._move(agent_id)

    def _move(self, agent_id: str) -> None:
        """Raises `DatabaseFailed`, `Damaged`: the note stays where it is."""
        if self._has_note(agent_id):
            change = partial(transcripts.set_unsaved, agent_id=agent_id, now=time())
            self._database.commit(change)
            self.discard(agent_id)

    def _has_note(self, agent_id: object) -> bool:
        """Whether the agent's note is still in the file. If it is not, another process has moved it, and may have
        changed the agent since. Raises `OSError`."""
        if agent_id not in self._places:  # only the worker adds notes: the file need not be read
            return False
        return any(found == agent_id and place == self._places.get(found) for place, found in self._on_disk())

    def _blank(self) -> None:
        with suppress(OSError):
            for place in list(self._to_blank):
                self._files.write_at(self._path, place * _NOTE_BYTES, _BLANK)
                self._to_blank.discard(place)

    def _on_disk(self) -> Iterator[tuple[int, str]]:
        """Each note: its place and the agent's id. Raises `OSError`."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return
        for place in range(len(content) // _NOTE_BYTES):
            note = content[place * _NOTE_BYTES :][:_NOTE_BYTES]
            if note != _BLANK and checksum(note[16:]) == note[:16]:
                yield place, note[16:].rstrip(b"\n").decode()


def _note_of(agent_id: str) -> bytes:
    text = agent_id.encode().ljust(_NOTE_BYTES - 16, b"\n")
    return checksum(text) + text
