"""The agents whose last turn finished and could not be saved, as far as the database has not heard of it. Loader,
finisher and upkeep threads of the worker, and commands of the shell.

The fact belongs into `agents.unsaved`, but the database has just refused the turn itself, perhaps for long. So it is
first noted in a file, ``STORE/unsaved/KEY``, and only when that is durable may the job finish. What opens the store,
and the worker's upkeep, move these notes into the database.
"""

import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from stoker_shared.errors import AgentBusy
from stoker_worker.memory import agent_table
from stoker_worker.memory.checksum import Damaged, key_of
from stoker_worker.memory.database import Database
from stoker_worker.memory.files import DurableWriter
from stoker_worker.memory.in_flight import working_on

FOLDER: Final = "unsaved"


class UnsavedTurns:
    """The notes of one store.

    Raises:
        OSError: they cannot be read.
    """

    def __init__(self, store: Path, database: Database, writer: DurableWriter) -> None:
        """
        Args:
            store: the store's folder.
        """
        self._store = store
        self._database = database
        self._writer = writer
        self._folder = store / FOLDER
        self._lock = threading.Lock()
        self._keys = self._on_disk()

    def __contains__(self, agent_id: str) -> bool:
        return key_of(agent_id).hex() in self._keys

    def add(self, agent_id: str) -> None:
        """Note that the agent's last turn is lost. Only in the course of its own job.

        Raises:
            OSError: it could not be made durable, and is not noted.
        """
        key = key_of(agent_id).hex()
        with self._lock:
            if key not in self._keys:
                self._put(self._folder / key, agent_id)
                self._keys.add(key)
        if not self._database.outage.seconds:
            with suppress(OSError, Damaged):
                self._move(agent_id)

    def discard(self, agent_id: str) -> None:
        """The agent has another version now, or is gone. A file that cannot be removed means nothing any more, and
        `move_all` removes it later."""
        if agent_id in self:
            with self._lock, suppress(OSError):
                self._keys.discard(key := key_of(agent_id).hex())
                self._writer.files.remove(self._folder / key)

    def move_all(self) -> None:
        """Move the notes into the database, as far as it takes them, except those of agents that are in use. Never
        raises."""
        with suppress(OSError):
            with self._lock:
                on_disk = self._on_disk()
                self._keys &= on_disk  # a command has moved the others
                for key in on_disk - self._keys:
                    self._writer.files.remove(self._folder / key)
                keys = sorted(self._keys)
            for key in keys:
                agent_id = (self._folder / key).read_bytes().decode(errors="replace")
                with suppress(AgentBusy, Damaged), working_on(self._store, agent_id):
                    self._move(agent_id)

    def _put(self, path: Path, agent_id: str) -> None:
        """Raises `OSError`: there is no such file."""
        try:
            self._writer.put_all({path: [agent_id.encode()]})
        except OSError:
            with suppress(OSError):
                self._writer.files.remove(path)
            raise

    def _move(self, agent_id: str) -> None:
        """Raises `DatabaseFailed`, `Damaged`: the note stays where it is."""
        if agent_id in self:  # else its next turn has been saved meanwhile, or the file is damaged
            change = partial(agent_table.set_unsaved, agent_id=agent_id, unsaved=True, now=time.time())
            self._database.commit(change)
            self.discard(agent_id)

    def _on_disk(self) -> set[str]:
        with suppress(FileNotFoundError):
            return {path.name for path in self._folder.iterdir()}
        return set()
