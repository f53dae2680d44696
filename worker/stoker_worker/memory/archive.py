"""The tar file an agent travels in: plain ustar, its own few names and nothing else. Owns the names and the limits.

Reading trusts nothing: regular files only, each name of the expected form and once, each size within its limit and
within the file. So there are no links, no paths, no extended headers, no sparse files, and nothing is unpacked here.
"""

import io
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from stoker_worker.memory.files import Chunk
from stoker_worker.memory.record import MOST_SNAPSHOTS
from stoker_worker.memory.sealed import Damaged

PIECE_NAMES: Final = ("tail.safetensors", *(f"snapshot-{index}.safetensors" for index in range(MOST_SNAPSHOTS)))
"""In the order of `AgentFolder.piece_paths`; without a version, because an archive holds the newest one only."""
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
    """One file in the archive: where its bytes are."""

    name: str
    offset: int
    size: int

    @property
    def version(self) -> int | None:
        """The record's version; ``None`` when it is no record."""
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
    """What is in the archive, by name.

    Raises:
        Damaged: it is no tar file, cut short, or has anything in it that does not belong there.
    """
    members: dict[str, Member] = {}
    at = 0
    while True:
        archive.seek(at)  # behind the end of a file that is cut short, where nothing is read
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
    """Writes the members one after the other, the same bytes each time."""

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
    """Most bytes of a member of this name.

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
