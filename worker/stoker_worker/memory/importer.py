"""Takes an agent out of a file into the store (see `archive`). The store must be held.

Everything is put together in the store's temp folder and verified there, with the code that reads agents; then one
rename makes the agent visible. A file that is refused leaves nothing. What no check can tell is whether the numbers in
a block are the model's own, and blocks are shared: they are taken only when asked for, and never replace one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from stoker_shared.errors import AgentMemoryError
from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.agent_folder import AgentFolder
from stoker_worker.memory.agent_state import AgentState
from stoker_worker.memory.archive import PIECE_NAMES, list_members
from stoker_worker.memory.block_folder import BlockFolder
from stoker_worker.memory.block_paths import is_fingerprint
from stoker_worker.memory.blocks import chain, chain_root
from stoker_worker.memory.census import newest_blocks
from stoker_worker.memory.files import Chunk
from stoker_worker.memory.head import Head
from stoker_worker.memory.record import TurnRecord, are_snapshots, record_checksum
from stoker_worker.memory.sealed import Damaged, unseal
from stoker_worker.memory.verify import verify_blocks, verify_pieces


@dataclass(frozen=True)
class Imported:
    """Which agent is there now; how many blocks were taken from the file, and how many left out because nobody asked
    for them. Those that were there already are neither."""

    agent_id: str
    version: int
    blocks: int
    blocks_left_out: int


def import_agent(store: StoreAccess, source: Path, *, new_id: str | None = None, with_blocks: bool = False) -> Imported:
    """Make the agent in the file one of this store, by its own id or by `new_id`.

    Raises:
        AgentMemoryError: the file is refused, or there is such an agent already.
        OSError: it could not be read, or not be written; there is no such agent.
    """
    try:
        with open(source, "rb") as archive:
            return _Import(store, archive, with_blocks).run(new_id)
    except (Damaged, ValueError, TypeError, KeyError, OverflowError, RecursionError) as why:
        raise AgentMemoryError(f"{source} is refused: {why}") from why
    finally:
        store.writer.clear()


class _Import:
    """One file on its way in; `run` is called once."""

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
        folder = AgentFolder(self._agents, agent_id, files=self._store.files, writer=self._store.writer)
        self._write(folder.path / "HEAD", [head.encode()])
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
        """HEAD, whose it is, and every record as it is."""
        numbered = {member.version: member for member in self._members.values() if member.version is not None}
        if "HEAD" not in self._members:
            raise Damaged("HEAD is not in it")
        head = Head.decode(self._members["HEAD"].read(self._archive))
        if type(head.version) is not int or head.version not in numbered or max(numbered) > head.version:
            raise Damaged("its records are not those that HEAD speaks of")
        records = {number: numbered[number].read(self._archive) for number in sorted(numbered)}
        newest = _decoded(records[head.version])
        for number, data in records.items():
            record = TurnRecord.decode(data, agent_id=newest.agent_id, version=number)
            if not all(0 <= token < 2**32 for token in record.new_tokens):
                raise Damaged(f"record {number} has token ids that are none")
        return head, newest.agent_id, records

    def _stage_blocks(self, state: AgentState) -> list[Path]:
        """Put the blocks that this agent uses and the store lacks into the temp folder, and verify them."""
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
        """Blocks first, durable before the agent that speaks of them; the agent by one rename."""
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
    """A record, whosever it is. Raises `Damaged`."""
    try:
        return TurnRecord.model_validate_json(unseal("stoker-record", data))
    except ValidationError:
        raise Damaged("a record's content is not a record") from None


def _renamed(head: Head, records: dict[int, bytes], agent_id: str) -> tuple[Head, dict[int, bytes]]:
    """The same history for another agent: each record names the checksum of the one before it, so all change."""
    renamed: dict[int, bytes] = {}
    checksums: dict[str, str] = {}
    for number, data in records.items():
        record = _decoded(data)
        parent = record.parent if record.parent is None else checksums.get(record.parent, record.parent)
        renamed[number] = record.model_copy(update={"agent_id": agent_id, "parent": parent}).encode()
        checksums[record_checksum(data)] = record_checksum(renamed[number])
    return Head(head.version, checksums.get(head.record, head.record)), renamed


def _check_cache(state: AgentState) -> None:
    """Raises `Damaged` unless what the newest record says of its cache can be true."""
    cache, transcript = state.cache, state.version.transcript
    if cache is None or transcript is None:
        return
    if not is_fingerprint(cache.model):
        raise Damaged("its model's fingerprint is none")
    if not 0 <= cache.tokens <= len(transcript.token_ids):
        raise Damaged("it speaks of more cache than it has tokens")
    if not are_snapshots(cache.snapshots, cache.tokens):
        raise Damaged("its snapshots stand where none can be")
    if chain(chain_root(cache.model, cache.salt), transcript.token_ids[: cache.tokens])[-1] != cache.last_block:
        raise Damaged("its cache is not that of its tokens")
