"""The cache files of agents in a shared store: writes them there, and brings them here, to save time. Any thread.

They have the same names and bytes there as here, so a reader verifies them as always. Beside them is a list for each
agent, made when all of its files are there: it tells `collecting` what is used, and since when.
"""

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Final

from stoker_shared.errors import StokerError
from stoker_worker.memory import cache_index, transcripts
from stoker_worker.memory.admin.cache_files import (
    check_block,
    check_checkpoint,
    check_piece,
    enter_blocks,
    has_snapshots,
)
from stoker_worker.memory.blocks import (
    BLOCK_FILE,
    PIECE_FILE,
    BlockChain,
    block_beside,
    checkpoint_beside,
    place_in,
    read_place,
)
from stoker_worker.memory.database import Connection, Damaged, key_of
from stoker_worker.memory.eviction import DiskBudget
from stoker_worker.memory.files import allocated_bytes, is_there
from stoker_worker.memory.replica.bucket import MARKER, READ_LIMIT_S, Bucket, BucketAway
from stoker_worker.memory.replica.versions import EMPTIED, Versions, version_name
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.memory.transcripts import FULL_EVERY
from stoker_worker.memory.turn_saver import chain_of
from stoker_worker.ports import AgentVersion, SharedUse
from stoker_worker.ports.cache_spec import BLOCK_TOKENS, LayerKind
from stoker_worker.ports.memory import common_length

_log = logging.getLogger(__name__)

_MOST_ENDS: Final = 2
"""Of an agent's checkpoints with tokens after their blocks, the list has so many of the last ones, and the first, which
may be the system prompt's. With all of them, each turn would add a state."""

CACHES: Final = "caches"
BLOCKS: Final = "blocks"
PIECES: Final = "pieces"

_Check = Callable[[Path], object]
_Checks = dict[Path, _Check]
"""Files, and the check of each, which raises `Damaged` and `FileNotFoundError`."""

_AT_ONCE: Final = 4
_JOB_WAITS_S: Final = 30.0
"""The longest time in which a job's cache is brought in. No other job is loaded meanwhile."""
_KNOWN_S: Final = 3600.0
"""After this time a worker looks again whether a file is there: `memory gc --shared` may have removed it."""
_MOST_KNOWN: Final = 2**16
_MISSING: Final = (float("-inf"), 0)
"""Of a file that is not there, or is damaged, even if a list names it."""
_RETRY_S: Final = 1.0
_STOP_S: Final = 5.0
_HEADER_BYTES: Final = 1 << 17
"""Ten times a cache file's header."""
_MOST_WAITING: Final = 2**16
"""Agents that wait. Of more, the one that has waited longest is dropped."""


def manifest_name(key: str) -> str:
    """The object that lists an agent's cache files. `key`: hex."""
    return f"{CACHES}/{key[:2]}/{key}.json"


def pieces_prefix(key: str) -> str:
    """How the names of an agent's own cache files begin. `key`: hex."""
    return f"{PIECES}/{key[:2]}/{key[:32]}-"


def is_cache_file(name: str) -> bool:
    """True if a worker gives this name to a block or a piece."""
    folder, _, rest = name.partition("/")
    form = {BLOCKS: BLOCK_FILE, PIECES: PIECE_FILE}.get(folder)
    return form is not None and form.fullmatch(rest) is not None


def manifest(version: int, files: Iterable[str]) -> bytes:
    return json.dumps({"version": version, "files": list(files)}).encode()


def files_in(manifest: bytes) -> list[str]:
    """The names of cache files in it; none, if it is damaged."""
    try:
        return [name for name in json.loads(manifest)["files"] if isinstance(name, str) and is_cache_file(name)]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []


class SharedCaches:
    """`written_bytes`, `read_bytes`: since the start."""

    def __init__(self, parts: StoreParts, bucket: Bucket, budget: DiskBudget) -> None:
        self._parts = parts
        self._bucket = bucket
        self._budget = budget
        # Files, when they were there, or `_MISSING`, and, of a checkpoint, how many tokens it had behind its block.
        self._seen: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self.written_bytes = 0
        self.read_bytes = 0

    def write(self, agent_id: str, pace: Callable[[int], None]) -> int:
        """Write the cache of the agent's newest version, as far as it is on disk and not there yet; returns the
        version, 0: there is none. One thread. `pace`: called after each file with its bytes; it waits, or raises to
        give up. Raises `BucketAway`, `OSError`, `Damaged`: not all of it is written."""
        with self._parts.database.snapshot() as connection:
            version = transcripts.read_agent(connection, agent_id).version
        if version.transcript is None:
            return 0
        blocks, pieces = self._files(version)
        checkpoints = self._checkpoints(version)
        behind = {path: place[1] for path in checkpoints if (place := read_place(path)) is not None}
        ends = [path for path, ids in behind.items() if ids]
        blocks |= {path: checkpoints[path] for path in behind if path not in ends[1:-_MOST_ENDS]}
        names, key = [], key_of(agent_id).hex()
        before = _listed(self._bucket, agent_id)
        listed = {self._name_of(path) for path in blocks if path not in behind}.intersection(before)
        there = {name for name in listed if self._seen.get(name) != _MISSING}
        for path, check in (blocks | pieces).items():
            name, ids = self._name_of(path), behind.get(path)
            if name in there or self._was_there(name, len(ids or ())) or self._wrote(path, check, pace, ids):
                names.append(name)
        self._bucket.put(manifest_name(key), manifest(version.number, names))
        self._bucket.remove(name for name in before if name.startswith(pieces_prefix(key)) and name not in names)
        stored = self._bucket.find(version_name(agent_id, version.number))
        if stored is not None and stored.n_bytes == len(EMPTIED):  # it was forgotten meanwhile, perhaps elsewhere
            remove_caches(self._bucket, agent_id)
        return version.number

    def bring(self, version: AgentVersion, prompt: BlockChain) -> None:
        """Bring the agent's cache files that are missing here and useful for the prompt; what does not come within
        `_JOB_WAITS_S` is a miss. Never raises."""
        if self._bucket.outage.seconds:
            return
        began = time.perf_counter()
        bring_one = partial(self._bring_one, until=began + _JOB_WAITS_S)
        missing: _Checks = {}
        try:
            missing |= {path: check for path, check in self._wanted(version, prompt).items() if not is_there(path)}
            if not missing:
                return
            with (
                self._budget.using(version.agent_id, [block_beside(path).stem for path in missing]),
                ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="shared-store") as threads,
            ):
                n_bytes = sum(threads.map(bring_one, missing, missing.values()))
                self._parts.database.commit(partial(self._enter, version=version))
            self._budget.saved(None, n_bytes)
        except Exception as error:  # a cache only saves time
            _log.warning("agent %r: its cache was not brought in: %s", version.agent_id, error)
            with suppress(OSError):
                self._budget.discard(lambda: missing)  # nothing counts them, and a full disk needs the room
            return
        seconds = time.perf_counter() - began
        _log.info("agent %r: brought in %.1f MB of cache in %.2f s", version.agent_id, n_bytes / 1e6, seconds)

    def _wanted(self, version: AgentVersion, prompt: BlockChain) -> _Checks:
        cache, transcript = version.cache, version.transcript
        if cache is None or transcript is None or (prompt.model, prompt.salt) != (cache.model, cache.salt):
            return {}
        blocks, pieces = self._files(version)
        n_tokens = common_length(transcript.token_ids[: cache.tokens], prompt.token_ids)
        blocks = dict(islice(blocks.items(), -(-n_tokens // BLOCK_TOKENS)))
        blocks |= self._wanted_checkpoint(version, min(n_tokens, len(prompt.token_ids) - 1))
        has_all_blocks = n_tokens // BLOCK_TOKENS == cache.tokens // BLOCK_TOKENS
        return blocks | pieces if cache.snapshots or has_all_blocks else blocks

    def _wanted_checkpoint(self, version: AgentVersion, n_tokens: int) -> _Checks:
        """The last checkpoint within the version's first `n_tokens` tokens, unless it has a snapshot as late. The last
        block's may lie beyond these tokens: then also the one before it."""
        own = version.cache.snapshots if version.cache else ()
        least = max((n for n in own if n <= n_tokens), default=0) // BLOCK_TOKENS
        within = list(self._checkpoints(version).items())[least : n_tokens // BLOCK_TOKENS]
        if not within or is_there(within[-1][0]):
            return {}
        listed = set(_listed(self._bucket, version.agent_id))
        there = [one for one in within if self._name_of(one[0]) in listed]
        return dict(there[-2:] if there[-1:] == within[-1:] else there[-1:])

    def _checkpoints(self, version: AgentVersion) -> _Checks:
        """All places where its cache may have a checkpoint, in the order of the chain."""
        chain = _cached_chain(version)
        if chain is None or not has_snapshots(self._layout(chain.model)):
            return {}
        paths = zip(chain.addresses, chain.paths(self._parts.blocks.path_of), strict=True)
        return {
            checkpoint_beside(path): partial(check_checkpoint, model=chain.model, address=address)
            for address, path in paths
        }

    def _layout(self, model: str) -> str | None:
        with self._parts.database.snapshot() as connection:
            return cache_index.read_model(connection, model)

    def _files(self, version: AgentVersion) -> tuple[_Checks, _Checks]:
        """The blocks and the pieces of its cache, by their places here."""
        chain = _cached_chain(version)
        if chain is None or version.cache is None:
            return {}, {}
        layout = self._layout(chain.model)
        has_blocks = layout is None or LayerKind.FULL in layout
        has_tail = not has_snapshots(layout) and bool(chain.rest)
        addresses = zip(chain.addresses, chain.paths(self._parts.blocks.path_of), strict=True)
        blocks: _Checks = {path: partial(check_block, model=chain.model, address=x) for x, path in addresses}
        own = enumerate(self._parts.pieces.paths(version.agent_id, version.number))
        pieces: list[tuple[Path, _Check]] = [
            (path, partial(check_piece, version=version, snapshot=place - 1 if place else None)) for place, path in own
        ]
        return blocks if has_blocks else {}, dict(pieces[not has_tail : 1 + len(version.cache.snapshots)])

    def _wrote(self, path: Path, check: _Check, pace: Callable[[int], None], behind: tuple[int, ...] | None) -> bool:
        """True if the file is there now. A damaged one is left to the next restore, which removes it. `behind`: a
        checkpoint's tokens after its block; it replaces a shared one with other tokens, as it has here."""
        name, is_block = self._name_of(path), path.is_relative_to(self._parts.blocks.path)
        has = self._bucket.has if behind is None else lambda name: _tokens_behind(self._bucket, name) in ((), behind)
        if not (is_block and has(name)):
            try:
                check(path)
                content = path.read_bytes()
            except FileNotFoundError:
                return not is_block and self._bucket.has(name)
            except Damaged:
                return False
            self._bucket.put(name, content)
            self.written_bytes += len(content)
            pace(len(content))
        self._note(name, time.monotonic(), len(behind or ()))
        return True

    def _was_there(self, name: str, n_behind: int) -> bool:
        at, n_then = self._seen.get(name, _MISSING)
        return n_then == n_behind and time.monotonic() - at < _KNOWN_S

    def _note(self, name: str, at: float, n_behind: int) -> None:
        self._seen.pop(name, None)
        self._seen[name] = at, n_behind
        if len(self._seen) > _MOST_KNOWN:
            self._seen.popitem(last=False)

    def _bring_one(self, path: Path, check: _Check, *, until: float) -> int:
        """Returns the allocated bytes; 0: it is not there, or the time is over. Raises `OSError`."""
        name, writer = self._name_of(path), self._parts.writer
        if self._bucket.outage.seconds or time.perf_counter() > until:
            return 0
        try:
            content = self._bucket.get(name, READ_LIMIT_S)
        except BucketAway:  # what has come so far is useful
            return 0
        if content is None:
            self._note(name, *_MISSING)
            return 0
        self.read_bytes += len(content)
        staged = writer.stage([content])
        try:
            check(staged)
        except Damaged as damage:
            _log.warning("%s in the shared store %s, and is removed", name, damage)
            self._parts.files.remove(staged)
            self._note(name, *_MISSING)
            with suppress(BucketAway):
                self._bucket.remove([name])
            return 0
        writer.make_folder(path.parent)
        writer.place(staged, path)
        return allocated_bytes(path)

    def _enter(self, connection: Connection, version: AgentVersion) -> None:
        """Enter what is on disk in the index, if the agent is still at that version."""
        row = transcripts.find_agent(connection, version.agent_id)
        chain, now = _cached_chain(version), time.time()
        if row is None or row.head != version.head or chain is None:
            return
        enter_blocks(connection, chain, self._parts.blocks, now=now)
        cache_index.use_chain(connection, row.number, chain, now=now)
        own = self._parts.pieces.paths(version.agent_id, version.number)
        cache_index.set_piece_bytes(connection, row.number, sum(map(allocated_bytes, own)))

    def _name_of(self, path: Path) -> str:
        return path.relative_to(self._parts.path).as_posix()


def _cached_chain(version: AgentVersion) -> BlockChain | None:
    """The cached tokens; ``None``: there are none."""
    if version.cache is None or version.transcript is None:
        return None
    return chain_of(version.cache, version.transcript.token_ids)


def remove_caches(bucket: Bucket, agent_id: str) -> None:
    """Remove a forgotten agent's list, its own files, and its checkpoints with tokens after their blocks. The blocks,
    which others may use, go with `memory gc`. Raises `BucketAway`."""
    if names := _listed(bucket, agent_id):
        key = key_of(agent_id).hex()
        ends = (x for x in names if x.endswith("-checkpoint.safetensors") and _tokens_behind(bucket, x))
        own = (x for x in names if x.startswith(pieces_prefix(key)))
        bucket.remove([manifest_name(key), *own, *ends])


def _tokens_behind(bucket: Bucket, name: str) -> tuple[int, ...] | None:
    """A checkpoint's tokens after its block; ``None``: it is not there, or damaged. Raises `BucketAway`."""
    place = place_in(BytesIO(bucket.get(name, first=_HEADER_BYTES) or b""))
    return None if place is None else place[1]


def _listed(bucket: Bucket, agent_id: str) -> list[str]:
    content = bucket.get(manifest_name(key_of(agent_id).hex()))
    return files_in(content) if content is not None else []


class CachesBehind:
    """Writes caches to the shared store after their turns, on a thread of its own, within a bandwidth. What is left to
    write is in memory only: another worker computes what it does not find. In an outage this thread alone asks whether
    the shared store is back."""

    def __init__(self, parts: StoreParts, bucket: Bucket, budget: DiskBudget, *, max_bps: int | None) -> None:
        """`max_bps`: most bytes per second; ``None``: no limit."""
        self._bucket = bucket
        self._versions = Versions(bucket)
        self.caches = SharedCaches(parts, bucket, budget)
        self._max_bps = max_bps
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="caches-behind", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, agent_id: str) -> None:
        """The agent has a new version. Never blocks."""
        with self._changed:
            self._waiting[agent_id] = None
            if len(self._waiting) > _MOST_WAITING:
                self._waiting.popitem(last=False)
            self._changed.notify_all()

    def use(self) -> SharedUse:
        """No I/O; any thread."""
        return SharedUse(self._bucket.outage.seconds, self.caches.written_bytes, self.caches.read_bytes)

    def close(self) -> None:
        """End the thread after its file, if that does not take long."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)

    def write_next(self) -> bool:
        """Write the cache of the agent that has waited longest; returns whether one has. Raises `BucketAway`."""
        with self._changed:
            if self._is_closing or not self._waiting:
                return False
            agent_id, _ = self._waiting.popitem(last=False)
        try:
            version = self.caches.write(agent_id, self._pace)
            if version and version % FULL_EVERY == 0:
                self._versions.prune(agent_id)
        except BucketAway:
            self.add(agent_id)
            raise
        except (Damaged, OSError, StokerError) as error:
            _log.warning("the cache of agent %r is not written to the shared store: %s", agent_id, error)
        return True

    def _run(self) -> None:
        while not self._is_closing:
            try:
                if self._bucket.outage.seconds:
                    self._bucket.get(MARKER)
                while not self._bucket.outage.seconds and self.write_next():
                    pass
                self._wait(_RETRY_S if self._bucket.outage.seconds else None)
            except _Closing:
                return
            except BucketAway:
                self._wait(_RETRY_S)
            except Exception:  # the worker can do without it for now
                _log.exception("caches are written to the shared store later")
                self._wait(_RETRY_S)

    def _pace(self, n_bytes: int) -> None:
        """Wait for the bandwidth. Raises `_Closing`."""
        if self._max_bps is not None:
            self._wait(n_bytes / self._max_bps)
        if self._is_closing:
            raise _Closing

    def _wait(self, seconds: float | None) -> None:
        """Wait so long or until the end; ``None``: until there is something to write, or for as long as a retry."""
        with self._changed:
            if seconds is None:
                self._changed.wait_for(lambda: self._is_closing or bool(self._waiting), _RETRY_S)
            else:
                self._changed.wait_for(lambda: self._is_closing, seconds)


class _Closing(Exception):
    """The thread is to end."""
