"""An exported agent as a tar file: plain ustar with a few fixed names. Owns the names, the limits, and the export.

A reader trusts nothing: only regular files, each name of an expected form and once, each size within its limit and the
file. So there are no links, paths, extended headers or sparse files, and nothing is unpacked here. An export changes
nothing in the store, which must be locked.
"""

import io
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from stoker_shared.durable_file import draft_of
from stoker_shared.errors import AgentMemoryError
from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.agent_index import newest_blocks
from stoker_worker.memory.checksummed_file import Damaged
from stoker_worker.memory.files import Chunk
from stoker_worker.memory.record import MOST_SNAPSHOTS

PIECE_NAMES: Final = ("tail.safetensors", *(f"snapshot-{index}.safetensors" for index in range(MOST_SNAPSHOTS)))
"""In the order of `AgentFolder.piece_paths`; without a number, because an archive holds the newest version's only."""
_BLOCK: Final = re.compile(r"blocks/[0-9a-f]{1,16}/([0-9a-f]{2})/\1[0-9a-f]{62}\.safetensors")
_RECORD: Final = re.compile(r"(0\d{7}|[1-9]\d{7,11})\.json")

MAX_HEAD_BYTES: Final = 4096
MAX_RECORD_BYTES: Final = 128 * 2**20
"""A record is held in memory; the largest request is an eighth of this."""
MAX_PIECE_BYTES: Final = 2**32

_BLOCK_BYTES: Final = tarfile.BLOCKSIZE
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Member:
    """One file in the archive, and the place of its bytes."""

    name: str
    offset: int
    size: int

    @property
    def version(self) -> int | None:
        """Of a record; ``None`` for any other file."""
        return int(self.name.removesuffix(".json")) if _RECORD.fullmatch(self.name) else None

    @property
    def is_block(self) -> bool:
        return self.name.startswith("blocks/")

    def read(self, archive: IO[bytes]) -> bytes:
        return b"".join(bytes(chunk) for chunk in self.chunks(archive))

    def chunks(self, archive: IO[bytes]) -> Iterator[Chunk]:
        """
        Raises:
            Damaged: the archive ends first.
        """
        archive.seek(self.offset)
        left = self.size
        while left:
            chunk = archive.read(min(left, _READ_BYTES))
            if not chunk:
                raise Damaged("it is cut short")
            left -= len(chunk)
            yield chunk


def list_members(archive: IO[bytes]) -> dict[str, Member]:
    """The files in the archive, by name.

    Raises:
        Damaged: it is no tar file, is cut short, or contains something else.
    """
    members: dict[str, Member] = {}
    at = 0
    while True:
        archive.seek(at)  # past the end of a file that is cut short, where nothing is read
        header = archive.read(_BLOCK_BYTES)
        if header == bytes(_BLOCK_BYTES):
            return members
        try:
            info = tarfile.TarInfo.frombuf(header, "ascii", "strict")
        except (tarfile.HeaderError, ValueError):
            raise Damaged("it is no tar file, or cut short") from None
        member = Member(info.name, at + _BLOCK_BYTES, info.size)
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise Damaged(f"{info.name!r} in it is not a plain file")
        if member.name in members:
            raise Damaged(f"{info.name!r} is in it twice")
        if not 0 <= info.size <= _limit(member):
            raise Damaged(f"{info.name!r} in it has {info.size} bytes")
        at = member.offset + -(-info.size // _BLOCK_BYTES) * _BLOCK_BYTES
        members[member.name] = member


class ArchiveWriter:
    """Writes members in order; equal content gives equal bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._tar = tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115

    def add(self, name: str, data: bytes) -> None:
        self._add(name, len(data), io.BytesIO(data))

    def add_file(self, name: str, path: Path) -> None:
        """Raises `OSError`."""
        with open(path, "rb") as file:
            self._add(name, os.fstat(file.fileno()).st_size, file)

    def close(self) -> None:
        """Write the end of the archive; the file stays open."""
        self._tar.close()

    def _add(self, name: str, size: int, file: IO[bytes]) -> None:
        info = tarfile.TarInfo(name)
        info.size = size
        info.mode = 0o600
        self._tar.addfile(info, file)


def _limit(member: Member) -> int:
    """The most bytes that a member of this name may have.

    Raises:
        Damaged: no member has such a name.
    """
    if member.name == "HEAD":
        return MAX_HEAD_BYTES
    if member.version is not None:
        return MAX_RECORD_BYTES
    if member.name in PIECE_NAMES or _BLOCK.fullmatch(member.name):
        return MAX_PIECE_BYTES
    raise Damaged(f"{member.name!r} does not belong in it")


@dataclass(frozen=True)
class Exported:
    """The new file: the agent's version, how many blocks, and its size."""

    version: int
    blocks: int
    n_bytes: int


def export_agent(store: StoreAccess, agent_id: str, target: Path, *, with_blocks: bool = False) -> Exported:
    """Write the agent's records, HEAD, tail and snapshots to a new file, mode 0600, and with `with_blocks` its blocks.

    Raises:
        AgentMemoryError: there is no such agent, or `target` exists.
        AgentTranscriptUnreadable: its transcript is damaged, or lacks its last turn.
        OSError: it could not be written; there is no file.
    """
    state = store.readable(agent_id)
    if target.exists():
        raise AgentMemoryError(f"{target} exists already")
    folder = store.agent(agent_id)
    version = state.version.number
    blocks = sorted(newest_blocks(state, store.blocks.path_of)) if with_blocks else []
    blocks = [path for path in blocks if path.exists()]
    with (
        draft_of(target) as draft,
        open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file,
        closing(ArchiveWriter(file)) as archive,
    ):
        archive.add("HEAD", state.head)
        for number in (n for n in folder.read_records() if n <= version):
            path = folder.record_path(number)
            archive.add_file(path.name, path)
        for name, path in zip(PIECE_NAMES, folder.piece_paths(version), strict=True):
            if path.exists():
                archive.add_file(name, path)
        for path in blocks:
            archive.add_file(path.relative_to(store.path).as_posix(), path)
    return Exported(version, len(blocks), target.stat().st_size)
