"""Imports an agent from a file (see `archive`), also beside a worker. Trusts nothing in the file.

The turns are replayed and the cache files verified in the temp folder; then the files get their names, durably, and one
transaction reveals the agent. A refused file leaves nothing, a killed process temp files or orphans. No check can tell
whether the model computed the numbers in a block, and agents share blocks: they are imported only on request, and never
replace a block.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from stoker_shared.errors import AgentExists, AgentMemoryError
from stoker_worker.memory import cache_index, transcripts
from stoker_worker.memory.admin.archive import AGENT_NAME, Archive, ArchivedAgent, ArchivedTurn
from stoker_worker.memory.admin.cache_check import PIECE_NAMES, files_of
from stoker_worker.memory.admin.recount import enter_blocks
from stoker_worker.memory.agent_changes import check_vacant, naming, version_of
from stoker_worker.memory.database import Connection, Damaged
from stoker_worker.memory.files import allocated_bytes, is_there
from stoker_worker.memory.locks import working_on
from stoker_worker.memory.store_parts import NextVersion, StoreParts
from stoker_worker.memory.transcripts import TurnRecord, delta, replay
from stoker_worker.memory.turn_saver import are_snapshots, chain_of
from stoker_worker.ports import AgentVersion


@dataclass(frozen=True)
class Imported:
    """The new agent; how many blocks were imported, and how many left out because they were not requested. Blocks that
    were in the store before count as neither."""

    agent_id: str
    version: int
    blocks: int
    blocks_left_out: int


def import_agent(
    parts: StoreParts,
    source: Path,
    *,
    new_id: str | None = None,
    with_blocks: bool = False,
    look: Callable[[str], object] = lambda agent_id: None,
) -> Imported:
    """Import the agent in the file, under its own id or `new_id`. With a shared store its newest version alone, as a
    whole: it begins a history there.

    Args:
        look: brings in what other workers have made of an agent of this id.

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
                look(job.agent_id)
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
                next_version = partial(self._next_version, version)
                parts.commit_next(next_version, lambda connection: self._commit(connection, version, piece_bytes))
        except AgentExists:
            raise  # its files have the same names
        except Exception:
            parts.pieces.remove(pieces)
            raise
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
        (record,) = self._own_records(version)
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
        """Give the staged files their names, durably."""
        writer, files = self._parts.writer, self._parts.files
        for target, staged in self._staged.items():
            writer.make_folder(target.parent)
            if not (target.is_relative_to(self._parts.blocks.path) and is_there(target)):  # a worker has saved it
                writer.place(staged, target)
        for folder in sorted({target.parent for target in self._staged}):
            files.sync_folder(folder)

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
