"""Carries an agent in a file: exports it, also beside a worker that runs it, and imports it. Any thread.

The file is a plain ustar with a few fixed names. The answers to the agent's jobs stay behind: they are for the jobs of
this store's queue.

An import trusts nothing in the file: only regular files, each name of an expected form and once, each size within its
limit and the file. So there are no links, paths, extended headers or sparse files. The turns are replayed and the cache
files verified in the temp folder; then the files get their names, and one transaction reveals the agent. A refused
file leaves nothing, a killed process temp files or orphans. No check can tell whether the model computed the
numbers in a block, and agents share blocks: they are imported only on request, and never replace a block.
"""

import io
import json
import os
import re
import tarfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stoker_shared.durable_file import draft_of, write_new
from stoker_shared.errors import AgentExists, AgentMemoryError
from stoker_worker.memory import cache_index, transcripts
from stoker_worker.memory.admin.cache_files import PIECE_NAMES, enter_blocks, files_of
from stoker_worker.memory.agent_changes import check_vacant, look, naming, readable, version_of
from stoker_worker.memory.database import Connection, Damaged
from stoker_worker.memory.files import allocated_bytes, is_there
from stoker_worker.memory.locks import working_on
from stoker_worker.memory.store_parts import NextVersion, StoreParts
from stoker_worker.memory.transcripts import COLUMNS, About, TurnRecord, delta, replay
from stoker_worker.memory.turn_saver import are_snapshots, chain_of
from stoker_worker.ports import AgentVersion
from stoker_worker.ports.memory import StoredMessage

M = TypeVar("M", bound=BaseModel)

AGENT_NAME: Final = "agent.json"
_MOST_BYTES: Final = {
    re.compile(re.escape(AGENT_NAME)): 4096,
    re.compile(r"turns/(0\d{7}|[1-9]\d{7,11})\.json"): 128 * 2**20,  # held in memory; eight times the largest request
    re.compile(r"(?:tail|snapshot-[01])\.safetensors"): 2**32,
    re.compile(r"blocks/[0-9a-f]{1,16}/([0-9a-f]{2})/\1[0-9a-f]{62}\.safetensors"): 2**32,
}
"""The names that an archive's members may have."""
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


@dataclass(frozen=True)
class Exported:
    """The new file: the agent's version, how many blocks, and its size."""

    version: int
    blocks: int
    n_bytes: int


def export_agent(parts: StoreParts, agent_id: str, target: Path, *, with_blocks: bool = False) -> Exported:
    """Write the agent's versions, tail and snapshots to a new file, mode 0600, and with `with_blocks` its blocks. Cache
    that is damaged, or that goes meanwhile, is left out: it only saves time.

    Raises:
        AgentNotFound: there is no such agent.
        AgentMemoryError: `target` exists.
        AgentTranscriptUnreadable: its transcript is damaged, or lacks its last turn.
        OSError: it could not be written; there is no file.
    """
    if target.exists():
        raise AgentMemoryError(f"{target} exists already")
    n_blocks = 0
    with draft_of(target) as draft, ExitStack() as opened:
        write_new(draft, ())
        archive = opened.enter_context(tarfile.open(draft, "w", format=tarfile.USTAR_FORMAT))
        pieces: dict[str, IO[bytes]] = {}
        with naming(agent_id), parts.database.snapshot() as connection:
            state = readable(connection, agent_id)
            version, row = state.version, state.row
            assert row is not None  # it is readable
            files = files_of(parts, version)
            for name in PIECE_NAMES:  # open, so that they outlast the agent's next turn
                path, check = files.pop(name)
                with suppress(Damaged, FileNotFoundError):
                    check(path)
                    pieces[name] = opened.enter_context(path.open("rb"))
            texts = [
                (f"turns/{record.version:08d}.json", ArchivedTurn.encode(record))
                for record, can_return in transcripts.read_history(connection, row)
                if can_return
            ]
            turns = connection.execute("SELECT turns FROM agents WHERE number = ?", (row.number,)).fetchone()[0]
        head = ArchivedAgent(agent_id=agent_id, version=version.number, head=version.head, turns=turns)
        for name, text in ((AGENT_NAME, head.model_dump_json().encode()), *texts):  # the target may be slow
            add(archive, name, text)
        for name, piece in pieces.items():
            add(archive, name, piece)
        with suppress(Damaged, FileNotFoundError):  # no block is of use without those before it
            for name, (path, check) in files.items() if with_blocks else ():
                check(path)
                with path.open("rb") as block:
                    add(archive, name, block)
                n_blocks += 1
    return Exported(version.number, n_blocks, target.stat().st_size)


