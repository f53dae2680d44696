"""An agent's row in the table `agents`, and its proof. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from stoker_worker.memory.checksum import Damaged, agent_checksum, key_of

COLUMNS: Final = "number, agent_id, key, version, head, unsaved, checksum, last_block, piece_bytes, evicted"
"""In the order of `row_of`."""


@dataclass(frozen=True)
class AgentRow:
    """An agent's row in `agents`.

    Attributes:
        number: of its rows in the other tables.
        head: checksum of its newest version's row; empty at version 0.
        unsaved: whether its last turn that finished is not in its transcript.
        last_block: address of the last block of its cache that is on disk.
        piece_bytes: allocated bytes of its tail and snapshots.
        evicted: whether cache of its newest version was evicted.
        problem: why the row cannot be trusted. `version` is then one that no version of the agent is above.
    """

    number: int
    agent_id: str
    version: int
    head: bytes
    unsaved: bool
    last_block: bytes | None
    piece_bytes: int
    evicted: bool
    problem: str | None = None


def row_of(columns: Sequence[Any]) -> AgentRow:
    """Raises `Damaged` unless the columns are as they were written."""
    number, agent_id, key, version, head, unsaved, checksum, last_block, piece_bytes, evicted = columns
    if not isinstance(agent_id, str) or key != key_of(agent_id):
        raise Damaged("its row is not the agent's")
    if checksum != agent_checksum(number, agent_id, version, head, unsaved):
        raise Damaged("the checksum of its row does not match")
    # No checksum covers the rest: it only decides what is evicted, and no damage there may stop all of it.
    last_block = last_block if isinstance(last_block, bytes) else None
    piece_bytes = piece_bytes if isinstance(piece_bytes, int) else 0
    return AgentRow(number, agent_id, version, head, bool(unsaved), last_block, piece_bytes, bool(evicted))
