"""The objects of a shared store: their names, and how a version is written. Pure: no I/O, any thread.

A version is the row of `turns`, the answer to its job, and the cache layout of its model: all that another machine
needs to continue. An empty version, without a row, marks that an agent was forgotten.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from stoker_worker.memory.database import Damaged, checksum, key_of
from stoker_worker.memory.store_parts import NextVersion
from stoker_worker.memory.transcripts import COLUMNS, Ended, TurnRecord

MARKER: Final = "stoker.json"
FORMAT: Final = "stoker-shared 1"
EMPTIED: Final = b'{"emptied":true}'
"""The content of a version below the number at which its agent was forgotten."""

AGENTS: Final = "agents"
CACHES: Final = "caches"
BLOCKS: Final = "blocks"
PIECES: Final = "pieces"

_CACHE_FILE: Final = re.compile(
    r"(?:blocks/[0-9a-f]{1,16}/([0-9a-f]{2})/\1[0-9a-f]{62}"
    r"|pieces/([0-9a-f]{2})/\2[0-9a-f]{30}-[1-9][0-9]{0,15}-(?:tail|snapshot-[0-9]))\.safetensors"
)
_BLOBS: Final = ("parent", "delivery", "new_tokens", "checksum")
_NAMES: Final = COLUMNS.split(", ")


def versions_folder(agent_id: str) -> str:
    key = key_of(agent_id).hex()
    return f"{AGENTS}/{key[:2]}/{key}"


def version_name(agent_id: str, version: int) -> str:
    return f"{versions_folder(agent_id)}/{version:012d}.json"


def number_in(name: str) -> int:
    """The version that an object of `versions_folder` has; 0: it is no version."""
    number = name.rpartition("/")[2].removesuffix(".json")
    return int(number) if len(number) == 12 and number.isdecimal() else 0


def manifest_name(key: str) -> str:
    """The object that lists an agent's cache files. `key`: hex."""
    return f"{CACHES}/{key[:2]}/{key}.json"


def pieces_prefix(key: str) -> str:
    """How the names of an agent's own cache files begin. `key`: hex."""
    return f"{PIECES}/{key[:2]}/{key[:32]}-"


def is_cache_file(name: str) -> bool:
    """Whether a worker gives such a name to a block or a piece."""
    return _CACHE_FILE.fullmatch(name) is not None


def manifest(version: int, files: Iterable[str]) -> bytes:
    return json.dumps({"version": version, "files": list(files)}).encode()


def files_in(manifest: bytes) -> list[str]:
    """The names of cache files in it; none, if it is damaged."""
    try:
        return [name for name in json.loads(manifest)["files"] if isinstance(name, str) and is_cache_file(name)]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []


class Emptied(Exception):
    """Its agent was forgotten after somebody listed the version."""


@dataclass(frozen=True)
class SharedVersion:
    """
    Attributes:
        next: as its maker made it.
        ended: of each delivery to the agent that had ended before and may come again; in versions that are whole, and
            in empty ones.
    """

    next: NextVersion
    ended: Mapping[bytes, Ended] = field(default_factory=dict)

    @property
    def record(self) -> TurnRecord | None:
        """``None``: the agent was forgotten."""
        return self.next.record

    @property
    def head(self) -> bytes:
        """The checksum of its row; empty if the agent was forgotten."""
        return self.record.to_row()[-1] if self.record else b""

    def encode(self) -> bytes:
        """The content of the object: the checksum of what follows, a newline, and JSON."""
        made, record = self.next, self.record
        fields: dict[str, Any] = {"format": FORMAT, "version": made.number, "result": made.result}
        if record is not None:
            row = dict(zip(_NAMES, record.to_row(), strict=True))
            row |= {name: base64.b64encode(row[name]).decode() for name in _BLOBS if row[name] is not None}
            fields |= row | {"agent_id": made.agent_id, "layout": made.layout}
        elif made.delivery is not None and made.result is not None:  # without the id of an agent that is forgotten
            fields["delivery"] = base64.b64encode(made.delivery).decode()
            result = json.loads(made.result)
            fields["result"] = json.dumps({name: value for name, value in result.items() if name != "agent_id"})
        if self.ended:
            fields["ended"] = [[base64.b64encode(key).decode(), *ended] for key, ended in self.ended.items()]
        body = json.dumps(fields, separators=(",", ":")).encode()
        return checksum(body).hex().encode() + b"\n" + body

    @classmethod
    def decode(cls, agent_id: str, version: int, content: bytes) -> Self:
        """
        Raises:
            Emptied: the agent was forgotten at a later number.
            Damaged: it is not as it was written, or is another agent's or version's.
        """
        if content == EMPTIED:
            raise Emptied(f"version {version} was forgotten")
        written, _, body = content.partition(b"\n")
        if written != checksum(body).hex().encode():
            raise Damaged("its checksum does not match")
        try:
            fields = json.loads(body)
            if (fields["format"], fields["version"]) != (FORMAT, version):
                raise Damaged("it is of another format or version")
            ended = {_blob(key): Ended(int(number), float(until)) for key, number, until in fields.get("ended", ())}
            result, layout = fields.get("result"), fields.get("layout")
            if not isinstance(result, str | None) or not isinstance(layout, str | None):
                raise Damaged("its content is not a version")
            if "checksum" not in fields:
                delivery = None if fields.get("delivery") is None else _blob(fields["delivery"])
                if result is not None:
                    result = json.dumps(json.loads(result) | {"agent_id": agent_id})
                return cls(NextVersion(agent_id, version, None, delivery, result), ended)
            row = {name: fields[name] for name in _NAMES}
            row |= {name: _blob(row[name]) for name in _BLOBS if row[name] is not None}
            record = TurnRecord.of_row(agent_id, version, tuple(row[name] for name in _NAMES))
            if record.to_row()[-1] != row["checksum"]:
                raise Damaged("its content is not a version")
            return cls(NextVersion(agent_id, version, record, record.delivery, result, layout), ended)
        except (ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
            raise error if isinstance(error, Damaged) else Damaged("its content is not a version") from None


def _blob(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
