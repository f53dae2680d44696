"""Writes an agent's versions: tail, snapshots and record first, then HEAD. Finisher threads.

A version is committed by the rename of HEAD and by nothing else. HEAD exists before the first record, so records
without a HEAD are damage, and never a turn that a crash cut short.
"""

import contextlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from stoker_worker.memory.agent_folder import AgentFolder
from stoker_worker.memory.files import Chunk, DurableWriter, Files
from stoker_worker.memory.record import AgentState, Head, record_checksum

_log = logging.getLogger(__name__)

Pieces = Mapping[Path, Iterable[Chunk]]
"""The tail and the snapshots of a version: the bytes of each file."""


class AgentWriter:
    """Writes into one agent's folder."""

    def __init__(self, folder: AgentFolder, *, files: Files, writer: DurableWriter) -> None:
        self._folder = folder
        self._files = files
        self._writer = writer

    def commit(self, state: AgentState, version: int, record: bytes, pieces: Pieces) -> bytes:
        """Make `version` the agent's newest: tail and snapshots, record, then HEAD.

        Returns:
            HEAD as written.

        Raises:
            OSError: the agent is still at `state`.
        """
        head = Head(version, record_checksum(record)).encode()
        before = state.head
        if not before and state.problem is None:
            before = Head(0).encode()
            self._writer.make_folder(self._folder.path)
            self._writer.put(self._folder.head, [before])
            self._files.flush(self._folder.path)
        staged: Path | None = None
        try:
            for path in self._folder.piece_paths(version):
                if path in pieces:
                    self._writer.put(path, pieces[path])
                else:  # a crash may have left it
                    self._files.remove(path)
            self._writer.put(self._folder.record_path(version), [record])
            staged = self._writer.stage([head])
            self._files.flush(self._folder.path)
            self._writer.place(staged, self._folder.head)
            self._files.flush(self._folder.path)
        except OSError:
            if staged is not None:
                with contextlib.suppress(OSError):
                    self._files.remove(staged)
            self._take_back(before, version)
            raise
        with contextlib.suppress(OSError):  # committed: leftovers do no harm
            for path in (*self._folder.piece_paths(version + 1), self._folder.unsaved):
                self._files.remove(path)
        return head

    def _take_back(self, before: bytes, version: int) -> None:
        """Undo a commit that failed. If HEAD cannot be put back, the version stays whole and is marked as not saved."""
        try:
            if self._folder.read_head() != before:
                if before:
                    self._writer.put(self._folder.head, [before])
                else:
                    self._files.remove(self._folder.head)
                self._files.flush(self._folder.path)
            for path in (self._folder.record_path(version), *self._folder.piece_paths(version)):
                self._files.remove(path)
        except OSError as error:
            _log.error("agent %r: could not take back version %d: %s", self._folder.agent_id, version, error)
            if self._folder.read_head() != before:
                self.mark_unsaved()

    def mark_unsaved(self) -> None:
        """Make `append` refuse, after a restart too. Never raises: a rename needs no space, and a new file may fail."""
        try:
            if self._folder.head.exists():
                self._files.rename(self._folder.head, self._folder.unsaved)
            elif not self._folder.unsaved.exists():
                self._writer.make_folder(self._folder.path)
                self._files.write(self._folder.unsaved, [])
            self._files.flush(self._folder.path)
        except OSError as error:
            _log.error("agent %r: could not mark its last turn as not saved: %s", self._folder.agent_id, error)

    def mark_saved(self) -> None:
        """Undo `mark_unsaved`: the version is whole after all. Raises `OSError`."""
        if not self._folder.head.exists():
            self._files.rename(self._folder.unsaved, self._folder.head)
        self._files.flush(self._folder.path)