@dataclass(frozen=True)
class Imported:
    """The new agent; how many blocks were imported, and how many left out because they were not requested. Blocks that
    were in the store before count as neither."""

    agent_id: str
    version: int
    blocks: int
    blocks_left_out: int


def import_agent(parts: StoreParts, source: Path, *, new_id: str | None = None, with_blocks: bool = False) -> Imported:
    """Import the agent in the file, under its own id or `new_id`. With a shared store its newest version alone, as a
    whole: it begins a history there.

    Raises:
        AgentMemoryError: the file is refused, or there is such an agent already.
        VersionTaken, SharedStoreAway: as `StoreParts.commit_next`.
        AgentBusy: a worker or another command works on an agent of this id.
        OSError: it could not be read or written; there is no such agent.
    """
    try:
        with open(source, "rb") as file:
            job = _Import(parts, Archive(file), new_id, with_blocks)
            with closing(job), working_on(parts.path, job.agent_id):
                look(parts, job.agent_id)
                return job.run()
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as why:
        raise AgentMemoryError(f"{source} is refused: {why}") from why


class _Import:
    """The import of one file; `run` is called once. Raises `ValueError` and its like for a file that is refused."""

    def __init__(self, parts: StoreParts, archive: Archive, new_id: str | None, with_blocks: bool) -> None:
        self._parts = parts
        self._archive = archive
        self._with_blocks = with_blocks
        self._staged: dict[Path, Path] = {}
        self._agent = archive.parsed(ArchivedAgent, AGENT_NAME)
        self.agent_id = new_id or self._agent.agent_id
        self._after = 0  # the number before the first one of the versions

    def run(self) -> Imported:
        parts = self._parts
        self._after = parts.replica.forgotten(self.agent_id).number
        with naming(self.agent_id), parts.database.snapshot() as connection:
            check_vacant(connection, self.agent_id)
        version = self._read_version()
        pieces, blocks = self._stage(version)
        try:
            self._place()
            piece_bytes = sum(map(allocated_bytes, pieces))
            with naming(self.agent_id):
                change = partial(self._commit, version=version, piece_bytes=piece_bytes)
                parts.commit_next(self._next_version(version), change)
        except AgentExists:
            raise  # its files have the same names
        except Exception:
            parts.pieces.remove(pieces)
            raise
        parts.pieces.keep_only(pieces, self.agent_id, version.number)
        n_new = len(self._staged) - len(pieces)
        return Imported(self.agent_id, version.number, n_new, 0 if self._with_blocks else blocks)

    def close(self) -> None:
        """Remove what is still in the temp folder."""
        for path in self._staged.values():
            with suppress(OSError):
                self._parts.files.remove(path)

    def _read_version(self) -> AgentVersion:
        """The newest version, from a replay of all."""
        newest: list[TurnRecord] = []

        def records() -> Iterator[TurnRecord]:
            for record in self._records():
                newest[:] = [record]
                yield record

        transcript, cache = replay(records()), newest[0].about.cache
        if cache is not None and chain_of(cache, transcript.token_ids).last != cache.last_block:
            raise Damaged("its cache is not that of its tokens")
        n_versions = 1 if self._parts.replica.is_shared else self._agent.version
        return AgentVersion(self.agent_id, self._after + n_versions, transcript, cache=cache)

    def _records(self) -> Iterator[TurnRecord]:
        """The versions for the agent of this id, oldest first, one at a time. Each row names the checksum of the one
        before it, so with another id or number all change."""
        before: TurnRecord | None = None
        written = checksum = b""
        for name in (name for name in self._archive.names if name.startswith("turns/")):
            turn = self._archive.parsed(ArchivedTurn, name)
            record = turn.record(self._agent.agent_id)
            _check(record, int(name[6:-5]), before, written)
            parent = None if record.keeps_nothing else checksum
            before, written = record, turn.checksum
            if (self.agent_id, self._after) != (self._agent.agent_id, 0):
                number = self._after + record.version
                record = replace(record, agent_id=self.agent_id, version=number, parent=parent)
            checksum = record.to_row()[-1]
            yield record
        if before is None or (before.version, written) != (self._agent.version, self._agent.head):
            raise Damaged(f"its newest version is not the one that {AGENT_NAME} names")

    def _own_records(self, version: AgentVersion) -> Iterator[TurnRecord]:
        """Those that the agent has here."""
        if not self._parts.replica.is_shared:
            yield from self._records()
            return
        *_, newest = self._records()
        assert version.transcript is not None  # it was replayed
        about = replace(newest.about, since_full=0)
        yield replace(newest, version=version.number, about=about, delivery=None, **delta(None, version.transcript))

    def _next_version(self, version: AgentVersion) -> NextVersion:
        *_, record = self._own_records(version)
        with self._parts.database.snapshot() as connection:
            return version_of(connection, record)

    def _stage(self, version: AgentVersion) -> tuple[list[Path], int]:
        """Write the cache files to the temp folder, and verify them there; but no block that the store has.

        Returns:
            the places of the tail and the snapshots, and how many blocks are in the file.
        """
        files, pieces, n_blocks = files_of(self._parts, version), [], 0
        for name in (name for name in self._archive.names if name.endswith(".safetensors")):
            if name not in files:
                raise Damaged(f"{name!r} in it is not a block of the agent")
            path, check = files[name]
            if name in PIECE_NAMES:
                pieces.append(path)
            else:
                n_blocks += 1
                if not self._with_blocks or is_there(path):
                    continue
            self._staged[path] = staged = self._parts.writer.stage(self._archive.chunks(name))
            try:
                check(staged)
            except Damaged as damage:
                raise Damaged(f"its {name.removesuffix('.safetensors')} {damage}") from None
        return pieces, n_blocks

    def _place(self) -> None:
        """Give the staged files their names."""
        writer = self._parts.writer
        for target, staged in self._staged.items():
            writer.make_folder(target.parent)
            if not (target.is_relative_to(self._parts.blocks.path) and is_there(target)):  # a worker has saved it
                writer.place(staged, target)

    def _commit(self, connection: Connection, version: AgentVersion, piece_bytes: int) -> None:
        check_vacant(connection, self.agent_id)
        row, now = None, time.time()
        chain = chain_of(version.cache, version.transcript.token_ids) if version.cache and version.transcript else None
        for record in self._own_records(version):
            row = transcripts.write_version(connection, row, record, keep_versions=record.version)
        assert row is not None  # there is a version
        if chain is not None and self._with_blocks:
            enter_blocks(connection, chain, self._parts.blocks, now=now)
        cache_index.use_chain(connection, row.number, chain, now=now)
        cache_index.set_piece_bytes(connection, row.number, piece_bytes)
        sql = "UPDATE agents SET turns = ?, last_used = ? WHERE number = ?"
        connection.execute(sql, (self._agent.turns, now, row.number))


def _check(record: TurnRecord, number: int, before: TurnRecord | None, written: bytes) -> None:
    """Raises `Damaged` unless the record can follow `before`, whose checksum is `written`."""
    about, cache = record.about, record.about.cache
    since_full = 0 if record.keeps_nothing or before is None else before.about.since_full + 1
    rules = {
        f"version {record.version} is in it as version {number}": record.version == number,
        f"version {number} does not follow the one before it": record.keeps_nothing
        or (before is not None and (before.version + 1, written) == (number, record.parent)),
        f"version {number} counts its tokens or versions wrongly": (about.tokens, about.since_full)
        == (record.keep_tokens + len(record.new_tokens), since_full),
        "its model's fingerprint is invalid": cache is None or chain_of(cache, ()).has_fingerprint,
        "its cache is longer than its transcript": cache is None or 0 <= cache.tokens <= about.tokens,
        "its snapshots are at impossible places": cache is None or are_snapshots(cache.snapshots, cache.tokens),
    }
    for problem, is_right in rules.items():
        if not is_right:
            raise Damaged(problem)
