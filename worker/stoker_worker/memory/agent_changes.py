"""What the changes of an agent have in common that are no turns: who asks, which errors, which rows. Finisher threads,
and commands of the shell.

A change (`fork.py`, `rollback.py`, `forget.py`) is one transaction, which also remembers the delivery if a job asked:
after a crash it has happened or it has not. With a shared store, it has happened once its version is there. Files that
it makes are durable before it, and files that go are removed after it. `InFlight` keeps other processes off the agent
meanwhile.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from pydantic import TypeAdapter, ValidationError

from stoker_shared.agents import AgentResult
from stoker_shared.errors import (
    AgentExists,
    AgentMemoryError,
    AgentNotFound,
    AgentTranscriptUnreadable,
    AgentVersionConflict,
)
from stoker_shared.request import AgentId
from stoker_worker.memory import agent_table, cache_index, deliveries
from stoker_worker.memory.agent_row import AgentRow
from stoker_worker.memory.agent_table import AgentState
from stoker_worker.memory.blocks import BlockChain
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.connection import Connection
from stoker_worker.memory.next_version import NextVersion
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.memory.turn_record import TurnRecord
from stoker_worker.ports import Delivery

_AGENT_ID: Final[TypeAdapter[str]] = TypeAdapter(AgentId)


@dataclass(frozen=True)
class Asked:
    """Who asks for a change, and on what condition.

    Attributes:
        delivery: ``None``: a command of the shell asks.
        expect_version: the agent must be at this version.
        keep_versions: how many of its versions stay; ``None``: all, until its next turn.
    """

    delivery: Delivery | None = None
    expect_version: int | None = None
    keep_versions: int | None = None

    @property
    def job_id(self) -> str:
        return self.delivery.job_id if self.delivery else ""

    def check(self, agent_id: str, version: int) -> None:
        """Raises `AgentVersionConflict` unless the agent may be changed from this version."""
        if self.expect_version not in (None, version):
            raise AgentVersionConflict(f"agent {agent_id!r} is at version {version}, not {self.expect_version}")

    def key(self, agent_id: str) -> bytes | None:
        """The delivery's key; ``None`` for a command. `agent_id`: the changed agent."""
        return deliveries.delivery_key(agent_id, self.delivery) if self.delivery else None

    def remember(self, connection: Connection, agent: int, agent_id: str, result: AgentResult, *, version: int) -> None:
        """`agent`: number of the changed agent, or `FORGETTER`."""
        if (key := self.key(agent_id)) is not None:
            until = time.time() + deliveries.UNTIL_ENDED_S
            deliveries.remember(connection, agent, key, result.model_dump(mode="json"), until, version=version)


BY_COMMAND: Final = Asked()


@contextmanager
def naming(agent_id: str) -> Iterator[None]:
    """Damage as the error that names the agent."""
    try:
        yield
    except Damaged as damage:
        raise AgentTranscriptUnreadable(f"the transcript of agent {agent_id!r}: {damage}") from damage


def exists(parts: StoreParts, agent_id: str) -> bool:
    """Whether there is such an agent, whole or damaged. Raises `AgentTranscriptUnreadable`, `OSError`."""
    with naming(agent_id), parts.database.snapshot() as connection:
        return agent_table.find_agent(connection, agent_id) is not None


def readable(connection: Connection, agent_id: str) -> AgentState:
    """The state of an agent whose transcript is whole.

    Raises:
        AgentNotFound: there is no such agent.
        AgentTranscriptUnreadable: its transcript is damaged, or lacks the last turn.
        Damaged: even whether there is such an agent is unknown.
    """
    state = agent_table.read_agent(connection, agent_id)
    if state.problem is not None:
        raise AgentTranscriptUnreadable(f"the transcript of agent {agent_id!r}: {state.problem}")
    if state.version.transcript is None:
        raise AgentNotFound(f"there is no agent {agent_id!r}")
    return state


def check_vacant(connection: Connection, agent_id: str) -> None:
    """Whether an agent of this id can be made.

    Raises:
        AgentExists: it exists.
        AgentMemoryError: no agent can have this id.
        Damaged: that cannot be known.
    """
    try:
        _AGENT_ID.validate_python(agent_id)
    except ValidationError as error:
        raise AgentMemoryError(f"{agent_id!r} cannot be an agent's id: {error.errors()[0]['msg']}") from None
    if agent_table.find_agent(connection, agent_id) is not None:
        raise AgentExists(f"there is an agent {agent_id!r} already")


def version_of(connection: Connection, record: TurnRecord, result: AgentResult | None = None) -> NextVersion:
    """The record as the agent's next version, with the answer to the job that asked for it."""
    cache = record.about.cache
    layout = None if cache is None else cache_index.read_model(connection, cache.model)
    answer = None if result is None or record.delivery is None else result.model_dump_json()
    return NextVersion(record.agent_id, record.version, record, record.delivery, answer, layout)


def write_with_cache(
    connection: Connection,
    row: AgentRow | None,
    record: TurnRecord,
    chain: BlockChain | None,
    *,
    piece_bytes: int = 0,
    keep_versions: int | None = None,
) -> int:
    """Make `record` the agent's newest version, within a transaction; returns the agent's number.

    Args:
        row: ``None`` for a new agent.
        chain: of the tokens that are cached.
        piece_bytes: allocated bytes of the tail and the snapshots.
        keep_versions: as in `Asked`.
    """
    row = agent_table.write_version(connection, row, record, keep_versions=keep_versions or record.version)
    cache_index.use_chain(connection, row.number, chain, now=record.about.saved_at)
    cache_index.set_piece_bytes(connection, row.number, piece_bytes)
    return row.number
