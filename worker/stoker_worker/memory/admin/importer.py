"""Imports an agent from a file (see `archive`), also beside a worker. Trusts nothing in the file.

The turns are replayed and the cache files verified in the temp folder; then the files get their names, durably, and one
transaction reveals the agent. A refused file leaves nothing, a killed process temp files or orphans. No check can tell
whether the model computed the numbers in a block, and agents share blocks: they are imported only on request, and never
replace a block.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import IO, TypeVar

from pydantic import BaseModel, ValidationError

from stoker_shared.errors import AgentExists, AgentMemoryError
from stoker_worker.memory import agent_table, cache_index
from stoker_worker.memory.admin.archive import (
    AGENT_NAME,
    PIECE_NAMES,
    ArchivedAgent,
    ArchivedTurn,
    Member,
    list_members,
)
from stoker_worker.memory.admin.cache_check import check_block, check_piece
from stoker_worker.memory.agent_changes import check_vacant, naming
from stoker_worker.memory.block_chain import BlockChain
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.connection import Connection
from stoker_worker.memory.files import is_there
from stoker_worker.memory.in_flight import working_on
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.memory.turn_parts import are_snapshots, chain_of
from stoker_worker.memory.turn_record import TurnRecord, replay
from stoker_worker.ports import AgentVersion

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Imported:
    """The new agent; how many blocks were imported, and how many left out because they were not requested. Blocks that
    were in the store before count as neither."""

    agent_id: str
    version: int
    blocks: int
    blocks_left_out: int


def import_agent(parts: StoreParts, source: Path, *, new_id: str | None = None, with_blocks: bool = False) -> Imported:
    """Import the agent in the file, under its own id or `new_id`.

    Raises:
        AgentMemoryError: the file is refused, or there is such an agent already.
        AgentBusy: a worker or another command works on an agent of this id.
        OSError: it could not be read or written; there is no such agent.
    """
    try:
        with open(source, "rb") as archive:
            job = _Import(parts, archive, with_blocks)
            with job.removing_what_is_staged(), working_on(parts.path, new_id or job.agent.agent_id):
                return job.run(new_id or job.agent.agent_id)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as why:
        raise AgentMemoryError(f"{source} is refused: {why}") from why


class _Import:
    """The import of one file; `run` is called once. Raises `ValueError` and its like for a file that is refused."""

    def __init__(self, parts: StoreParts, archive: IO[bytes], with_blocks: bool) -> None:
        self._parts = parts
        self._archive = archive
        self._members = list_members(archive)
        self._with_blocks = with_blocks
        self._staged: dict[Path, Path] = {}
        if AGENT_NAME not in self._members:
            raise Damaged(f"{AGENT_NAME} is not in it")
        self.agent = _parsed(ArchivedAgent, self._members[AGENT_NAME], archive)

    def run(self, agent_id: str) -> Imported:
        parts = self._parts
        with naming(agent_id), parts.database.snapshot() as connection:
            check_vacant(connection, agent_id)
        version = self._read_version(agent_id)
        chain = chain_of(version.cache, version.transcript.token_ids) if version.cache and version.transcript else None
        pieces = self._stage_pieces(version)
        blocks = [member for member in self._members.values() if member.is_block]
        n_new = self._stage_blocks(chain, blocks) if self._with_blocks else 0
        try:
            self._place()
            piece_bytes = sum(path.stat().st_blocks * 512 for path in pieces)
            with naming(agent_id):
                parts.database.commit(lambda connection: self._commit(connection, agent_id, chain, piece_bytes))
        except AgentExists:
            raise  # its files have the same names
        except Exception:
            parts.pieces.remove(pieces)
            raise
        return Imported(agent_id, version.number, n_new, 0 if self._with_blocks else len(blocks))

    @contextmanager
    def removing_what_is_staged(self) -> Iterator[None]:
        try:
            yield
        finally:
            for path in self._staged.values():
                with suppress(OSError):
                    self._parts.files.remove(path)

    def _read_version(self, agent_id: str) -> AgentVersion:
        """The newest version, from a replay of all."""
        newest: list[TurnRecord] = []

        def records() -> Iterator[TurnRecord]:
            for record in self._records(agent_id):
                newest[:] = [record]
                yield record

        transcript, cache = replay(records()), newest[0].about.cache
        if cache is not None and chain_of(cache, transcript.token_ids).last != cache.last_block:
            raise Damaged("its cache is not that of its tokens")
        return AgentVersion(agent_id, self.agent.version, transcript, cache=cache)

    def _records(self, agent_id: str) -> Iterator[TurnRecord]:
        """The versions for the agent of this id, oldest first, one at a time. Each row names the checksum of the one
        before it, so with another id all change."""
        turns = {member.version: member for member in self._members.values() if member.version is not None}
        before: TurnRecord | None = None
        written = checksum = b""
        for number in sorted(turns):
            turn = _parsed(ArchivedTurn, turns[number], self._archive)
            record = turn.record(self.agent.agent_id)
            _check(record, number, before, written)
            written = bytes.fromhex(turn.checksum)
            if agent_id != self.agent.agent_id:
                parent = None if record.keeps_nothing else checksum
                record = replace(record, agent_id=agent_id, parent=parent)
            before, checksum = record, record.to_row()[-1]
            yield record
        if before is None or (before.version, written.hex()) != (self.agent.version, self.agent.head):
            raise Damaged(f"its newest version is not the one that {AGENT_NAME} names")

    def _stage_pieces(self, version: AgentVersion) -> list[Path]:
        """Verify the tail and the snapshots in the temp folder; returns where they will be."""
        pieces = []
        paths = self._parts.pieces.paths(version.agent_id, version.number)
        for place, (name, path) in enumerate(zip(PIECE_NAMES, paths, strict=True)):
            if name in self._members:
                pieces.append(path)
                try:
                    check_piece(self._stage(self._members[name], path), version, place - 1 if place else None)
                except Damaged as damage:
                    raise Damaged(f"its {name.removesuffix('.safetensors')} {damage}") from None
        return pieces

    def _stage_blocks(self, chain: BlockChain | None, blocks: list[Member]) -> int:
        """Verify the blocks that the store lacks in the temp folder; returns how many."""
        folder = self._parts.blocks
        wanted = {folder.path_of(chain.model, address): address for address in chain.addresses} if chain else {}
        n_new = 0
        for member in blocks:
            path = self._parts.path / member.name
            if chain is None or path not in wanted:
                raise Damaged(f"{member.name!r} in it is not a block of the agent")
            if is_there(path):
                continue
            n_new += 1
            try:
                if check_block(self._stage(member, path), wanted[path])[0] != chain.model:
                    raise Damaged("is another model's")
            except Damaged as damage:
                raise Damaged(f"{member.name!r} in it {damage}") from None
        return n_new

    def _stage(self, member: Member, target: Path) -> Path:
        self._staged[target] = staged = self._parts.writer.stage(member.chunks(self._archive))
        return staged

    def _place(self) -> None:
        """Give the staged files their names, durably."""
        writer, files = self._parts.writer, self._parts.files
        for target, staged in self._staged.items():
            writer.make_folder(target.parent)
            if not (target.is_relative_to(self._parts.blocks.path) and is_there(target)):  # a worker has saved it
                writer.place(staged, target)
        for folder in sorted({target.parent for target in self._staged}):
            files.sync_folder(folder)

    def _commit(self, connection: Connection, agent_id: str, chain: BlockChain | None, piece_bytes: int) -> None:
        check_vacant(connection, agent_id)
        row, now = None, time.time()
        for record in self._records(agent_id):
            row = agent_table.write_version(connection, row, record, keep_versions=record.version)
        assert row is not None  # there is a version
        if chain is not None and self._with_blocks:
            paths = chain.paths(self._parts.blocks.path_of)
            sizes = {i: path.stat().st_blocks * 512 for i, path in enumerate(takewhile(is_there, paths))}
            cache_index.add_blocks(connection, chain, sizes, now=now)
        cache_index.use_chain(connection, row.number, chain, now=now)
        cache_index.set_piece_bytes(connection, row.number, piece_bytes)
        sql = "UPDATE agents SET turns = ?, last_used = ? WHERE number = ?"
        connection.execute(sql, (self.agent.turns, now, row.number))


def _parsed(model: type[M], member: Member, archive: IO[bytes]) -> M:
    try:
        return model.model_validate_json(member.read(archive))
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise Damaged(f"the content of {member.name} is not of its form{where and ': ' + ascii(where)}") from None


def _check(record: TurnRecord, number: int, before: TurnRecord | None, written: bytes) -> None:
    """Raises `Damaged` unless the record can follow `before`, whose checksum is `written`."""
    about, cache = record.about, record.about.cache
    if record.version != number:
        raise Damaged(f"version {record.version} is in it as version {number}")
    if not record.keeps_nothing and (before is None or (before.version + 1, written) != (number, record.parent)):
        raise Damaged(f"version {number} does not follow the one before it")
    since_full = 0 if record.keeps_nothing or before is None else before.about.since_full + 1
    if (about.tokens, about.since_full) != (record.keep_tokens + len(record.new_tokens), since_full):
        raise Damaged(f"version {number} counts its tokens or versions wrongly")
    if cache is None:
        return
    if not chain_of(cache, ()).has_fingerprint:
        raise Damaged("its model's fingerprint is invalid")
    if not 0 <= cache.tokens <= about.tokens:
        raise Damaged("its cache is longer than its transcript")
    if not are_snapshots(cache.snapshots, cache.tokens):
        raise Damaged("its snapshots are at impossible places")
