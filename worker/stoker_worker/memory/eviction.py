"""Limits a store's bytes on disk: evicts when it is over the limit. Any thread.

Blocks that nothing uses go first; then checkpoints, as long as they take more than their share or cost more for what
they save than the cache of the least recently used agent without work; then the cache of such agents; then that of
waiting agents, the one needed last first. Running agents' cache, held blocks, their checkpoints and transcripts stay.

The bytes of cache files are in the database; only folders and top-level files, such as the database, are measured. A
save or restore first names the blocks that it counts on (`Holds`), and from then on none of them is evicted. Files go
before their rows: a full disk may have no room for a transaction until they are gone.
"""

import itertools
import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from stoker_worker.memory import cache_index, transcripts
from stoker_worker.memory.blocks import block_beside, checkpoint_beside
from stoker_worker.memory.cache_index import HAS_CACHE, Block
from stoker_worker.memory.database import Connection, Damaged, Database, DatabaseFailed
from stoker_worker.memory.files import allocated_bytes, is_there
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.memory.transcripts import AgentRow
from stoker_worker.ports import PlaceOf

T = TypeVar("T")

_log = logging.getLogger(__name__)

_MOST_NOTES: Final = 256
"""In one transaction, so that no turn waits long for it."""

_MOST_KEPT: Final = 4 * _MOST_NOTES

_Note = Callable[[Connection], None]
DEFAULT_SHARE: Final = 0.8
LOW_WATER: Final = 0.9
KEEP_UNUSED_S: Final = 3600.0
"""How long an unused block stays while there is room: a conversation that was replaced may come back."""
CHECKPOINT_SHARE: Final = 0.25
"""The most of a full store that checkpoints take."""
_AT_ONCE: Final = 64


class Notes:
    """Small changes that may be written a little later, in a transaction of their own, so that no turn waits for them.
    If the process dies before, an agent counts as used a little earlier, and an answer is kept longer. `Upkeep` calls
    `write` every second; a thread that adds one note too many calls it too."""

    def __init__(self, parts: StoreParts) -> None:
        self._pieces = parts.pieces
        self._database = parts.database
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # a note that two threads write would count twice
        self._notes: dict[object, _Note] = {}  # a newer note of the same key replaces it

    def __len__(self) -> int:
        return len(self._notes)

    def used(self, agent_id: str) -> None:
        self._keep(("used", agent_id), partial(transcripts.note_use, agent_id=agent_id, used_at=time.time()))

    def saved(self, agent_id: str) -> None:
        """Drop the note of its use: its row has the time of the save."""
        with self._lock:
            self._notes.pop(("used", agent_id), None)

    def read(self, block: str) -> None:
        """A job without an agent used the blocks up to this address."""
        self._keep(("read", block), partial(cache_index.touch_block, address=block, used_at=time.time()))

    def resumed(self, block: str) -> None:
        """A prompt resumed from the checkpoint of the block of this address."""
        touch = partial(cache_index.touch_checkpoint, address=block, used_at=time.time())
        self._keep(("resumed", block, object()), touch)  # each counts

    def ended(self, agent_id: str, delivery: bytes, until: float) -> None:
        """The answer to this delivery (its key) is needed until this Unix time."""
        self._keep(delivery, partial(transcripts.keep_answer, agent_id=agent_id, key=delivery, until=until))

    def block_changed(self, path: Path) -> None:
        """The file of a block or of its checkpoint is gone, or has another size than its row."""
        block = block_beside(path)
        self._keep(block, partial(_measure_block, path=block))

    def pieces_changed(self, agent_id: str) -> None:
        """The agent's tail and snapshots have another size than its row."""
        self._keep(("pieces", agent_id), partial(self._measure_pieces, agent_id=agent_id))

    def write(self) -> None:
        """Write all of them. Never raises: failed writes are retried on the next call."""
        with self._writing:
            while self._notes:
                with self._lock:
                    some = dict(itertools.islice(self._notes.items(), _MOST_NOTES))
                try:
                    errors = _write_each(self._database, some.values())
                except DatabaseFailed:  # logged as an outage of the store
                    return
                except OSError as error:
                    _log.warning("uses of agents and ends of jobs are noted later: %s", error)
                    return
                with self._lock:
                    for (key, note), refusal in zip(some.items(), errors, strict=True):
                        if isinstance(refusal, OSError):
                            continue  # it is tried again
                        if refusal is not None:
                            _log.warning("a use of an agent or an end of a job cannot be noted: %s", refusal)
                        if self._notes.get(key) is note:  # else it has changed meanwhile
                            del self._notes[key]

    def _keep(self, key: object, note: _Note) -> None:
        with self._lock:
            self._notes[key] = note
        if len(self) >= _MOST_KEPT:
            self.write()

    def _measure_pieces(self, connection: Connection, agent_id: str) -> None:
        row = transcripts.find_agent(connection, agent_id)
        if row is not None and row.problem is None:
            with suppress(OSError):  # the walk measures them again
                n_bytes = sum(map(allocated_bytes, self._pieces.paths(agent_id, row.version)))
                cache_index.set_piece_bytes(connection, row.number, n_bytes)


