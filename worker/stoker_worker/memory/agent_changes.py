"""Forks, rolls back and forgets agents. Finisher and upkeep threads, and the shell's commands.

A change is one transaction, which also remembers the delivery if a job asked: after a crash it has happened or it has
not. With a shared store, it has happened once its version is there. New files are written before the transaction, and
old ones are removed after it: a crash in between leaves files that no row names, and never half an agent. `InFlight`
keeps other processes off the agent meanwhile.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from pydantic import TypeAdapter, ValidationError

from stoker_shared.agents import AgentForgotten, AgentForked, AgentResult, AgentRolledBack
from stoker_shared.errors import (
    AgentExists,
    AgentMemoryError,
    AgentNotFound,
    AgentTranscriptUnreadable,
    AgentVersionConflict,
    StokerError,
)
from stoker_shared.request import AgentId
from stoker_worker.memory import cache_index, transcripts
from stoker_worker.memory.blocks import BlockChain, read_place
from stoker_worker.memory.cache_index import Block
from stoker_worker.memory.database import Connection, Damaged
from stoker_worker.memory.store_parts import NextVersion, StoreParts
from stoker_worker.memory.transcripts import AgentRow, AgentState, MadeBy, TurnRecord
from stoker_worker.memory.turn_saver import cached_prefix, chain_of, make_record
from stoker_worker.ports import AgentVersion, Delivery
from stoker_worker.ports.cache_spec import BLOCK_TOKENS

_log = logging.getLogger(__name__)

_AGENT_ID: Final[TypeAdapter[str]] = TypeAdapter(AgentId)
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Asked:
    """The delivery that asks for a change (``None``: a command of the shell), and its condition: the agent must be at
    `expect_version`. `keep_versions`: how many of its versions stay; ``None``: all, until its next turn."""

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
        return transcripts.delivery_key(agent_id, self.delivery) if self.delivery else None

    def remember(self, connection: Connection, agent: int, agent_id: str, result: AgentResult, *, version: int) -> None:
        """Keep `result` for the delivery, if there is one. `agent`: number of the changed agent, or `FORGETTER`."""
        if (key := self.key(agent_id)) is not None:
            until = time.time() + transcripts.UNTIL_ENDED_S
            transcripts.remember_answer(connection, agent, key, result.model_dump_json(), until, version=version)


BY_COMMAND: Final = Asked()


@contextmanager
def naming(agent_id: str) -> Iterator[None]:
    """Turns damage into the error that names the agent."""
    try:
        yield
    except Damaged as damage:
        raise AgentTranscriptUnreadable(f"the transcript of agent {agent_id!r}: {damage}") from damage


def look(parts: StoreParts, agent_id: str) -> None:
    """Bring in other workers' versions of the agent. Raises `SharedStoreAway`, `AgentTranscriptUnreadable`."""
    with naming(agent_id):
        parts.replica.look(agent_id)


def exists(parts: StoreParts, agent_id: str) -> bool:
    """True if the agent exists, whole or damaged. Raises `AgentTranscriptUnreadable`, `OSError`."""
    with naming(agent_id), parts.database.snapshot() as connection:
        return transcripts.find_agent(connection, agent_id) is not None


def readable(parts: StoreParts, connection: Connection, agent_id: str) -> AgentState:
    """The state of an agent whose transcript is whole. Raises `AgentNotFound`; `AgentTranscriptUnreadable`: it is
    damaged, or lacks the last turn; `Damaged`: it is unknown whether there is such an agent."""
    state = transcripts.read_agent(connection, agent_id)
    problem = "its last turn was not saved" if agent_id in parts.unsaved else state.problem
    if problem is not None:
        raise AgentTranscriptUnreadable(f"the transcript of agent {agent_id!r}: {problem}")
    if state.version.transcript is None:
        raise AgentNotFound(f"there is no agent {agent_id!r}")
    return state


def check_vacant(connection: Connection, agent_id: str) -> None:
    """Raises `AgentExists`; `AgentMemoryError`: no agent can have this id; `Damaged`: its existence is unknown."""
    try:
        _AGENT_ID.validate_python(agent_id)
    except ValidationError as error:
        raise AgentMemoryError(f"{agent_id!r} cannot be an agent's id: {error.errors()[0]['msg']}") from None
    if transcripts.find_agent(connection, agent_id) is not None:
        raise AgentExists(f"there is an agent {agent_id!r} already")


def version_of(connection: Connection, record: TurnRecord, result: AgentResult | None = None) -> NextVersion:
    """The agent's next version from a record, with the answer to the job that asked for it."""
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
    """Make `record` the agent's newest version, within a transaction; returns the agent's number. `row`: ``None`` for a
    new agent. `chain`: of the cached tokens. `piece_bytes`: of tail and snapshots. `keep_versions`: as in `Asked`."""
    keep_versions = keep_versions or record.version
    row = transcripts.write_version(connection, row, record, keep_versions=keep_versions, piece_bytes=piece_bytes)
    cache_index.use_chain(connection, row.number, chain, now=record.about.saved_at)
    return row.number


