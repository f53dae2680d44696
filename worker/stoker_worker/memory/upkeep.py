"""Keeps a store small and its index right, on a thread of its own: writes notes, deletes expired answers, removes
unused agents, and compares the cache files with their index.

Works in small steps and rests between them, so that no turn waits for it. It keeps no state between rounds. A save
writes its files before its rows, so a file without a row is an orphan only after some time; its loss is a miss.
"""

import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Final

from stoker_shared.errors import AgentBusy, StokerError
from stoker_worker.memory import cache_index, transcripts
from stoker_worker.memory.agent_changes import forget_unused
from stoker_worker.memory.blocks import BLOCK_FILE, PIECE_FILE
from stoker_worker.memory.database import Connection, Damaged, DatabaseFailed, key_of
from stoker_worker.memory.eviction import DiskBudget, Notes
from stoker_worker.memory.locks import working_on
from stoker_worker.memory.ram_cache import RamCache
from stoker_worker.memory.sessions import is_of_session, shown
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.memory.unsaved import UnsavedTurns
from stoker_worker.periodic import Periodic

_YOUNG_S: Final = 600.0
"""A worker may still be saving a younger file."""


def cache_folders(parts: StoreParts) -> Iterator[Path]:
    yield from sorted(parts.blocks.path.glob("*/*/"))
    yield from sorted(parts.pieces.path.glob("*/"))


def orphans_in(parts: StoreParts, folder: Path, *, before: float) -> list[Path]:
    """The files in `folder`, one of `cache_folders`, from before this Unix time that no row names. Files with other
    names than a store's are left alone. Raises `OSError`, `Damaged`."""
    of_pieces = folder.parent == parts.pieces.path
    form, is_named = (PIECE_FILE, _has_piece) if of_pieces else (BLOCK_FILE, _has_block)
    below = folder.relative_to(parts.pieces.path if of_pieces else parts.blocks.path).as_posix()
    old = [name for name, seen in _files_in(folder).items() if seen.st_mtime < before]
    matches = {name: match for name in old if (match := form.fullmatch(f"{below}/{name}"))}
    with parts.database.snapshot() as connection:  # after the folder was listed: what was saved meanwhile has a row
        return [folder / name for name, match in matches.items() if not is_named(connection, match)]


def _has_block(connection: Connection, name: re.Match[str]) -> bool:
    return cache_index.has_block(connection, name[3])


def _has_piece(connection: Connection, name: re.Match[str]) -> bool:
    """True if the file belongs to the newest version of an agent."""
    key = bytes.fromhex(name[2])
    sql = "SELECT 1 FROM agents INDEXED BY agents_by_key WHERE key BETWEEN ? AND ? AND version = ?"
    return connection.execute(sql, (key, key + b"\xff" * 16, int(name[3]))).fetchone() is not None


_log = logging.getLogger(__name__)

_EVERY_S: Final = 1.0
_WALK_EVERY_S: Final = 3600.0
_REST_S: Final = 0.02
_REST_SHARE: Final = 4.0
"""Rests last four times as long as the step before, and at least 20 ms."""
_ROWS_AT_ONCE: Final = 128
_AGENTS_AT_ONCE: Final = 8
_TICK_S: Final = 60.0
"""How often the store's clock advances."""
_FORGET_EMPTY_S: Final = 3600.0
_MOST_PAGES: Final = 64
_NO_AGENT: Final = ""


