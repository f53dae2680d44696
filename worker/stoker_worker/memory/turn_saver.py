"""Saves a turn: its cache files first, durable, and then one transaction with its version and its answer. Finisher
threads."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from stoker_shared.errors import AgentVersionConflict
from stoker_worker.memory import agent_table, cache_index, deliveries
from stoker_worker.memory.agent_row import AgentRow
from stoker_worker.memory.block_chain import BlockChain
from stoker_worker.memory.budget import DiskBudget
from stoker_worker.memory.connection import Connection
from stoker_worker.memory.files import allocated_bytes
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.memory.turn_parts import own_pieces, record_of
from stoker_worker.memory.turn_record import TurnRecord
from stoker_worker.ports import AgentVersion, Turn

LOG_BYTES: Final = 1 << 17
"""What a transaction may add to the write-ahead log, beside long texts."""

_ROW_BYTES: Final = 32
"""For each new token and its text, in the log and in the database."""


class TurnSaver:
    def __init__(self, parts: StoreParts, budget: DiskBudget, *, keep_versions: int) -> None:
        self._database = parts.database
        self._blocks = parts.blocks
        self._pieces = parts.pieces
        self._budget = budget
        self._keep_versions = keep_versions
        self._known_models: set[str] = set()

    def save(self, turn: Turn, chain: BlockChain | None) -> int:
        """Make the turn durable. `chain`: of the tokens that are cached.

        Returns:
            how many bytes the store has grown at most.

        Raises:
            AgentVersionConflict: `turn.base` is not the agent's newest version (any more).
            OSError, Damaged: it could not be written; the agent is still at `turn.base`.
        """
        # Asked before the files are written, too: the newest version's have the names of the next one's.
        with self._database.snapshot() as connection:
            check_base(turn.base, agent_table.find_agent(connection, turn.agent_id))
        sizes: dict[int, int] = {}
        pieces = own_pieces(turn, turn.cache, self._pieces, chain) if turn.cache is not None and chain else {}
        if turn.cache is not None and chain is not None:
            sizes = self._blocks.save(chain, turn.cache, turn.model.spec)
        piece_bytes = self._pieces.write(pieces)
        written = _Written(turn, chain, record_of(turn, chain), sizes, piece_bytes)
        try:
            self._database.commit(partial(self._commit, written=written))
        except AgentVersionConflict:
            raise  # the newest version's files may have the same names
        except Exception:
            self._pieces.remove(pieces)
            raise
        self._known_models.add(turn.model.fingerprint)
        if turn.base.cache is not None:
            self._pieces.remove(self._pieces.paths(turn.agent_id, turn.base.number))
        return sum(sizes.values()) + piece_bytes + LOG_BYTES + _ROW_BYTES * len(written.record.new_tokens)

    def _commit(self, connection: Connection, written: "_Written") -> None:
        turn, chain, record = written.turn, written.chain, written.record
        now = record.about.saved_at
        row = agent_table.find_agent(connection, turn.agent_id)
        check_base(turn.base, row)
        row = agent_table.write_version(connection, row, record, keep_versions=self._keep_versions)
        if not turn.model.spec.full_layers:
            chain = None  # it has no blocks
        if chain is not None:
            cache_index.add_blocks(connection, chain, self._all_sizes(connection, chain, written.sizes), now=now)
        if row.last_block is not None or (chain is not None and chain.n_blocks):
            cache_index.use_chain(connection, row.number, chain, now=now)
        cache_index.set_piece_bytes(connection, row.number, written.piece_bytes, known=row.piece_bytes)
        assert record.delivery is not None  # a job made it
        deliveries.remember(connection, row.number, record.delivery, turn.result, record.about.answer_until)
        if turn.model.fingerprint not in self._known_models and turn.model.has_memory:
            cache_index.note_model(connection, turn.model.fingerprint, turn.model.spec.describe())

    def _all_sizes(self, connection: Connection, chain: BlockChain, sizes: Mapping[int, int]) -> dict[int, int]:
        """With the blocks before them that are on disk and not in the index: a crash came before their transaction."""
        first = min(sizes, default=chain.n_blocks)
        path_of = self._blocks.path_of
        missing = range(cache_index.n_known(connection, chain, first), first)
        found = {n: allocated_bytes(path_of(chain.model, chain.addresses[n])) for n in missing}
        return {n: n_bytes for n, n_bytes in found.items() if n_bytes} | dict(sizes)


@dataclass(frozen=True)
class _Written:
    """A turn whose cache files are on disk, and its rows.

    Attributes:
        chain: of the tokens that are cached.
        sizes: allocated bytes of blocks, by their index in `chain`.
        piece_bytes: allocated bytes of the tail and the snapshots.
    """

    turn: Turn
    chain: BlockChain | None
    record: TurnRecord
    sizes: Mapping[int, int]
    piece_bytes: int


def check_base(base: AgentVersion, row: AgentRow | None) -> None:
    """Raises `AgentVersionConflict` unless `base` is the agent's newest version. An agent that was forgotten on another
    machine begins again after its last number."""
    number, head = (
        (row.version, row.head) if row is not None and row.version else (0 if base.head else base.number, b"")
    )
    if (number, head) != (base.number, base.head):
        raise AgentVersionConflict(f"agent {base.agent_id!r} is at version {number}, the turn continues {base.number}")
