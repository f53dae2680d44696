"""An exported agent as a tar file: plain ustar with a few fixed names. Owns the names, the limits and the content.

A reader trusts nothing: only regular files, each name of an expected form and once, each size within its limit and the
file. So there are no links, paths, extended headers or sparse files, and nothing is unpacked here. Pure but for the
file that it is given.
"""

import io
import json
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from stoker_shared.request import Message
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.files import Chunk
from stoker_worker.memory.piece_folder import MOST_SNAPSHOTS
from stoker_worker.memory.turn_record import About, TurnRecord

AGENT_NAME: Final = "agent.json"
PIECE_NAMES: Final = ("tail.safetensors", *(f"snapshot-{index}.safetensors" for index in range(MOST_SNAPSHOTS)))
"""In the order of `PieceFolder.paths`; without a number, because an archive holds the newest version's only."""
_BLOCK: Final = re.compile(r"blocks/[0-9a-f]{1,16}/([0-9a-f]{2})/\1[0-9a-f]{62}\.safetensors")
_TURN: Final = re.compile(r"turns/(0\d{7}|[1-9]\d{7,11})\.json")

MAX_AGENT_BYTES: Final = 4096
MAX_TURN_BYTES: Final = 128 * 2**20
"""A turn is held in memory; the largest request is an eighth of this."""
MAX_PIECE_BYTES: Final = 2**32

_BLOCK_BYTES: Final = tarfile.BLOCKSIZE
_READ_BYTES: Final = 1 << 20

_Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_Count = Annotated[int, Field(ge=0, lt=2**53)]


class _Content(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ArchivedAgent(_Content):
    """``agent.json``. `head`: the checksum of the newest version; `turns`: as in `AgentSummary`."""

    format: Literal["stoker-agent 1"] = "stoker-agent 1"
    agent_id: str
    version: Annotated[int, Field(ge=1, lt=10**12)]
    head: _Checksum
    turns: _Count


class ArchivedTurn(_Content):
    """``turns/<version>.json``: a row of `turns`, with its token ids as numbers."""

    version: Annotated[int, Field(ge=1, lt=10**12)]
    parent: _Checksum | None
    delivery: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None
    about: About
    keep_tokens: _Count
    keep_messages: _Count
    keep_text: _Count
    new_tokens: tuple[Annotated[int, Field(ge=0, lt=2**32)], ...]
    new_messages: tuple[Message, ...] | None
    new_text: str | None
    checksum: _Checksum

    @staticmethod
    def name(version: int) -> str:
        """The file's."""
        return f"turns/{version:08d}.json"

    @staticmethod
    def encode(record: TurnRecord) -> bytes:
        """The content of the file."""
        version, parent, delivery, about, *keep, _, messages, text, checksum = record.to_row()
        fields = {
            "version": version,
            "parent": parent.hex() if parent is not None else None,
            "delivery": delivery.hex() if delivery is not None else None,
            "about": json.loads(about),
            **dict(zip(("keep_tokens", "keep_messages", "keep_text"), keep, strict=True)),
            "new_tokens": record.new_tokens,
            "new_messages": None if messages is None else json.loads(messages),
            "new_text": text,
            "checksum": checksum.hex(),
        }
        return json.dumps(fields, separators=(",", ":")).encode()  # Python's own JSON keeps NaN

    def record(self, agent_id: str) -> TurnRecord:
        """The turn of this agent.

        Raises:
            Damaged: it is not as it was written, or another agent's.
        """
        fields = {name: getattr(self, name) for name in type(self).model_fields if name != "checksum"}
        fields["parent"] = None if self.parent is None else bytes.fromhex(self.parent)
        fields["delivery"] = None if self.delivery is None else bytes.fromhex(self.delivery)
        record = TurnRecord(agent_id=agent_id, **fields)
        row = record.to_row()
        if row[-1].hex() != self.checksum or TurnRecord.of_row(agent_id, self.version, row).to_row() != row:
            raise Damaged(f"version {self.version} is not as it was written")
        return record


@dataclass(frozen=True)
class Member:
    """One file in the archive, and the place of its bytes."""

    name: str
    offset: int
    size: int

    @property
    def version(self) -> int | None:
        """Of a turn; ``None`` for any other file."""
        match = _TURN.fullmatch(self.name)
        return int(match[1]) if match else None

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

    def add_file(self, name: str, file: IO[bytes]) -> None:
        """Raises `OSError`."""
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
    if member.name == AGENT_NAME:
        return MAX_AGENT_BYTES
    if member.version is not None:
        return MAX_TURN_BYTES
    if member.name in PIECE_NAMES or _BLOCK.fullmatch(member.name):
        return MAX_PIECE_BYTES
    raise Damaged(f"{member.name!r} does not belong in it")