def _measure_block(connection: Connection, path: Path) -> None:
    with suppress(OSError):  # the walk measures it again
        sizes = allocated_bytes(path), allocated_bytes(checkpoint_beside(path))
        cache_index.correct_sizes(connection, path.stem, sizes, now=time.time())


def _write(connection: Connection, notes: Iterable[_Note]) -> None:
    for note in notes:
        note(connection)


def _write_each(database: Database, notes: Collection[_Note]) -> list[BaseException | None]:
    """Write the notes, each alone if a damaged row refuses one; returns what was raised for each. Raises `OSError`: the
    disk refuses them all. Not `commit_each` alone: in an outage, it would try each of hundreds."""
    try:
        database.commit(partial(_write, notes=notes))
    except OSError:
        raise
    except Exception:
        return [change.error for change in database.commit_each(list(notes))]
    return [None] * len(notes)


@dataclass(frozen=True)
class Plan:
    """The files to remove.

    Attributes:
        blocks: in this order.
        agents: those that lose cache they use; their tails and snapshots go too.
        released: those of `agents` that also give up the blocks that others use; a block goes when its last user gives
            it up.
        checkpoints: the blocks that lose theirs.
    """

    blocks: tuple[Block, ...] = ()
    agents: tuple[AgentRow, ...] = ()
    released: tuple[AgentRow, ...] = ()
    checkpoints: tuple[Block, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.blocks or self.agents or self.checkpoints)


def plan_unused(connection: Connection, *, need_bytes: int, held: AbstractSet[str], unused_before: float) -> Plan:
    """Blocks that nothing refers to, unused longest first: enough to free `need_bytes`, or, if that is 0 or less, those
    unused since `unused_before`. Another plan may find more: a block is unused once the one that follows it is gone."""
    before = None if need_bytes > 0 else unused_before
    blocks: list[Block] = []
    freed = 0
    for block in cache_index.unused_blocks(connection, limit=_AT_ONCE + len(held), before=before):
        if len(blocks) >= _AT_ONCE or (before is None and freed >= need_bytes):
            break
        if block.address not in held:
            blocks.append(block)
            freed += block.both_bytes
    return Plan(tuple(blocks))


def plan_checkpoints(
    connection: Connection,
    idle: AgentRow | None,
    *,
    need_bytes: int,
    share_bytes: float,
    held: AbstractSet[str],
) -> Plan:
    """Checkpoints to free `need_bytes`, first those that cost most for what they save. `idle`: the agent whose cache
    goes next, if any; checkpoints that cost less are left, if they take no more than `share_bytes`."""
    now, going, freed = time.time(), list[Block](), 0
    least_cost = cache_index.cost_of_agent(connection, idle, now=now) if idle is not None else 0.0
    over_bytes = cache_index.checkpoint_bytes(connection) - share_bytes
    for block, cost in cache_index.worst_checkpoints(connection, limit=_AT_ONCE + len(held), now=now):
        if freed >= need_bytes or len(going) >= _AT_ONCE or (cost < least_cost and freed >= over_bytes):
            break
        if block.address not in held:
            going.append(block)
            freed += block.checkpoint_bytes
    return Plan(checkpoints=tuple(going))