def fork_agent(parts: StoreParts, source: str, target: str, asked: Asked = BY_COMMAND) -> AgentForked:
    """Make agent `target` with the transcript and the cache of `source`'s newest version. Of the recorded deliveries,
    `target` gets only the fork's: the others are about `source`.

    Raises:
        AgentNotFound: there is no `source`.
        AgentExists, AgentMemoryError: there is a `target`, or no agent can have that id.
        AgentTranscriptUnreadable: the transcript of `source` is damaged or lacks its last turn.
        AgentVersionConflict: see `Asked`.
        VersionTaken, SharedStoreAway: as `StoreParts.commit_next`.
        OSError: it could not be written; there is no `target`.
    """
    with ExitStack() as files:
        base = AgentVersion(target, parts.replica.forgotten(target).number, None)
        version, pieces = _open_version(parts, source, base, asked, files)
        cache, transcript = version.cache, version.transcript
        assert transcript is not None  # it is readable
        record = make_record(base, transcript, cache, made_by="fork", delivery=asked.delivery)
        chain = chain_of(cache, transcript.token_ids) if cache else None
        forked = AgentForked(
            job_id=asked.job_id,
            agent_id=source,
            target=target,
            version=record.version,
            from_version=version.number,
            tokens=len(transcript.token_ids),
        )
        chunks = {path: iter(partial(file.read, _READ_BYTES), b"") for path, file in pieces.items()}
        piece_bytes = parts.pieces.write(chunks)
    with parts.database.snapshot() as connection:
        next_version = version_of(connection, record, forked)

    def change(connection: Connection) -> None:
        check_vacant(connection, target)
        number = write_with_cache(connection, None, record, chain, piece_bytes=piece_bytes)
        asked.remember(connection, number, target, forked, version=forked.version)

    try:
        with naming(target):
            parts.commit_next(next_version, change)
    except AgentExists:
        raise  # the other agent's files have the same names
    except Exception:
        parts.pieces.remove(pieces)
        raise
    parts.pieces.keep_only(pieces, target, forked.version)
    return forked


def _open_version(
    parts: StoreParts, source: str, base: AgentVersion, asked: Asked, files: ExitStack
) -> tuple[AgentVersion, dict[Path, BinaryIO]]:
    """The newest version of `source`, and its open tail and snapshots by the paths that the version after `base` will
    have: open files outlast a turn of `source`."""
    target, number = base.agent_id, base.number + 1
    while True:
        with naming(source), parts.database.snapshot() as connection:
            version = readable(parts, connection, source).version
            asked.check(source, version.number)
            check_vacant(connection, target)
        opened: dict[Path, BinaryIO] = {}
        theirs = parts.pieces.paths(source, version.number)
        for ours, path in zip(parts.pieces.paths(target, number), theirs, strict=True):
            with suppress(FileNotFoundError):
                opened[ours] = files.enter_context(path.open("rb"))
        with naming(source), parts.database.snapshot() as connection:
            row = transcripts.find_agent(connection, source)
        if row is not None and row.head == version.head:  # no turn has removed a file before it was open
            return version, opened


def roll_back(
    parts: StoreParts, agent_id: str, version: int | None = None, asked: Asked = BY_COMMAND
) -> AgentRolledBack:
    """Make the transcript of `version`, by default the one before the newest, the agent's next version: numbers only
    grow. The newest may be unreadable, or lack its last turn. Of the cache only the full blocks are left.

    Raises:
        AgentNotFound: there is no such agent, or it has no such version (any more).
        AgentTranscriptUnreadable: the transcript of that version is damaged.
        AgentVersionConflict: see `Asked`.
        VersionTaken, SharedStoreAway: as `StoreParts.commit_next`.
        OSError: it could not be written; the agent is as it was.
    """
    with naming(agent_id):
        return _go_back(parts, agent_id, version, asked, "rollback")


def close_number(parts: StoreParts, agent_id: str) -> None:
    """Make the agent's newest version its next one too: a version of that number on its way to the shared store comes
    too late. An unreadable agent stays as it is. Raises `VersionTaken`, `SharedStoreAway`, `OSError`, `Damaged`."""
    with parts.database.snapshot() as connection:
        row = transcripts.find_agent(connection, agent_id)
    if row is not None and row.version:
        with suppress(AgentTranscriptUnreadable):
            _go_back(parts, agent_id, None, BY_COMMAND, "closed")
    else:
        parts.replica.publish(NextVersion(agent_id, parts.replica.forgotten(agent_id).number + 1))


