"""Removes agents: their conversations, answers, and the blocks that only they used. Finisher threads, the upkeep's, and
commands of the shell.

One transaction removes the rows; the files go after it. A crash in between leaves files that no row names (see
`upkeep.py`), and never half an agent.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple

from stoker_shared.agents import AgentForgotten
from stoker_shared.errors import StokerError
from stoker_worker.memory import agent_table, cache_index, deliveries
from stoker_worker.memory.agent_changes import BY_COMMAND, Asked, naming
from stoker_worker.memory.agent_row import AgentRow
from stoker_worker.memory.cache_index import Block
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.connection import Connection
from stoker_worker.memory.next_version import NextVersion
from stoker_worker.memory.store_parts import StoreParts

_log = logging.getLogger(__name__)


def forget_agent(
    parts: StoreParts,
    agent_id: str,
    asked: Asked = BY_COMMAND,
    *,
    is_held: Callable[[str], bool] = lambda address: False,
    only_here: bool = False,
) -> AgentForgotten:
    """Remove the agent, whole or damaged, and the blocks that only it used, those of its older versions too. With a
    shared store its next version there is an empty one.

    Args:
        is_held: whether work of another agent counts on the block of this address.
        only_here: other machines may keep it.

    Raises:
        AgentTranscriptUnreadable: whether there is such an agent cannot be known.
        AgentVersionConflict: see `Asked`.
        VersionTaken, SharedStoreAway: as `StoreParts.commit_next`.
        OSError: it could not be removed; or it is removed, but some of its cache files are not.
    """
    change = partial(_remove, agent_id=agent_id, asked=asked, is_held=is_held)
    with naming(agent_id):
        if only_here or not parts.replica.is_shared:
            removed: _Removed | None = parts.database.commit(change)
            version = None
        else:
            version = _empty_version(parts, agent_id, asked)
            removed = parts.commit_next(lambda: version, change)
    if removed is None:  # here it is removed later
        assert version is not None
        assert version.result is not None
        return AgentForgotten.model_validate_json(version.result)
    _remove_files(parts, removed, is_held)
    return removed.answer


def _empty_version(parts: StoreParts, agent_id: str, asked: Asked) -> NextVersion:
    """Raises `Damaged`, `AgentVersionConflict`."""
    with parts.database.snapshot() as connection:
        row = agent_table.find_agent(connection, agent_id)
    asked.check(agent_id, row.version if row else 0)
    newest = row.version if row and row.version else parts.replica.forgotten(agent_id).number
    # Without the blocks that go: those are this machine's.
    answer = AgentForgotten(
        job_id=asked.job_id, agent_id=agent_id, existed=row is not None, version=row.version if row else 0
    )
    return NextVersion(agent_id, newest + 1, None, asked.key(agent_id), answer.model_dump_json())


def forget_unused(parts: StoreParts, agents: Sequence[str], *, is_held: Callable[..., bool]) -> list[str]:
    """Remove these agents here; returns those that are removed. One that cannot be keeps no other from it, and is
    logged.

    Args:
        is_held: `Holds.is_held`.
    """
    gone = []
    held_by_others = [partial(is_held, but_by=agent_id) for agent_id in agents]
    changes = parts.database.commit_each([
        partial(_remove, agent_id=agent_id, asked=BY_COMMAND, is_held=held)
        for agent_id, held in zip(agents, held_by_others, strict=True)
    ])  # fmt: skip
    for agent_id, held, change in zip(agents, held_by_others, changes, strict=True):
        try:
            removed = change.outcome()
            gone.append(agent_id)
            _remove_files(parts, removed, held)
        except (OSError, Damaged, StokerError) as error:
            _log.warning("agent %r is unused, and could not be removed: %s", agent_id, error)
    return gone


class _Removed(NamedTuple):
    """`blocks`: nothing refers to them any more, and their files are still there."""

    answer: AgentForgotten
    blocks: list[Block]


def _remove(connection: Connection, *, agent_id: str, asked: Asked, is_held: Callable[[str], bool]) -> _Removed:
    """Remove an agent's rows, and those of the blocks that only it used."""
    row = agent_table.find_agent(connection, agent_id)
    forgotten = AgentForgotten(job_id=asked.job_id, agent_id=agent_id, existed=row is not None)
    going: list[Block] = []
    asked.check(agent_id, row.version if row else 0)
    if row is not None:
        ends = _ends_of_chains(connection, row)
        cache_index.set_piece_bytes(connection, row.number, 0)
        agent_table.delete_agent(connection, row)
        going, shared = _take_blocks(connection, ends, is_held)
        counts = {"blocks": len(going), "block_bytes": sum(x.n_bytes for x in going), "shared_blocks": shared}
        forgotten = forgotten.model_copy(update={"version": row.version, **counts})
    asked.remember(connection, deliveries.FORGETTER, agent_id, forgotten, version=0)
    return _Removed(forgotten, going)


def _remove_files(parts: StoreParts, removed: _Removed, is_held: Callable[[str], bool]) -> None:
    """Raises `OSError`: some are left."""
    pieces = parts.pieces.paths(removed.answer.agent_id, removed.answer.version)
    blocks = (parts.blocks.path_of(one.model, one.address) for one in removed.blocks if not is_held(one.address))
    with ExitStack() as removals:  # each is tried, also after one that fails
        for path in (*pieces, *blocks):
            removals.callback(parts.files.remove, path)


def _ends_of_chains(connection: Connection, row: AgentRow) -> list[bytes]:
    """The last blocks of the agent's cache and of its older versions'."""
    found = connection.execute("SELECT last_block FROM agents WHERE number = ?", (row.number,)).fetchone()
    ends = [found[0]]
    for (about,) in connection.execute("SELECT about FROM turns WHERE agent = ?", (row.number,)).fetchall():
        with suppress(ValueError, TypeError, KeyError):  # nothing cached, or damaged
            ends.append(bytes.fromhex(json.loads(about)["cache"]["last_block"]))
    return [end for end in dict.fromkeys(ends) if isinstance(end, bytes)]


def _take_blocks(
    connection: Connection, ends: Sequence[bytes], is_held: Callable[[str], bool]
) -> tuple[list[Block], int]:
    """Remove the rows of the blocks before these ends that nothing refers to; returns them, and how many others there
    are."""
    going, shared, now = [], set[str](), time.time()
    for end in ends:
        for block in cache_index.chain_back(connection, end):
            if block.n_users or is_held(block.address):
                shared.add(block.address)
                cache_index.note_unused(connection, block.address, now=now)
            else:
                cache_index.remove_block(connection, block.address, now=now)
                going.append(block)
    return going, len(shared)
