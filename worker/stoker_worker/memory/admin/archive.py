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
from typing import IO, Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stoker_worker.memory.database import Damaged
from stoker_worker.memory.transcripts import COLUMNS, About, TurnRecord
from stoker_worker.ports.memory import StoredMessage

M = TypeVar("M", bound=BaseModel)

AGENT_NAME: Final = "agent.json"
_MOST_BYTES: Final = {
    re.compile(re.escape(AGENT_NAME)): 4096,
    re.compile(r"turns/(0\d{7}|[1-9]\d{7,11})\.json"): 128 * 2**20,  # held in memory; eight times the largest request
    re.compile(r"(?:tail|snapshot-[01])\.safetensors"): 2**32,
    re.compile(r"blocks/[0-9a-f]{1,16}/([0-9a-f]{2})/\1[0-9a-f]{62}\.safetensors"): 2**32,
}
"""Of the members that an archive may have."""
_HEADER_BYTES: Final = tarfile.BLOCKSIZE
_READ_BYTES: Final = 1 << 20

_Checksum = Annotated[bytes, Field(min_length=16, max_length=16)]
_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Version = Annotated[int, Field(ge=1, lt=10**12)]


class _Content(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_bytes="hex", val_json_bytes="hex")


class ArchivedAgent(_Content):
    """``agent.json``. `head`: the checksum of the newest version; `turns`: as in `AgentSummary`."""

    format: Literal["stoker-agent 1"] = "stoker-agent 1"
    agent_id: str
    version: _Version
    head: _Checksum
    turns: _Count


class ArchivedTurn(_Content):
    """``turns/<version>.json``: a row of `turns`, with its token ids as numbers."""

    version: _Version
    parent: _Checksum | None
    delivery: Annotated[bytes, Field(min_length=32, max_length=32)] | None
    about: About
    keep_tokens: _Count
    keep_messages: _Count
    keep_text: _Count
    new_tokens: tuple[Annotated[int, Field(ge=0, lt=2**32)], ...]
    new_messages: tuple[StoredMessage, ...] | None
    new_text: str | None
    checksum: _Checksum

    @staticmethod
    def encode(record: TurnRecord) -> bytes:
        """The content of the file."""
        row = dict(zip(COLUMNS.split(", "), record.to_row(), strict=True))
        row |= {name: row[name] and json.loads(row[name]) for name in ("about", "new_messages")}
        row["new_tokens"] = record.new_tokens
        return json.dumps(row, separators=(",", ":"), default=bytes.hex).encode()  # Python's own JSON keeps NaN

    def record(self, agent_id: str) -> TurnRecord:
        """The turn of this agent.

        Raises:
            Damaged: it is not as it was written, or another agent's.
        """
        fields: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields if name != "checksum"}
        record = TurnRecord(agent_id=agent_id, **fields)
        row = record.to_row()
        if row[-1] != self.checksum or TurnRecord.of_row(agent_id, self.version, row).to_row() != row:
            raise Damaged(f"version {self.version} is not as it was written")
        return record


def add(archive: tarfile.TarFile, name: str, content: bytes | IO[bytes]) -> None:
    """Write the next member. Equal content gives equal bytes. Raises `OSError`."""
    file = io.BytesIO(content) if isinstance(content, bytes) else content
    info = tarfile.TarInfo(name)
    info.size, info.mode = file.seek(0, os.SEEK_END), 0o600
    file.seek(0)
    archive.addfile(info, file)


class Archive:
    """An archive to read.

    Attributes:
        names: of its members; of turns from the oldest on.

    Raises:
        Damaged: it is no tar file, is cut short, or contains something else.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._places: dict[str, tuple[int, int]] = {}
        at = 0
        while (header := self._read(at, _HEADER_BYTES)) != bytes(_HEADER_BYTES):
            try:
                info = tarfile.TarInfo.frombuf(header, "ascii", "strict")
            except (tarfile.HeaderError, ValueError):
                raise Damaged("it is no tar file, or cut short") from None
            if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
                raise Damaged(f"{info.name!r} in it is not a plain file")
            if info.name in self._places:
                raise Damaged(f"{info.name!r} is in it twice")
            most = next((most for form, most in _MOST_BYTES.items() if form.fullmatch(info.name)), None)
            if most is None:
                raise Damaged(f"{info.name!r} does not belong in it")
            if not 0 <= info.size <= most:
                raise Damaged(f"{info.name!r} in it has {info.size} bytes")
            self._places[info.name] = at + _HEADER_BYTES, info.size
            at += _HEADER_BYTES + -(-info.size // _HEADER_BYTES) * _HEADER_BYTES
        self.names = sorted(self._places, key=lambda name: (len(name), name))

    def chunks(self, name: str) -> Iterator[bytes]:
        """
        Raises:
            Damaged: there is no such member, or the archive ends first.
        """
        if name not in self._places:
            raise Damaged(f"{name} is not in it")
        at, size = self._places[name]
        for start in range(at, at + size, _READ_BYTES):
            n_bytes = min(_READ_BYTES, at + size - start)
            chunk = self._read(start, n_bytes)
            if len(chunk) < n_bytes:
                raise Damaged("it is cut short")
            yield chunk

    def parsed(self, model: type[M], name: str) -> M:
        """Raises `Damaged`."""
        try:
            return model.model_validate_json(b"".join(self.chunks(name)))
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            raise Damaged(f"the content of {name} is not of its form{where and ': ' + ascii(where)}") from None

    def _read(self, at: int, n_bytes: int) -> bytes:
        self._file.seek(at)  # may be past the end of a file that is cut short, where nothing is read
        return self._file.read(n_bytes)
