"""The versions of agents in a shared store: finds the newest, verifies chains, makes each next one at most once, and
removes old ones. Any thread.

Once an old version is removed, its number is free again, and a worker that slept could make its next version with that
number. But the newest version is never removed. So after each put, the names above the new one are listed: if there is
one, the worker came too late, and the put fails.
"""

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Self

from stoker_shared.errors import VersionTaken
from stoker_worker.memory.database import Damaged, checksum, key_of
from stoker_worker.memory.replica.bucket import FORMAT, READ_LIMIT_S, Bucket, Stored
from stoker_worker.memory.store_parts import NextVersion
from stoker_worker.memory.transcripts import COLUMNS, FULL_EVERY, Ended, TurnRecord

EMPTIED: Final = b'{"emptied":true}'
"""The content of a version below the number at which its agent was forgotten."""

AGENTS: Final = "agents"
_BLOBS: Final = ("parent", "delivery", "new_tokens", "checksum")
_NAMES: Final = COLUMNS.split(", ")


def versions_folder(agent_id: str) -> str:
    key = key_of(agent_id).hex()
    return f"{AGENTS}/{key[:2]}/{key}"


def version_name(agent_id: str, version: int) -> str:
    return f"{versions_folder(agent_id)}/{version:012d}.json"


def number_in(name: str) -> int:
    """The version in the name of an object of `versions_folder`; 0: it is no version."""
    number = name.rpartition("/")[2].removesuffix(".json")
    return int(number) if len(number) == 12 and number.isdecimal() else 0


class Emptied(Exception):
    """The agent was forgotten after its version was listed."""


