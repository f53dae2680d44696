"""One agent's folder: the names of its files, and what can be read of them after crashes and damage. Any thread.

`AgentWriter` writes it.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from stoker_worker.memory.checksummed_file import Damaged
from stoker_worker.memory.record import (
    MOST_SNAPSHOTS,
    AgentState,
    CachedPrefix,
    Head,
    TurnRecord,
    record_checksum,
    replay,
)
from stoker_worker.ports import AgentVersion, Delivery, Transcript

_RECORD_NAME: Final = re.compile(r"\d{8,}\.json")
_MOST_READS: Final = 5


class AgentFolder:
    """``STORE/agents/<hh>/<sha256 of the agent id>``."""

    def __init__(self, agents: Path, agent_id: str) -> None:
        name = hashlib.sha256(agent_id.encode()).hexdigest()
        self.agent_id = agent_id
        self.path = agents / name[:2] / name
        self.head = self.path / "HEAD"
        self.unsaved = self.path / "HEAD.unsaved"

    def record_path(self, version: int) -> Path:
        return self.path / f"{version:08d}.json"

    def tail_path(self, version: int) -> Path:
        # Two names in turn: the newest version's tail is never the one being written, and a crash leaves no others.
        return self.path / f"tail-{version % 2}.safetensors"

    def snapshot_path(self, version: int, index: int) -> Path:
        return self.path / f"snapshot-{version % 2}-{index}.safetensors"

    def piece_paths(self, version: int) -> list[Path]:
        """Where the tail and the snapshots of this version may be, in this order."""
        return [self.tail_path(version), *(self.snapshot_path(version, index) for index in range(MOST_SNAPSHOTS))]

    def read_head(self) -> bytes:
        """HEAD byte for byte; empty when there is none, or the last turn was not saved."""
        return _bytes_of(self.head)

    def read(self) -> AgentState:
        """The agent's state. Damage is a `problem`, never an exception."""
        head, fault = b"", None
        try:
            head = _bytes_if_there(self.head)
        except OSError as error:
            fault = error
        try:
            names = self._names()
        except OSError as error:
            return replace(self._broken(f"its folder cannot be read: {error}", 0, {}), unreadable=error)
        numbers, unsaved = _record_numbers(names), not head and self.unsaved.name in names
        if fault is not None:
            return self._broken(f"HEAD cannot be read: {fault}", max(numbers, default=0), self._read_records(numbers))
        if not head and not unsaved and not numbers:
            return AgentState(AgentVersion(self.agent_id, 0, None))
        try:
            state = self._read_to(Head.decode(_bytes_of(self.unsaved) if unsaved else head), numbers)
        except Damaged as damage:
            why = f"HEAD is unusable: {damage}" if head or unsaved else "HEAD is missing"
            state = self._broken(why, max(numbers, default=0), self._read_records(numbers))
        if unsaved:
            return replace(state, head=b"", problem="its last turn was not saved")
        return replace(state, head=head)

    def read_settled(self) -> AgentState:
        """As `read`, again when a worker moved HEAD meanwhile."""
        for _ in range(_MOST_READS):
            head = self.read_head()
            state = self.read()
            if state.problem is None or self.read_head() == head:
                break
        return state

    def read_records(self) -> dict[int, TurnRecord]:
        """Every record that is whole, by version, oldest first; also one that was never committed."""
        return {number: record for number, (record, _) in self.read_history().items()}

    def read_version(self, version: int) -> tuple[Transcript, CachedPrefix | None]:
        """The transcript at `version`, and how much of it was cached then.

        Raises:
            Damaged: a record that it needs is missing, damaged, or not the one that the next record names.
            OSError: the folder cannot be read.
        """
        records = self._read_records(number for number in _record_numbers(self._names()) if number <= version)
        chain = self._chain(Head(version, records[version].checksum if version in records else ""), records)
        return replay(chain), chain[-1].cache

    def read_history(self) -> dict[int, tuple[TurnRecord, bool]]:
        """As `read_records`, and for each whether `read_version` can return it, by checksums and parents alone."""
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
        """What is in the folder, nothing when there is none. Raises `OSError` when it cannot be read."""
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []

    def _read_to(self, head: Head, numbers: list[int]) -> AgentState:
        """The state at `head`. A record just above it is a turn that was never committed."""
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
        """The records to replay, oldest first: from the last one that keeps nothing up to `head`."""
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
        """No transcript, but the results that can still be read. No version is above `number`."""
        return AgentState(AgentVersion(self.agent_id, number, None, _results(records)), problem=why)


def agent_id_in(folder: Path) -> str | None:
    """Whose folder it is: the id in the first record that can be read and whose hash is the folder's name."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
    for name in names:
        try:
            agent_id = json.loads((folder / name).read_bytes().partition(b"\n")[2])["agent_id"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(agent_id, str) and hashlib.sha256(agent_id.encode()).hexdigest() == folder.name:
            return agent_id
    return None


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
    """The file's content; nothing when it is missing or cannot be read, which no checksum takes for whole."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