def _go_back(parts: StoreParts, agent_id: str, version: int | None, asked: Asked, made_by: MadeBy) -> AgentRolledBack:
    """Raises as `roll_back`, and `Damaged`."""
    with parts.database.snapshot() as connection:
        state = transcripts.read_agent(connection, agent_id)
        row, base = state.row, state.version
        asked.check(agent_id, base.number)
        if row is None or not base.number:
            raise AgentNotFound(f"there is no agent {agent_id!r}")
        to = base.number if made_by == "closed" else _goal(connection, row, version)
        try:
            transcript, cache = transcripts.read_version(connection, row, to)
        except Damaged as damage:
            raise AgentTranscriptUnreadable(f"version {to} of agent {agent_id!r}: {damage}") from None
        chain = None
        if cache is not None:
            chain = chain_of(cache, transcript.token_ids)
            chain = chain.up_to(chain.n_blocks * BLOCK_TOKENS)
        back = AgentRolledBack(
            job_id=asked.job_id,
            agent_id=agent_id,
            version=base.number + 1,
            to_version=to,
            from_version=base.number,
            tokens=len(transcript.token_ids),
        )
        left = cached_prefix(chain) if chain else None
        record = make_record(base, transcript, left, made_by=made_by, delivery=asked.delivery)
        next_version = version_of(connection, record, back)

    def change(connection: Connection) -> None:
        now = transcripts.find_agent(connection, agent_id)
        if now is None or (now.version, now.head) != (base.number, base.head):
            raise AgentVersionConflict(f"agent {agent_id!r} is not at version {base.number} any more")
        write_with_cache(connection, now, record, chain, keep_versions=asked.keep_versions)
        asked.remember(connection, now.number, agent_id, back, version=back.version)

    parts.commit_next(next_version, change)
    parts.pieces.keep_only((), agent_id, back.version)
    return back


def _goal(connection: Connection, row: AgentRow, version: int | None) -> int:
    """The version to return to. Raises `AgentNotFound`: there is no such version."""
    to = row.version - 1 if version is None else version
    if version is None and to == 0:
        raise AgentNotFound(f"agent {row.agent_id!r} has no version before its first one")
    if not 1 <= to <= row.version:
        raise AgentNotFound(f"agent {row.agent_id!r} has no version {to}: it is at version {row.version}")
    oldest = connection.execute("SELECT min(version) FROM turns WHERE agent = ?", (row.number,)).fetchone()[0]
    if oldest is not None and to < oldest:
        raise AgentNotFound(f"agent {row.agent_id!r} has no version {to} any more: {oldest} is the oldest that is kept")
    return to


def forget_agent(
    parts: StoreParts,
    agent_id: str,
    asked: Asked = BY_COMMAND,
    *,
    only_here: bool = False,
    on_removed: Callable[[], object] = lambda: None,
) -> AgentForgotten:
    """Remove the agent, whole or damaged, and the blocks that only it used and no work here holds. With a shared store
    its next version there is an empty one, except with `only_here`: other machines may keep the agent. `on_removed`:
    called once the agent is removed here or in the shared store, before its files are.

    Raises:
        AgentTranscriptUnreadable: it is unknown whether there is such an agent.
        AgentVersionConflict: see `Asked`.
        VersionTaken, SharedStoreAway: as `StoreParts.commit_next`.
        OSError: it could not be removed; or it is removed, but some of its cache files are not.
    """
    change = partial(_remove, parts=parts, agent_id=agent_id, asked=asked)
    with naming(agent_id):
        if only_here or not parts.replica.is_shared:
            removed: _Removed | None = parts.database.commit(change)
            version = None
        else:
            version = _empty_version(parts, agent_id, asked)
            removed = parts.commit_next(version, change)
    on_removed()
    if removed is None:  # the commit here failed: it is removed later
        assert version is not None
        assert version.result is not None
        return AgentForgotten.model_validate_json(version.result)
    _remove_files(parts, removed)
    return removed.answer


def _empty_version(parts: StoreParts, agent_id: str, asked: Asked) -> NextVersion:
    """Raises `Damaged`, `AgentVersionConflict`."""
    with parts.database.snapshot() as connection:
        row = transcripts.find_agent(connection, agent_id)
    asked.check(agent_id, row.version if row else 0)
    newest = row.version if row and row.version else parts.replica.forgotten(agent_id).number
    # Without the counts of blocks, which are this machine's.
    answer = AgentForgotten(
        job_id=asked.job_id, agent_id=agent_id, existed=row is not None, version=row.version if row else 0
    )
    return NextVersion(agent_id, newest + 1, None, asked.key(agent_id), answer.model_dump_json())