@dataclass(frozen=True)
class SharedVersion(NextVersion):
    """The row of `turns`, the answer to its job, and the cache layout of its model: all that another machine needs to
    continue. An empty version, without a row, marks that an agent was forgotten. `ended`: of each delivery to the agent
    that had ended before and may be repeated; in whole and in empty versions."""

    ended: Mapping[bytes, Ended] = field(default_factory=dict)

    @property
    def head(self) -> bytes:
        """The checksum of its row; empty if the agent was forgotten."""
        return self.record.to_row()[-1] if self.record else b""

    def encode(self) -> bytes:
        """The content of the object: the checksum of what follows, a newline, and JSON."""
        fields: dict[str, Any] = {"format": FORMAT, "version": self.number, "result": self.result}
        if self.record is not None:
            row = dict(zip(_NAMES, self.record.to_row(), strict=True))
            row |= {name: base64.b64encode(row[name]).decode() for name in _BLOBS if row[name] is not None}
            fields |= row | {"agent_id": self.agent_id, "layout": self.layout}
        elif self.result is not None:  # without the id of an agent that is forgotten
            if self.delivery is not None:
                fields["delivery"] = base64.b64encode(self.delivery).decode()
            result = json.loads(self.result)
            fields["result"] = json.dumps({name: value for name, value in result.items() if name != "agent_id"})
        if self.ended:
            fields["ended"] = [[base64.b64encode(key).decode(), *ended] for key, ended in self.ended.items()]
        body = json.dumps(fields, separators=(",", ":")).encode()
        return checksum(body).hex().encode() + b"\n" + body

    @classmethod
    def decode(cls, agent_id: str, version: int, content: bytes) -> Self:
        """Raises `Emptied`: the agent was forgotten at a later number; `Damaged`: the content is not as it was written,
        or is another agent's or version's."""
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
                return cls(agent_id, version, None, delivery, result, ended=ended)
            row = {name: fields[name] for name in _NAMES}
            row |= {name: _blob(row[name]) for name in _BLOBS if row[name] is not None}
            record = TurnRecord.of_row(agent_id, version, tuple(row[name] for name in _NAMES))
            if record.to_row()[-1] != row["checksum"]:
                raise Damaged("its content is not a version")
            return cls(agent_id, version, record, record.delivery, result, layout, ended)
        except (ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
            raise error if isinstance(error, Damaged) else Damaged("its content is not a version") from None


def _blob(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_GRACE_S: Final = 86_400.0
"""How long an old version stays after the next one was made: a listing may lag, and a reader may be slow."""
_AT_ONCE: Final = 8

ChecksumHere = Callable[[int], bytes | None]
"""Returns the checksum of this machine's row of a version; ``None``: there is none."""


class Versions:
    """Each call raises `BucketAway`."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def newest(self, agent_id: str, known: int, hint: int = 0) -> int:
        """The number of the agent's newest version. `known`: one that is or was there; 0: none is known. `hint`: one
        that may be there."""
        after = version_name(agent_id, known) if known else None
        newest = max(self.stored(agent_id, after), default=known)
        if hint > newest and self._bucket.has(version_name(agent_id, hint)):
            newest = hint
        while self._bucket.lags and self._bucket.has(version_name(agent_id, newest + 1)):
            newest += 1
        return newest

    def get(self, agent_id: str, number: int) -> SharedVersion | None:
        """``None``: there is no such version. Raises `Damaged`, `Emptied`."""
        content = self._bucket.get(version_name(agent_id, number), READ_LIMIT_S)
        try:
            return None if content is None else SharedVersion.decode(agent_id, number, content)
        except Damaged as damage:
            raise Damaged(f"version {number} is unusable: {damage}") from None

    def chain(
        self, agent_id: str, newest: int, here: int, checksum_here: ChecksumHere
    ) -> tuple[list[SharedVersion], bool]:
        """The versions to bring in for `newest`, oldest first, and whether this machine's versions before them are the
        same as there. `here`: this machine's newest version; none up to it is read, if they prove to be the same.

        Raises:
            Emptied: the agent was forgotten meanwhile.
            Damaged: one is not as it was written, or is missing.
        """
        found = self._all(agent_id, [newest])
        record = found[0].record
        if record is None:
            return found, False
        first = newest - record.about.since_full
        found = self._all(agent_id, range(max(first, here + 1), newest)) + found
        follows = self._follows(found[0], checksum_here)
        if not follows and found[0].number > first:
            found = self._all(agent_id, range(first, found[0].number)) + found
            follows = self._follows(found[0], checksum_here)
        for before, version in pairwise(found):
            if version.record is None or version.record.parent != before.head:
                raise Damaged(f"version {version.number} does not follow the one before it")
        return found, follows

    def put(self, version: SharedVersion) -> None:
        """Make it the agent's newest version. Raises `VersionTaken`: there is another one of its number, or a newer."""
        self.create(version)
        agent_id, number = version.agent_id, version.number
        if (newest := self.newest(agent_id, number)) > number:
            raise VersionTaken(f"another worker has made version {newest} of agent {agent_id!r}")

    def create(self, version: SharedVersion) -> None:
        """As `put`, without a look for newer ones."""
        agent_id, number = version.agent_id, version.number
        name, content = version_name(agent_id, number), version.encode()
        if not self._bucket.create(name, content):
            there = self._bucket.get(name, READ_LIMIT_S)
            if there is None:
                raise self._bucket.away(f"{name} is there and is not")
            if there != content:  # else the reply to an earlier try was lost
                raise VersionTaken(f"another worker has made version {number} of agent {agent_id!r}")

    def made_at(self, agent_id: str, number: int) -> float | None:
        """Unix time, by the clock there; ``None``: it is not there."""
        found = self._bucket.find(version_name(agent_id, number))
        return None if found is None else found.changed_at

    def empty_below(self, agent_id: str, number: int) -> None:
        """Empty the agent's versions below this number: it is forgotten."""
        stored = self.stored(agent_id)
        full = [one for one, x in stored.items() if one < number and x.n_bytes != len(EMPTIED)]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="shared-store") as threads:
            list(threads.map(lambda one: self._bucket.put(version_name(agent_id, one), EMPTIED), full))

    def prune(self, agent_id: str) -> None:
        """Remove the versions that no reader needs, by the shared store's clock alone."""
        stored = self.stored(agent_id)
        numbers = sorted(stored)
        before = max((x.changed_at for x in stored.values()), default=0.0) - _GRACE_S
        old = [
            one
            for one, following in pairwise(numbers)
            if one < numbers[-1] - 2 * FULL_EVERY and stored[following].changed_at < before
        ]
        self._bucket.remove(version_name(agent_id, one) for one in old)

    def stored(self, agent_id: str, after: str | None = None) -> dict[int, Stored]:
        """The agent's versions there by their numbers."""
        found = self._bucket.listed(versions_folder(agent_id), after=after)
        return {number: stored for stored in found if (number := number_in(stored.name))}

    def _all(self, agent_id: str, numbers: Iterable[int]) -> list[SharedVersion]:
        wanted = list(numbers)
        if len(wanted) == 1:
            found = [self.get(agent_id, wanted[0])]
        else:
            with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="shared-store") as threads:
                found = list(threads.map(lambda number: self.get(agent_id, number), wanted))
        for number, version in zip(wanted, found, strict=True):
            if version is None:
                raise Damaged(f"version {number} is missing")
        return [version for version in found if version is not None]

    def _follows(self, version: SharedVersion, checksum_here: ChecksumHere) -> bool:
        """True if the version before is the same here as there."""
        number = version.number
        if version.record is None or (ours := checksum_here(number - 1)) is None:
            return False
        if not version.record.keeps_nothing:
            return version.record.parent == ours
        before = self.get(version.agent_id, number - 1)
        return before is not None and before.head == ours
