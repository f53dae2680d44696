"""One agent's folder: its records, HEAD, tail and snapshots. Owns what crashes, full disks and damage may do to them.

A turn is committed by the rename of HEAD and by nothing else. HEAD exists before the first record, so records
without a HEAD are damage and never a turn that was merely cut short. Read on any thread, written by the finaliser.
"""

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from stoker_worker.memory.agent_state import AgentState
from stoker_worker.memory.files import Chunk, DurableWriter, Files
from stoker_worker.memory.head import Head
from stoker_worker.memory.record import MOST_SNAPSHOTS, CachedPrefix, TurnRecord, record_checksum, replay
from stoker_worker.memory.sealed import Damaged
from stoker_worker.ports import AgentVersion, Delivery, Transcript

_log = logging.getLogger(__name__)
_RECORD_NAME: Final = re.compile(r"\d{8,}\.json")

Pieces = Mapping[Path, Iterable[Chunk]]
"""The tail and the snapshots of a version: their files and the bytes of them."""


class AgentFolder:
    """``STORE/agents/<hh>/<sha256 of the agent id>``."""

    def __init__(self, agents: Path, agent_id: str, *, files: Files, writer: DurableWriter) -> None:
        name = hashlib.sha256(agent_id.encode()).hexdigest()
        self.agent_id = agent_id
        self.path = agents / name[:2] / name
        self._head = self.path / "HEAD"
        self._unsaved = self.path / "HEAD.unsaved"
        self._files = files
        self._writer = writer

    def record_path(self, version: int) -> Path:
        return self.path / f"{version:08d}.json"

    def tail_path(self, version: int) -> Path:
        # Two names in turn: the newest version's tail is never the one being written, and a crash leaves no third.
        return self.path / f"tail-{version % 2}.safetensors"

    def snapshot_path(self, version: int, index: int) -> Path:
        return self.path / f"snapshot-{version % 2}-{index}.safetensors"

    def piece_paths(self, version: int) -> list[Path]:
        """Every name that a piece of cache of this version may have."""
        return [self.tail_path(version), *(self.snapshot_path(version, index) for index in range(MOST_SNAPSHOTS))]

    # --- reading ---

    def read_head(self) -> bytes:
        """HEAD as it is; empty when there is none (or the last turn was not saved)."""
        return _bytes_of(self._head)

    def read(self) -> AgentState:
        """The agent's state, whatever is in the folder: damage is a `problem`, never an exception."""
        head, fault = b"", None
        try:
            head = _bytes_if_there(self._head)
        except OSError as error:
            fault = error
        try:
            names = self._names()
        except OSError as error:
            return replace(self._broken(f"its folder cannot be read: {error}", 0, {}), unreadable=error)
        numbers, unsaved = _record_numbers(names), not head and self._unsaved.name in names
        if fault is not None:
            return self._broken(f"HEAD cannot be read: {fault}", max(numbers, default=0), self._read_records(numbers))
        if not head and not unsaved and not numbers:
            return AgentState(AgentVersion(self.agent_id, 0, None))
        try:
            state = self._read_to(Head.decode(_bytes_of(self._unsaved) if unsaved else head), numbers)
        except Damaged as damage:
            why = f"HEAD is unusable: {damage}" if head or unsaved else "HEAD is missing"
            state = self._broken(why, max(numbers, default=0), self._read_records(numbers))
        if unsaved:
            return replace(state, head=b"", problem="its last turn was not saved")
        return replace(state, head=head)

    def read_records(self) -> dict[int, TurnRecord]:
        """Every record that can be read by itself, by version, oldest first; also one that was never committed."""
        return {number: record for number, (record, _) in self.read_history().items()}

    def read_version(self, version: int) -> tuple[Transcript, CachedPrefix | None]:
        """The transcript at `version`, and which cache of it was saved then.

        Raises:
            Damaged: a record that it needs is missing, damaged, or not the one its child names.
            OSError: the folder cannot be read.
        """
        records = self._read_records(number for number in _record_numbers(self._names()) if number <= version)
        chain = self._chain(Head(version, records[version].checksum if version in records else ""), records)
        return replay(chain), chain[-1].cache

    def read_history(self) -> dict[int, tuple[TurnRecord, bool]]:
        """As `read_records`, and of each whether `read_version` can give it, as far as seals and parents tell."""
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = self._names()
        records = self._read_records(_record_numbers(names))
        history: dict[int, tuple[TurnRecord, bool]] = {}
        for number, record in records.items():
            content, before = record.content, history.get(number - 1)
            if isinstance(content, TurnRecord):
                follows = before is not None and before[1] and records[number - 1].checksum == content.parent
                history[number] = content, content.keeps_nothing or follows
        return history

    def _names(self) -> list[str]:
        """What is in the folder. Raises `OSError`: one that cannot be read is not one that is not there."""
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []

    def _read_to(self, head: Head, numbers: list[int]) -> AgentState:
        """The state that `head` names. A record just above it is a turn that was never committed."""
        if any(number > head.version + 1 for number in numbers):
            return self._broken("HEAD is older than the records", max(numbers), self._read_records(numbers))
        if head.version == 0:
            return AgentState(AgentVersion(self.agent_id, 0, None))
        records = self._read_records([number for number in numbers if number <= head.version])
        try:
            transcript = replay(self._chain(head, records))
        except Damaged as damage:
            return self._broken(str(damage), head.version, records)
        newest = records[head.version]
        return AgentState(
            AgentVersion(self.agent_id, head.version, transcript, _results(records)),
            record=newest.checksum,
            cache=newest.content.cache if isinstance(newest.content, TurnRecord) else None,
            record_bytes=sum(record.n_bytes for record in records.values()),
        )

    def _read_records(self, numbers: Iterable[int]) -> dict[int, "_ReadRecord"]:
        records = {}
        for number in numbers:
            data = _bytes_of(self.record_path(number))
            content: TurnRecord | Damaged
            try:
                content = TurnRecord.decode(data, agent_id=self.agent_id, version=number)
            except Damaged as damage:
                content = damage
            records[number] = _ReadRecord(content, record_checksum(data), len(data))
        return records

    def _chain(self, head: Head, records: Mapping[int, "_ReadRecord"]) -> list[TurnRecord]:
        """The records to replay, oldest first: back from the newest to the last one that keeps nothing."""
        chain: list[TurnRecord] = []
        version, expected = head.version, head.record
        while not (chain and chain[-1].keeps_nothing):
            found = records.get(version)
            if found is None:
                raise Damaged(f"record {version} is missing")
            if isinstance(found.content, Damaged):
                raise Damaged(f"record {version} is unusable: {found.content}")
            if found.checksum != expected:
                raise Damaged(f"record {version} is not the one that was written")
            chain.append(found.content)
            version, expected = version - 1, found.content.parent or ""
        return chain[::-1]

    def _broken(self, why: str, number: int, records: Mapping[int, "_ReadRecord"]) -> AgentState:
        """What is left: no transcript, but the results that can still be read, and a number no version is above."""
        return AgentState(AgentVersion(self.agent_id, number, None, _results(records)), problem=why)

    # --- writing ---

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
            self._writer.make_folder(self.path)
            self._writer.put(self._head, [before])
            self._files.flush(self.path)
        staged: Path | None = None
        try:
            for path in self.piece_paths(version):
                if path in pieces:
                    self._writer.put(path, pieces[path])
                else:  # perhaps left by a turn that a crash cut short
                    self._files.remove(path)
            self._writer.put(self.record_path(version), [record])
            staged = self._writer.stage([head])
            self._files.flush(self.path)
            self._writer.place(staged, self._head)
            self._files.flush(self.path)
        except OSError:
            if staged is not None:
                with contextlib.suppress(OSError):
                    self._files.remove(staged)
            self._take_back(before, version)
            raise
        with contextlib.suppress(OSError):  # committed: what is left over now does no harm
            for path in (*self.piece_paths(version + 1), self._unsaved):
                self._files.remove(path)
        return head

    def _take_back(self, before: bytes, version: int) -> None:
        """Undo a turn that failed on its way. If HEAD cannot be put back, the turn stays whole and marked unsaved."""
        try:
            if self.read_head() != before:
                if before:
                    self._writer.put(self._head, [before])
                else:
                    self._files.remove(self._head)
                self._files.flush(self.path)
            for path in (self.record_path(version), *self.piece_paths(version)):
                self._files.remove(path)
        except OSError as error:
            _log.error("agent %r: could not take back version %d: %s", self.agent_id, version, error)
            if self.read_head() != before:
                self.mark_unsaved()

    def mark_unsaved(self) -> None:
        """Make `append` refuse, after a restart too. A rename needs no space; for an agent without HEAD, try."""
        try:
            if self._head.exists():
                self._files.rename(self._head, self._unsaved)
            elif not self._unsaved.exists():
                self._writer.make_folder(self.path)
                self._files.write(self._unsaved, [])
            self._files.flush(self.path)
        except OSError as error:
            _log.error("agent %r: could not mark its last turn as not saved: %s", self.agent_id, error)

    def mark_saved(self) -> None:
        """Take back `mark_unsaved`: all that was lost is there after all. Raises `OSError`."""
        if not self._head.exists():
            self._files.rename(self._unsaved, self._head)
        self._files.flush(self.path)


@dataclass(frozen=True)
class _ReadRecord:
    content: TurnRecord | Damaged
    checksum: str
    n_bytes: int


def _record_numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(name.removesuffix(".json")) for name in names if _RECORD_NAME.fullmatch(name))


def _results(records: Mapping[int, _ReadRecord]) -> Mapping[Delivery, Mapping[str, Any]]:
    contents = (record.content for record in records.values())
    return MappingProxyType({x.delivery: x.result for x in contents if isinstance(x, TurnRecord)})


def _bytes_if_there(path: Path) -> bytes:
    """The file's content, nothing when it is missing. Raises `OSError`."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _bytes_of(path: Path) -> bytes:
    """The file's content; nothing when it is missing or cannot be read, which no seal takes for whole."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
