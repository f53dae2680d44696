"""Imports an agent from a file into the store (see `archive`). The store must be locked.

The agent is put together in the temp folder and verified with the code that reads agents; then one rename makes it
visible. A refused file leaves nothing. No check can tell whether the model computed the numbers in a block, and agents
share blocks: they are imported only on request, and never replace a block.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from stoker_shared.errors import AgentMemoryError
from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.agent_folder import AgentFolder
from stoker_worker.memory.agent_index import newest_blocks
from stoker_worker.memory.archive import PIECE_NAMES, list_members
from stoker_worker.memory.block_folder import BlockFolder
from stoker_worker.memory.checksummed_file import Damaged, unseal
from stoker_worker.memory.files import Chunk
from stoker_worker.memory.record import AgentState, Head, TurnRecord, are_snapshots, record_checksum
from stoker_worker.memory.verify import verify_blocks, verify_pieces


@dataclass(frozen=True)
class Imported:
    """The new agent; how many blocks were imported, and how many left out because they were not requested. Blocks that
    were in the store before count as neither."""

    agent_id: str
    version: int
    blocks: int
    blocks_left_out: int


def import_agent(store: StoreAccess, source: Path, *, new_id: str | None = None, with_blocks: bool = False) -> Imported:
    """Import the agent in the file, under its own id or `new_id`.

    Raises:
        AgentMemoryError: the file is refused, or there is such an agent already.
        OSError: it could not be read or written; there is no such agent.
    """
    try:
        with open(source, "rb") as archive:
            return _Import(store, archive, with_blocks).run(new_id)
    except (Damaged, ValueError, TypeError, KeyError, OverflowError, RecursionError) as why:
        raise AgentMemoryError(f"{source} is refused: {why}") from why
    finally:
        store.writer.clear()


class _Import:
    """The import of one file; `run` is called once."""

    def __init__(self, store: StoreAccess, archive: IO[bytes], with_blocks: bool) -> None:
        self._store = store
        self._archive = archive
        self._members = list_members(archive)
        self._blocks = [member for member in self._members.values() if member.is_block]
        self._with_blocks = with_blocks
        root = store.temp / "import"
        self._agents = root / "agents"
        self._staged_blocks = BlockFolder(root / "blocks", files=store.files, writer=store.writer)

    def run(self, new_id: str | None) -> Imported:
        head, agent_id, records = self._read()
        if new_id is not None and new_id != agent_id:
            agent_id = new_id
            head, records = _renamed(head, records, new_id)
        self._store.vacant(agent_id)
        folder = AgentFolder(self._agents, agent_id)
        self._write(folder.head, [head.encode()])
        for number, record in records.items():
            self._write(folder.record_path(number), [record])
        state = folder.read()
        if state.problem is not None:
            raise Damaged(state.problem)
        _check_cache(state)
        for name, path in zip(PIECE_NAMES, folder.piece_paths(head.version), strict=True):
            if name in self._members:
                self._write(path, self._members[name].chunks(self._archive))
        for path, problem in verify_pieces(folder, state):
            raise Damaged(f"its {path.name.partition('-')[0]} {problem}")
        blocks = self._stage_blocks(state) if self._with_blocks else []
        self._reveal(folder, blocks)
        return Imported(agent_id, head.version, len(blocks), 0 if self._with_blocks else len(self._blocks))

    def _read(self) -> tuple[Head, str, dict[int, bytes]]:
        """HEAD, the agent's id, and every record's bytes."""
        numbered = {member.version: member for member in self._members.values() if member.version is not None}
        if "HEAD" not in self._members:
            raise Damaged("HEAD is not in it")
        head = Head.decode(self._members["HEAD"].read(self._archive))
        if type(head.version) is not int or head.version not in numbered or max(numbered) > head.version:
            raise Damaged("its records do not match its HEAD")
        records = {number: numbered[number].read(self._archive) for number in sorted(numbered)}
        newest = _decoded(records[head.version])
        for number, data in records.items():
            record = TurnRecord.decode(data, agent_id=newest.agent_id, version=number)
            if not all(0 <= token < 2**32 for token in record.new_tokens):
                raise Damaged(f"record {number} has invalid token ids")
        return head, newest.agent_id, records

    def _stage_blocks(self, state: AgentState) -> list[Path]:
        """Write the blocks that the agent uses and the store lacks into the temp folder, and verify them."""
        wanted = newest_blocks(state, self._staged_blocks.path_of)
        taken = []
        for member in self._blocks:
            path = self._staged_blocks.path.parent / member.name
            if path not in wanted:
                raise Damaged(f"{member.name!r} in it is not a block of the agent")
            if not self._in_store(path).exists():
                self._write(path, member.chunks(self._archive))
                taken.append(path)
        for problem in verify_blocks(self._staged_blocks.path):
            raise Damaged(problem)
        return taken

    def _reveal(self, folder: AgentFolder, blocks: list[Path]) -> None:
        """Blocks first, durable before the agent that uses them; then the agent, by one rename."""
        store, files = self._store, self._store.files
        targets = [self._in_store(path) for path in blocks]
        for path, target in zip(blocks, targets, strict=True):
            store.writer.make_folder(target.parent)
            files.rename(path, target)
        for parent in sorted({target.parent for target in targets}):
            files.sync_folder(parent)
        final = store.agent(folder.agent_id).path
        if final.exists():  # a first turn that was never committed
            store.discard(final)
        store.writer.make_folder(final.parent)
        files.flush(folder.path)
        files.rename(folder.path, final)
        files.flush(final.parent)

    def _in_store(self, staged: Path) -> Path:
        return self._store.blocks.path / staged.relative_to(self._staged_blocks.path)

    def _write(self, path: Path, chunks: Iterable[Chunk]) -> None:
        self._store.writer.make_folder(path.parent)
        self._store.files.write(path, chunks)


def _decoded(data: bytes) -> TurnRecord:
    """A record of any agent. Raises `Damaged`."""
    try:
        return TurnRecord.model_validate_json(unseal("stoker-record", data))
    except ValidationError:
        raise Damaged("a record's content is not a record") from None


def _renamed(head: Head, records: dict[int, bytes], agent_id: str) -> tuple[Head, dict[int, bytes]]:
    """The same history for another agent id. Each record has the checksum of the one before it, so all change."""
    renamed: dict[int, bytes] = {}
    checksums: dict[str, str] = {}
    for number, data in records.items():
        record = _decoded(data)
        parent = record.parent if record.parent is None else checksums.get(record.parent, record.parent)
        renamed[number] = record.model_copy(update={"agent_id": agent_id, "parent": parent}).encode()
        checksums[record_checksum(data)] = record_checksum(renamed[number])
    return Head(head.version, checksums.get(head.record, head.record)), renamed


def _check_cache(state: AgentState) -> None:
    """Raises `Damaged` unless the newest record's cache fits its transcript."""
    cache, transcript = state.cache, state.version.transcript
    if cache is None or transcript is None:
        return
    chain = cache.chain(transcript.token_ids)
    if not chain.has_fingerprint:
        raise Damaged("its model's fingerprint is invalid")
    if not 0 <= cache.tokens <= len(transcript.token_ids):
        raise Damaged("its cache is longer than its transcript")
    if not are_snapshots(cache.snapshots, cache.tokens):
        raise Damaged("its snapshots are at impossible places")
    if chain.last != cache.last_block:
        raise Damaged("its cache is not that of its tokens")