def forget_unused(parts: StoreParts, agents: Sequence[str]) -> list[str]:
    """Remove these agents here; returns those that are removed. A failure is logged, and does not stop the others."""
    gone = []
    changes = parts.database.commit_each([
        partial(_remove, parts=parts, agent_id=agent_id, asked=BY_COMMAND) for agent_id in agents
    ])  # fmt: skip
    for agent_id, change in zip(agents, changes, strict=True):
        try:
            removed = change.outcome()
            gone.append(agent_id)
            _remove_files(parts, removed)
        except (OSError, Damaged, StokerError) as error:
            _log.warning("agent %r is unused, and could not be removed: %s", agent_id, error)
    return gone


class _Removed(NamedTuple):
    """`blocks`: nothing refers to them any more, and their files still exist."""

    answer: AgentForgotten
    blocks: list[Block]


def _remove(connection: Connection, *, parts: StoreParts, agent_id: str, asked: Asked) -> _Removed:
    """Remove an agent's rows, and those of the blocks that only it used. Raises `OSError`: a checkpoint is left."""
    row = transcripts.find_agent(connection, agent_id)
    forgotten = AgentForgotten(job_id=asked.job_id, agent_id=agent_id, existed=row is not None)
    going: list[Block] = []
    asked.check(agent_id, row.version if row else 0)
    if row is not None:
        ends = _ends_of_chains(connection, row)
        cache_index.set_piece_bytes(connection, row.number, 0)
        transcripts.delete_agent(connection, row)
        going, shared = _take_blocks(parts, connection, ends)
        _remove_checkpoints(parts, connection, shared)
        counts = {"blocks": len(going), "block_bytes": sum(x.both_bytes for x in going), "shared_blocks": len(shared)}
        forgotten = forgotten.model_copy(update={"version": row.version, **counts})
    asked.remember(connection, transcripts.FORGETTER, agent_id, forgotten, version=0)
    return _Removed(forgotten, going)


def _remove_files(parts: StoreParts, removed: _Removed) -> None:
    """Raises `OSError`: some are left."""
    pieces = parts.pieces.paths(removed.answer.agent_id, removed.answer.version)
    gone = (parts.blocks.both(one.model, one.address) for one in removed.blocks if not parts.holds.is_held(one.address))
    with ExitStack() as removals:  # each is tried, also after one that fails
        for path in (*pieces, *(path for both in gone for path in both)):
            removals.callback(parts.files.remove, path)


def _ends_of_chains(connection: Connection, row: AgentRow) -> list[bytes]:
    """The last blocks of the agent's cache and of its older versions'."""
    found = connection.execute("SELECT last_block FROM agents WHERE number = ?", (row.number,)).fetchone()
    ends = [found[0]]
    for (about,) in connection.execute("SELECT about FROM turns WHERE agent = ?", (row.number,)).fetchall():
        with suppress(ValueError, TypeError, KeyError):  # nothing cached, or damaged
            ends.append(bytes.fromhex(json.loads(about)["cache"]["last_block"]))
    return [end for end in dict.fromkeys(ends) if isinstance(end, bytes)]


def _take_blocks(parts: StoreParts, connection: Connection, ends: Sequence[bytes]) -> tuple[list[Block], list[Block]]:
    """Remove the rows of these chains' blocks that nothing refers to or holds; returns these blocks, and the others."""
    going, shared, now = [], dict[str, Block](), time.time()
    for end in ends:
        for block in cache_index.chain_back(connection, end):
            if block.n_users or parts.holds.is_held(block.address):
                shared[block.address] = block
                cache_index.note_unused(connection, block.address, now=now)
            else:
                cache_index.remove_block(connection, block.address, now=now)
                going.append(block)
                shared.pop(block.address, None)
    return going, list(shared.values())


def _remove_checkpoints(parts: StoreParts, connection: Connection, blocks: Iterable[Block]) -> None:
    """Remove those checkpoints of these blocks whose tokens after the block nobody else is known to have. Before the
    commit, so that a crash leaves none. Raises `OSError`."""
    for block in blocks:
        path = parts.blocks.both(block.model, block.address)[1]
        _, ids = read_place(path) or ("", ())
        if ids and not any(
            place is not None and place[0] == block.address and place[1][: len(ids)] == ids
            for place in map(read_place, _files_behind(parts, connection, block))
        ):
            parts.files.remove(path)
            cache_index.drop_checkpoint(connection, block.address)


def _files_behind(parts: StoreParts, connection: Connection, block: Block) -> Iterator[Path]:
    """Files of the agents and blocks that continue after the block."""
    for agent_id, version in cache_index.agents_at(connection, block.address):
        yield from parts.pieces.paths(agent_id, version)
    for address in cache_index.blocks_after(connection, block.address):
        yield parts.blocks.path_of(block.model, address)