class Upkeep:
    def __init__(
        self,
        parts: StoreParts,
        notes: Notes,
        unsaved: UnsavedTurns,
        budget: DiskBudget,
        ram_cache: RamCache,
        *,
        agent_ttl_s: float | None,
        session_ttl_s: float | None = None,
    ) -> None:
        """`agent_ttl_s`: for how long workers may run without a use of an agent until it is removed; ``None``: it
        stays. `session_ttl_s`: the same for a conversation of a session."""
        self._parts = parts
        self._database = parts.database
        self._notes = notes
        self._unsaved = unsaved
        self._budget = budget
        self._ram_cache = ram_cache
        self._agent_ttl_s = agent_ttl_s
        self._session_ttl_s = session_ttl_s
        self._stop = threading.Event()
        self._monotonic = time.monotonic
        self._ticked_at = self._monotonic()
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread after its step. Never raises."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
            with suppress(OSError, Damaged):
                self._tick()

    def tidy(self) -> Iterator[None]:
        """The steps of each second. Each raises `OSError`, `Damaged`, `StokerError`."""
        self._notes.write()
        self._unsaved.reserve()
        self._unsaved.move_all()
        if self._monotonic() - self._ticked_at >= _TICK_S:
            self._tick()
        yield
        self._budget.make_room()
        self._database.shorten_log()
        if self._agent_ttl_s is not None:
            yield from self._forget_unused(self._agent_ttl_s, f"NOT {transcripts.IS_OF_SESSION}")
        # Last: a damaged row among the expired ones ends the steps here each time.
        while self._database.commit(partial(transcripts.forget_answers, now=time.time())):
            yield

    def forget_sessions(self) -> Iterator[None]:
        """The steps of each minute, as fine as the store's clock: conversations may be many. Raises as `tidy`."""
        if self._session_ttl_s is not None:
            yield from self._forget_unused(self._session_ttl_s, transcripts.IS_OF_SESSION)
        # Without cache there is nothing to keep, and sessions that are used once add up.
        without_cache = f"{transcripts.IS_OF_SESSION} AND NOT {cache_index.HAS_CACHE}"
        yield from self._forget_unused(_FORGET_EMPTY_S, without_cache)

    def walk(self) -> Iterator[None]:
        """The steps of a comparison of all cache files with their index. Each raises as those of `tidy`."""
        for folder in cache_folders(self._parts):
            self._remove_orphans(folder)
            yield
        checks = {self._parts.blocks.path: self._check_blocks, self._parts.pieces.path: self._check_pieces}
        for number in range(256):  # also for folders that somebody has removed: there are still rows
            for folder, check in checks.items():
                if folder.is_dir():  # else it may be on a disk that is away
                    yield from check(f"{number:02x}")
            yield
        with self._database.snapshot() as connection:
            is_right = cache_index.uncounted_bytes(connection) == 0
        if not is_right:
            self._database.commit(cache_index.correct_bytes)

    def _run(self) -> None:
        sessions, walks = Periodic(_TICK_S), Periodic(_WALK_EVERY_S)
        while not self._stop.wait(_EVERY_S):
            self._take(self.tidy())
            if sessions.is_due():
                self._take(self.forget_sessions())
            if walks.is_due():
                self._take(self.walk())

    def _take(self, steps: Iterable[None]) -> None:
        """Never raises: what ends these steps stops no others."""
        begin = time.perf_counter()
        try:
            for _ in steps:
                if self._stop.wait(max(_REST_S, _REST_SHARE * (time.perf_counter() - begin))):
                    return
                begin = time.perf_counter()
        except DatabaseFailed as error:
            self._database.outage.met(error)
        except (OSError, Damaged, StokerError) as error:
            _log.warning("the store's upkeep goes on later: %s", error)
        except Exception:  # the worker can do without it for now
            _log.exception("the store's upkeep goes on later")

    def _tick(self) -> None:
        """Add to the store's clock how long this worker has run, a tick at most. It is no date, does not count while
        the machine sleeps, and ignores the system's clock. Raises `OSError`, `Damaged`."""
        now = self._monotonic()
        seconds, self._ticked_at = min(max(0.0, now - self._ticked_at), _TICK_S), now
        self._database.commit(partial(transcripts.advance_clock, seconds=seconds))

    def _forget_unused(self, ttl_s: float, where: str) -> Iterator[None]:
        """In small steps, with other work between; each agent is looked at once, in at most `_MOST_PAGES` pages."""
        for_s, after = ttl_s + _TICK_S, (float("-inf"), 0)  # the last use may be a tick later than the clock was
        # Their jobs wait meanwhile, and a shared store is asked about each.
        at_once = 1 if self._parts.replica.is_shared else _AGENTS_AT_ONCE
        for _ in range(_MOST_PAGES):
            with self._database.snapshot() as connection:
                page = transcripts.unused_agents(connection, for_s=for_s, after=after, limit=_ROWS_AT_ONCE, where=where)
            if not page:
                return
            after = page[-1][:2]
            self._notes.write()  # a use that is not written yet keeps its agent
            names = [agent_id for *_, agent_id in page if isinstance(agent_id, str)]  # others are damaged
            idle = [agent_id for agent_id in names if not self._has_work(agent_id)]
            for first in range(0, len(idle), at_once):
                if not self._forget_agents(idle[first : first + at_once], for_s):
                    return
                yield
            yield

    def _forget_agents(self, agents: Sequence[str], for_s: float) -> bool:
        """``False`` if none of those that should go could be removed: perhaps the disk fails."""
        with ExitStack() as taken:
            unused = [agent_id for agent_id in agents if self._takes(taken, agent_id, for_s)]
            removed = forget_unused(self._parts, unused)
        for agent_id in removed:
            self._ram_cache.drop(agent_id)
            _log.info("%s removed: it was not used for %g s", shown(agent_id), for_s - _TICK_S)
        return bool(removed or not unused)

    def _has_work(self, agent_id: str) -> bool:
        """True also for an agent whose jobs are not offered here: they wait for a job in another queue, or for another
        worker."""
        place_of = self._budget.place_of
        return self._parts.holds.has_work(agent_id) or place_of(agent_id) < place_of(_NO_AGENT)

    def _takes(self, taken: ExitStack, agent_id: str, for_s: float) -> bool:
        """True if the agent is whole and unused. No other process works on it until `taken` ends."""
        try:
            taken.enter_context(working_on(self._parts.path, agent_id))
            with self._database.snapshot() as connection:
                row = transcripts.find_agent(connection, agent_id)
                unused_s = transcripts.unused_s(connection, agent_id)
        except AgentBusy:
            return False
        except (OSError, Damaged) as error:
            _log.warning("agent %r is unused, and could not be removed: %s", agent_id, error)
            return False
        is_whole = row is not None and row.problem is None
        is_unused = unused_s is not None and unused_s > for_s and not self._has_work(agent_id)
        return is_whole and is_unused and (is_of_session(agent_id) or self._parts.replica.expire(agent_id, for_s))

    def _remove_orphans(self, folder: Path) -> None:
        find = partial(orphans_in, self._parts, folder, before=time.time() - _YOUNG_S)
        if find():
            _log.info("%d cache files that nothing refers to removed", self._budget.discard(find))

    def _check_blocks(self, name: str) -> Iterator[None]:
        """Remove rows without a file, and correct sizes, in the folders of this name."""
        sizes = _sizes_in(self._parts.blocks.path.glob(f"*/{name}/"))
        last = ""
        while True:
            with self._database.snapshot() as connection:
                rows = cache_index.block_sizes(connection, name, after=last, limit=_ROWS_AT_ONCE)
            if not rows:
                return
            last = rows[-1].address
            for row in rows:
                if not str(row.model).isalnum():
                    continue  # it is damaged, and may name any path
                path, checkpoint = self._parts.blocks.both(row.model, row.address)
                if (sizes.get(path, 0), sizes.get(checkpoint, 0)) != (row.n_bytes, row.checkpoint_bytes):
                    self._notes.block_changed(path)
            yield

    def _check_pieces(self, name: str) -> Iterator[None]:
        """Correct the bytes of each agent's tail and snapshots, in the folder of this name."""
        paths, first = self._parts.pieces.paths, bytes.fromhex(name)
        sizes = _sizes_in([self._parts.pieces.path / name])
        last = first
        while True:
            where = "INDEXED BY agents_by_key WHERE key > ? AND key <= ? ORDER BY key LIMIT ?"
            with self._database.snapshot() as connection:
                rows = list(transcripts.agent_rows(connection, where, (last, first + b"\xff" * 31, _ROWS_AT_ONCE)))
            if not rows:
                return
            last = key_of(rows[-1].agent_id)
            for row in rows:
                n_bytes = sum(sizes.get(path, 0) for path in paths(row.agent_id, row.version))
                if n_bytes != row.piece_bytes:
                    self._notes.pieces_changed(row.agent_id)
            yield


def _sizes_in(folders: Iterable[Path]) -> dict[Path, int]:
    """Allocated bytes of the files. Raises `OSError`."""
    return {folder / name: seen.st_blocks * 512 for folder in folders for name, seen in _files_in(folder).items()}


def _files_in(folder: Path) -> dict[str, os.stat_result]:
    """Of a folder that is gone, none. Raises `OSError`."""
    found = {}
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                found[entry.name] = entry.stat(follow_symlinks=False)
    return found