def idle_rows(connection: Connection, with_work: Collection[str]) -> Iterator[AgentRow]:
    """Agents with cache and without work, the least recently used first."""
    rows = transcripts.agent_rows(connection, f"WHERE {HAS_CACHE} ORDER BY last_used")
    return (row for row in rows if row.agent_id not in with_work)


def waiting_agents(connection: Connection, waits: Callable[[str], bool], place_of: PlaceOf) -> list[str]:
    """Agents with cache that wait, the one needed last at the end."""
    found = connection.execute(f"SELECT agent_id FROM agents WHERE {HAS_CACHE}")
    return sorted((name for (name,) in found if isinstance(name, str) and waits(name)), key=place_of)


def take_rows(connection: Connection, agents: list[str], is_running: Callable[[str], bool]) -> Iterator[AgentRow]:
    """The rows of those of `agents` that still have cache and do not run, from the end of the list, which shrinks."""
    while agents:
        agent_id = agents.pop()
        if not is_running(agent_id):
            yield from transcripts.agent_rows(connection, f"WHERE agent_id = ? AND {HAS_CACHE}", (agent_id,))


def plan_agents(connection: Connection, rows: Iterable[AgentRow], *, need_bytes: int, held: AbstractSet[str]) -> Plan:
    """Cache of these agents, in this order, to free `need_bytes`: their tails and snapshots, and blocks from the end of
    their chains, because a chain is useful only from its start."""
    blocks: dict[str, Block] = {}
    losing: list[AgentRow] = []
    released: list[AgentRow] = []
    gone: Counter[str] = Counter()
    freed = 0
    for row in rows if need_bytes > 0 else ():
        losing.append(row)
        freed += row.piece_bytes
        if row.last_block is not None:
            gone[row.last_block.hex()] += 1
        for block in cache_index.chain_back(connection, row.last_block):
            if freed >= need_bytes or len(blocks) >= _AT_ONCE:
                break
            if gone[block.address] != block.n_users or block.address in held:
                released.append(row)
                break
            if block.address not in blocks:
                blocks[block.address] = block
                gone[block.parent] += 1
                freed += block.both_bytes
        if freed >= need_bytes or len(blocks) >= _AT_ONCE or len(losing) >= _AT_ONCE:
            break
    agents = (row for row in losing if row.piece_bytes or row in released or _loses(row, blocks))
    return Plan(tuple(blocks.values()), tuple(agents), tuple(released))


def _loses(row: AgentRow, blocks: Collection[str]) -> bool:
    return row.last_block is not None and row.last_block.hex() in blocks


class DiskBudget:
    """A store's bytes on disk, and their limit `max_bytes`: above it, cache is evicted down to 90 %, so that not every
    save has to evict. `place_of`: a waiting agent's place in the queue, as in `QueuePort.place_of`."""

    def __init__(
        self,
        parts: StoreParts,
        notes: Notes,
        *,
        max_bytes: int | None = None,
        on_evicted: Callable[[str], None] = lambda agent_id: None,
    ) -> None:
        """`max_bytes`: ``None``: 80 % of the sum of the store's bytes and the free bytes on its disk. `on_evicted`:
        called with the id of an agent before it loses cache."""
        self._parts = parts
        self._database = parts.database
        self.notes = notes
        self._on_evicted = on_evicted
        self._settling = threading.Lock()
        self._holds = parts.holds
        self.place_of: PlaceOf = lambda agent_id: (0, 0)
        self._refused: set[str] = set()  # blocks and agents whose damaged rows stay: no plan may have them again
        self._waiting: list[str] | None = None  # in one settling: those that still have cache, the next to go last
        self._room_bytes = 0
        self._warned = False
        self.max_bytes = self._default_bytes() if max_bytes is None else max_bytes
        self.make_room()

    @property
    def total_bytes(self) -> int:
        """Allocated on disk, as `du` counts; without ``redis/``, and without files that are just being written. Reads
        the database and the folder: raises `OSError`, `Damaged`."""
        with self._database.snapshot() as connection:
            return cache_index.cache_bytes(connection) + _other_bytes(self._parts)

    @contextmanager
    def using(self, agent_id: str | None, blocks: Iterable[str]) -> Iterator[None]:
        """As `Holds.using`; the agent counts as used now."""
        with self._holds.using(agent_id, blocks):
            if agent_id is not None:
                self.notes.used(agent_id)
            yield

    def saved(self, agent_id: str | None, n_bytes: int = 0) -> None:
        """The agent's new version is committed, with its blocks; ``None``: blocks of a job without an agent. `n_bytes`:
        by how much the store has grown at most; the limit is checked only when that may exceed it."""
        if agent_id is not None:
            self.notes.saved(agent_id)
        with self._holds.lock:
            self._room_bytes -= n_bytes
            is_over = self._room_bytes < 0
        if is_over:
            self.make_room()

    def not_saved(self, blocks: Iterable[Path]) -> None:
        """A save failed: remove what it has written of these blocks."""

        def without_rows() -> list[Path]:
            with self._database.snapshot() as connection:
                gone = [path for path in blocks if not cache_index.has_block(connection, path.stem)]
            return [one for path in gone for one in (path, checkpoint_beside(path))]

        with suppress(OSError, Damaged):
            self.discard(without_rows)

    def make_room(self) -> None:
        """Evict if the store is over its limit, and remove blocks unused for long. Never raises."""
        self._settle(unused_before=time.time() - KEEP_UNUSED_S)

    def free(self, n_bytes: int) -> None:
        """Evict that much, and all unused blocks, even below the limit: the disk is full. Never raises."""
        if not self._database.empty_log():
            n_bytes += self._database.log_bytes()  # the log gives this back once the database has room for its content
        self._settle(unused_before=float("inf"), free_bytes=n_bytes)
        self._database.empty_log()

    def with_room(self, save: Callable[[], T], n_bytes: Callable[[], int]) -> T:
        """Save; if the disk is full, once more after freeing `n_bytes()`. Raises what `save` raises."""
        try:
            return save()
        except OSError as error:
            if not is_full(error):
                raise
        self.free(n_bytes())
        return save()

    def discard(self, find: Callable[[], Iterable[Path]]) -> int:
        """Remove the cache files that `find` finds, except held blocks; returns how many. No hold begins while `find`
        looks. Raises `OSError`."""
        with self._holds.lock:
            held = self._holds.blocks()
            paths = [path for path in find() if block_beside(path).stem not in held]
            for path in paths:
                self._parts.files.remove(path)
        return len(paths)

    def _unlink(self, plan: Plan) -> None:
        """Remove the plan's files. Raises `OSError`: some may be left."""
        pieces, blocks = self._parts.pieces, self._parts.blocks
        paths = [path for block in plan.blocks for path in blocks.both(block.model, block.address)]
        paths += [blocks.both(block.model, block.address)[1] for block in plan.checkpoints]
        for row in plan.agents:
            self._on_evicted(row.agent_id)
            paths += pieces.paths(row.agent_id, row.version)
        for path in paths:
            self._parts.files.remove(path)

    def _note_removed(self, plan: Plan) -> None:
        """Remove the plan's rows; a damaged one stays, and no later plan has it. Raises `OSError`."""
        now = time.time()

        def remove(connection: Connection, block: Block) -> None:
            if not is_there(self._parts.blocks.path_of(block.model, block.address)):  # else it was saved again
                cache_index.remove_block(connection, block.address, now=now if plan.agents else None)

        def drop(connection: Connection, block: Block) -> None:
            if not is_there(self._parts.blocks.both(block.model, block.address)[1]):
                cache_index.drop_checkpoint(connection, block.address)

        names = [row.agent_id for row in plan.agents]
        notes: list[_Note] = [
            partial(cache_index.note_evicted, row=row, released=row in plan.released, now=now) for row in plan.agents
        ]
        for blocks, note in ((plan.blocks, remove), (plan.checkpoints, drop)):
            names += [block.address for block in blocks]
            notes += [partial(note, block=block) for block in blocks]
        for name, error in zip(names, _write_each(self._database, notes), strict=True):
            if isinstance(error, OSError):
                raise error
            if error is not None:
                self._refused.add(name)
                _log.warning("%s stays in the index of the caches: %s", name, error)

    def _default_bytes(self) -> int:
        free = shutil.disk_usage(self._parts.path).free
        max_bytes = int(DEFAULT_SHARE * (self.total_bytes + free))
        share = 100 * DEFAULT_SHARE
        _log.info("the store may take %.1f GB: %d %% of its own bytes and the free ones", max_bytes / 1e9, share)
        return max_bytes

    def _settle(self, *, unused_before: float, free_bytes: int = 0) -> None:
        """Evict until the store is within its limit and has freed `free_bytes`; in parts, to hold no lock for long."""
        goal, total = self.max_bytes, 0
        try:
            with self._settling:
                self._waiting = None
                while True:
                    if 10 * self._database.log_bytes() > self.max_bytes:
                        self._database.empty_log()
                    other_bytes = _other_bytes(self._parts)
                    with self._holds.lock, self._database.snapshot() as connection:
                        total = cache_index.cache_bytes(connection) + other_bytes
                        if total > self.max_bytes:
                            goal = int(self.max_bytes * LOW_WATER)
                        goal, free_bytes = min(goal, total - free_bytes) if free_bytes else goal, 0
                        plan = self._plan(connection, total - goal, unused_before)
                        self._unlink(plan)
                    if not plan:
                        break
                    self._note_removed(plan)
                    if plan.agents:
                        n_blocks, n_agents = len(plan.blocks), len(plan.agents)
                        _log.info("evicted %d blocks, and the rest of the cache of %d agents", n_blocks, n_agents)
                    if plan.checkpoints:
                        _log.info("evicted %d checkpoints", len(plan.checkpoints))
        except DatabaseFailed as error:
            self._database.outage.met(error)
        except (OSError, Damaged) as error:
            _log.warning("could not evict everything that should go: %s", error)
        except Exception:  # a damaged row must not fail a turn
            _log.exception("could not evict everything that should go")
        with self._holds.lock:
            self._room_bytes = self.max_bytes - total
        self._warn_if_over(total)

    def _warn_if_over(self, total: int) -> None:
        if total > self.max_bytes and not self._warned:
            self._warned = True
            _log.warning(
                "the store takes %.2f GB of %.2f GB, and nothing more can be evicted: the rest is transcripts, and "
                "cache of running agents",
                total / 1e9,
                self.max_bytes / 1e9,
            )

    def _plan(self, connection: Connection, need_bytes: int, unused_before: float) -> Plan:
        holds, held = self._holds, self._holds.blocks() | self._refused
        unused = plan_unused(connection, need_bytes=need_bytes, held=held, unused_before=unused_before)
        if unused or need_bytes <= 0:
            return unused
        busy = holds.agents() | self._refused
        share_bytes, first = CHECKPOINT_SHARE * self.max_bytes, next(idle_rows(connection, busy), None)
        plan_those = partial(plan_checkpoints, connection, first, share_bytes=share_bytes)
        if plan := plan_those(need_bytes=need_bytes, held=held):
            return plan
        plan_of = partial(plan_agents, connection, need_bytes=need_bytes, held=held)
        if self._waiting is None:
            if plan := plan_of(idle_rows(connection, busy)):
                return plan
            self._waiting = waiting_agents(connection, holds.waits, self.place_of)
        plan = plan_of(
            take_rows(connection, self._waiting, lambda name: name in self._refused or holds.is_running(name))
        )
        self._waiting += [row.agent_id for row in plan.agents[-1:]]  # it may have some left
        return plan


def is_full(error: Exception) -> bool:
    """True if the disk, or its quota, has no room."""
    return isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT)


def _other_bytes(parts: StoreParts) -> int:
    """Allocated bytes of the store's folders and top-level files, the database included. There are a few hundred
    folders for each model, however many agents."""
    store = parts.path
    folders = (store, parts.temp, parts.blocks.path, parts.pieces.path)
    inner = (*store.glob("blocks/*/"), *store.glob("blocks/*/*/"), *store.glob("pieces/*/"))
    files = (path for path in store.iterdir() if path.is_file() and not path.is_symlink())
    return sum(map(allocated_bytes, (*folders, *inner, *files)))
