"""Finds the longest cached prefix of a prompt: in RAM, then on disk. Writes no file, but removes damaged ones. Loader
and read-ahead threads, and threads of its own during a lookup.

On disk the prompt's own full blocks come first, whichever agent wrote them. Where those end, one more file is used: a
checkpoint of the chain; one of the agent's own snapshots; or, as far as the tokens agree, its tail or a full block that
the prompt leaves in the middle. The K/V of full attention may be cut anywhere, so the longest is used. A model with
window or recurrent layers resumes only at a snapshot or checkpoint. A miss has a reason. For a call of a session, the
session's conversation that the prompt continues takes the agent's place.
"""

import contextlib
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import merge
from itertools import islice, takewhile
from pathlib import Path
from typing import Final, Literal, Self

import numpy as np

from stoker_worker.memory.blocks import (
    BlockChain,
    CachePiece,
    Fault,
    PathOf,
    PieceFolder,
    PieceKind,
    Places,
    block_address,
    bytes_of,
    checkpoint_beside,
    empty_layers,
    empty_states,
    read_place,
)
from stoker_worker.memory.checkpoints import checkpoint_places
from stoker_worker.memory.database import Damaged
from stoker_worker.memory.eviction import DiskBudget, Notes
from stoker_worker.memory.files import is_there
from stoker_worker.memory.ram_cache import RamCache, RamCacheEntry
from stoker_worker.memory.sessions import SessionCaches, why_missed
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.ports import (
    AgentVersion,
    LayerKV,
    LayerState,
    LoadedModel,
    PrefixRoom,
    Restored,
    SequenceCache,
    Snapshot,
)
from stoker_worker.ports.cache_spec import BLOCK_TOKENS, ModelCacheSpec
from stoker_worker.ports.memory import common_length

_MOST_READERS: Final = 4
"""This many threads use up the memory bandwidth."""


@dataclass(frozen=True)
class AgentBlocks:
    """The cached part of an agent's transcript. `owner`: the agent, or a session's conversation (no transcript)."""

    token_ids: tuple[int, ...] = ()
    tail: Path = Path()
    snapshots: Places = ()
    owner: AgentVersion | None = None

    @classmethod
    def of(cls, agent: AgentVersion, pieces: PieceFolder) -> Self:
        """All cache that was saved of the version."""
        if agent.cache is None or agent.transcript is None:
            return cls(owner=agent)
        tail = pieces.paths(agent.agent_id, agent.number)[0]
        return cls(agent.transcript.token_ids[: agent.cache.tokens], tail, pieces.snapshots(agent), agent)


@dataclass(frozen=True)
class FaultyPiece:
    """A file that was needed and could not be used."""

    path: Path
    kind: PieceKind | Literal["checkpoint"]
    fault: Fault


@dataclass(frozen=True)
class _Step:
    """A file that should exist, and how many of its tokens the prompt can use."""

    piece: CachePiece
    path: Path
    use_tokens: int


@dataclass(frozen=True)
class FoundOnDisk:
    """The result of a lookup. `cache`: verified; its `layers` are set even if its `room` is. `faults`: in the order
    met. `checkpoint`: address of the block whose checkpoint it resumes from, if any."""

    cache: SequenceCache
    faults: tuple[FaultyPiece, ...] = ()
    checkpoint: str | None = None


def n_readers(beside_others: bool) -> int:
    """How many threads may read. Beside running sequences it is half of the cores, because each of their steps waits
    for the slowest core (EXP-014)."""
    cores = os.cpu_count() or 1
    return max(1, min(_MOST_READERS, cores // 2 if beside_others else cores))


@dataclass(frozen=True)
class BlockLookup:
    """One lookup: lists the files that should exist, makes the arrays once, then fills them file by file.

    Attributes:
        limit: most tokens to find.
        own: of the prompt's model and salt; empty for a job with neither an agent nor a session.
        before_each: called by the reading threads before each file; an exception ends the lookup.
        make_room: allocates memory for a number of tokens; without it, or if it returns ``None``, NumPy does.
    """

    prompt: BlockChain
    limit: int
    spec: ModelCacheSpec
    own: AgentBlocks
    path_of: PathOf
    n_readers: int
    before_each: Callable[[], None] | None = None
    make_room: Callable[[int], PrefixRoom | None] | None = None

    @cached_property
    def own_tokens(self) -> int:
        """How many leading tokens the prompt and the agent's own cache share."""
        return common_length(self.own.token_ids, self.prompt.token_ids[: self.limit])

    def run(self) -> FoundOnDisk:
        """The longest prefix of blocks and the agent's own next piece."""
        cache, n_tokens, faults = self.read()
        return FoundOnDisk(cache.up_to(n_tokens), faults)

    def read(self, least_room: int = 0) -> tuple[SequenceCache, int, tuple[FaultyPiece, ...]]:
        """As `run`, in arrays for at least `least_room` tokens; also how many of their tokens are filled."""
        steps = self._block_steps()
        steps += [step for step in [self._own_step(len(steps))] if step is not None]
        planned_tokens = max(least_room, sum(step.use_tokens for step in steps))
        room = self.make_room(planned_tokens) if self.make_room and planned_tokens else None
        planned = SequenceCache(
            planned_tokens, room.layers() if room else empty_layers(self.spec, planned_tokens), room=room
        )
        target = _Target(planned.layers, self.before_each)
        loaded = list(zip(steps, target.load_all(steps, self.n_readers), strict=True))
        n_whole = sum(1 for _ in takewhile(lambda item: item[1] is None, loaded))
        n_tokens = sum(step.use_tokens for step in steps[:n_whole])
        # Later ones too: a power cut may tear many files, and a torn file that stays is not written again.
        faults = [FaultyPiece(step.path, step.piece.kind, fault) for step, fault in loaded[n_whole:] if fault]
        return planned, n_tokens, tuple(faults)

    def _block_steps(self) -> list[_Step]:
        """The prompt's leading full blocks that should exist: the agent's own, and others that have files."""
        steps: list[_Step] = []
        for index in range(self.prompt.n_blocks):
            start, path = index * BLOCK_TOKENS, self._path(index)
            is_own = self.own_tokens >= start + BLOCK_TOKENS
            if start >= self.limit or not (is_own or is_there(path)):
                break
            piece = self._piece("block", index, self.prompt.block(index))
            steps.append(_Step(piece, path, min(BLOCK_TOKENS, self.limit - start)))
        return steps

    def _own_step(self, index: int) -> _Step | None:
        """The agent's own piece after `index` full blocks, if it begins with the prompt's next tokens."""
        start = index * BLOCK_TOKENS
        use_tokens = min(self.own_tokens - start, BLOCK_TOKENS)
        if use_tokens <= 0:
            return None
        token_ids = self.own.token_ids[start : start + BLOCK_TOKENS]
        if len(token_ids) < BLOCK_TOKENS:
            return _Step(self._piece("tail", index, token_ids), self.own.tail, use_tokens)
        path = self.path_of(self.prompt.model, block_address(self.prompt.parent(index), token_ids))
        return _Step(self._piece("block", index, token_ids), path, use_tokens)

    def _piece(self, kind: PieceKind, index: int, token_ids: tuple[int, ...]) -> CachePiece:
        return CachePiece(kind, self.prompt.model, self.spec, self.prompt.parent(index), token_ids)

    @cached_property
    def n_blocks_there(self) -> int:
        """How many of the prompt's leading full blocks have files; all, for a model whose blocks have none."""
        if not self.spec.full_layers:
            return self.prompt.n_blocks
        return sum(1 for _ in takewhile(is_there, map(self._path, range(self.prompt.n_blocks))))

    def places(self) -> Iterator["_Place"]:
        """Where the prompt may resume, the longest prefix first: the agent's own snapshots, and checkpoints; for a
        model of full attention alone, only checkpoints beyond everything else that is cached."""
        own = (_Place(n, path) for n, path in reversed(self.own.snapshots) if n <= self.own_tokens)
        return merge(own, self._checkpoints(), key=lambda place: place.n_tokens, reverse=True)

    def _checkpoints(self) -> Iterator["_Place"]:
        """The checkpoints of the prompt's blocks, the last one first."""
        n_there = self.n_blocks_there
        most_else = 0 if self.spec.snapshot_layers else max(n_there * BLOCK_TOKENS, self.own_tokens)
        for index in reversed(range(min(n_there, self.limit // BLOCK_TOKENS))):
            start, path = (index + 1) * BLOCK_TOKENS, checkpoint_beside(self._path(index))
            if start + BLOCK_TOKENS <= most_else:
                break
            if is_there(path):
                ids = (read_place(path) or ("", ()))[1]
                n_tokens = start + len(ids)
                if most_else < n_tokens <= self.limit and self.prompt.token_ids[start:n_tokens] == ids:
                    yield _Place(n_tokens, path, self.prompt.addresses[index])

    def _path(self, index: int) -> Path:
        return self.path_of(self.prompt.model, self.prompt.addresses[index])


@dataclass(frozen=True)
class _Place:
    """A snapshot after `n_tokens` tokens of a prompt, and its file. `block`: for a checkpoint, its block's address."""

    n_tokens: int
    path: Path
    block: str | None = None


def load_snapshot(
    path: Path, chain: BlockChain, spec: ModelCacheSpec
) -> tuple[tuple[LayerKV, ...], tuple[LayerState, ...], Fault | None]:
    """K/V of full attention after the last full block of `chain`, and the states of the window and recurrent layers
    after all of its tokens; after a fault they hold anything."""
    layers, states = empty_layers(spec, len(chain.rest)), empty_states(spec, len(chain.token_ids))
    targets = [bytes_of(array) for arrays in (*layers, *states) for array in arrays]
    return layers, states, CachePiece.snapshot(spec, chain).load(path, targets)


class _Target:
    """K/V arrays that are being filled. A file's bytes go straight to their place, head by head."""

    def __init__(self, layers: tuple[LayerKV, ...], before_each: Callable[[], None] | None) -> None:
        self._layers = layers
        self._n_tokens = layers[0][0].shape[1]
        self._before_each = before_each
        self._heads = [
            (bytes_of(head), head.shape[-1] * head.itemsize) for pair in layers for array in pair for head in array
        ]

    def load(self, step: _Step, start: int) -> Fault | None:
        """Verify one file and put the used part of it at `start`; after a fault the arrays hold anything there. The
        unused rest is read too if it fits: that costs less than another copy of the used part."""
        if self._before_each is not None:
            self._before_each()
        piece, stop = step.piece, start + len(step.piece.token_ids)
        if stop <= self._n_tokens and not piece.is_quantised:
            return piece.load(step.path, [head[start * size : stop * size] for head, size in self._heads])
        data = np.empty(piece.layout.n_bytes, np.uint8)
        fault = piece.load(step.path, [bytes_of(data)])
        if fault is None:
            piece.unpack(data, self._layers, start, step.use_tokens)
        return fault

    def load_all(self, steps: list[_Step], n_readers: int) -> list[Fault | None]:
        """Load every file, a few at a time: one core alone does not use a memory's bandwidth."""
        starts = [index * BLOCK_TOKENS for index in range(len(steps))]  # only the last may be used in part
        n_readers = min(n_readers, len(steps))
        # Dequantising is many short calls: several threads would wait longer for the interpreter's lock than they gain.
        if n_readers < 2 or any(step.piece.is_quantised for step in steps):
            return list(map(self.load, steps, starts))
        with ThreadPoolExecutor(n_readers, thread_name_prefix="loader") as readers:
            return list(readers.map(self.load, steps, starts))


_MOST_BLOCKS: Final = 2**15


class SharedPrefixes:
    """The full blocks of recent prompts. Those seen longest ago are forgotten first."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, None] = OrderedDict()

    def note(self, addresses: Sequence[str]) -> int:
        """Remember a prompt's full blocks; returns how many leading ones an earlier prompt had."""
        n_shared = sum(1 for _ in takewhile(self._seen.__contains__, addresses))
        for address in reversed(addresses):  # a block needs those before it, so the first is forgotten last
            self._seen[address] = None
            self._seen.move_to_end(address)
        while len(self._seen) > _MOST_BLOCKS:
            self._seen.popitem(last=False)
        return n_shared


_log = logging.getLogger(__name__)

_EXPECTED: Final = ("evicted", "prompt_changed", "no_snapshot")
"""Misses that no damage caused."""


@dataclass(frozen=True)
class Lookup:
    """One prompt to look up, as in `CacheStorePort.restore`. `prompt` has the model's fingerprint and job's salt."""

    prompt: BlockChain
    agent: AgentVersion | None
    model: LoadedModel
    max_tokens: int
    is_saved: bool
    n_readers: int
    session: str | None = None
    system_tokens: int = 0

    @property
    def limit(self) -> int:
        """Most tokens that may come from a cache: the model has to see the last one."""
        return max(0, len(self.prompt.token_ids) - 1)

    def make_room(self, n_tokens: int) -> PrefixRoom | None:
        """The engine's memory for a prefix of `n_tokens` tokens, if it has its own. It includes room for the prompt and
        some of its answer, unless most of the prompt is new: the job may wait for its place in the batch, and until
        then nothing counts this memory."""
        n_prompt = len(self.prompt.token_ids)
        if 2 * n_tokens >= n_prompt:
            return self.model.make_room(n_prompt, self.max_tokens)
        return self.model.make_room(n_tokens, 0)


class PrefixLookup:
    """`misses`: how often less was reused than an agent's history allowed, by reason."""

    def __init__(
        self, parts: StoreParts, budget: DiskBudget, ram_cache: RamCache, notes: Notes, sessions: SessionCaches
    ) -> None:
        self.misses: Counter[str] = Counter()
        self._parts = parts
        self._budget = budget
        self._ram_cache = ram_cache
        self._notes = notes
        self._sessions = sessions
        self._shared = SharedPrefixes()

    def find(self, lookup: Lookup) -> Restored:
        """The longest verified prefix, or none and the reason."""
        addresses, has_snapshots = lookup.prompt.addresses, bool(lookup.model.spec.snapshot_layers)
        n_shared = self._shared.note(addresses) if lookup.agent is None or has_snapshots else 0
        restored = self._find(lookup, n_shared)
        if not has_snapshots and not lookup.system_tokens:
            return restored
        n_there = self._parts.blocks.n_there(lookup.prompt) if has_snapshots else 0
        places = checkpoint_places(
            lookup.model.spec,
            n_prompt=len(lookup.prompt.token_ids),
            n_restored=restored.prefix.n_tokens if restored.prefix else 0,
            ends=(n_there * BLOCK_TOKENS, n_shared * BLOCK_TOKENS),
            system_tokens=lookup.system_tokens,
        )
        if lookup.agent is None and lookup.system_tokens in places and n_shared >= lookup.system_tokens // BLOCK_TOKENS:
            restored = replace(restored, to_share=max(restored.to_share, lookup.system_tokens))
        return replace(restored, checkpoints_at=places)

    def _find(self, lookup: Lookup, n_shared: int) -> Restored:
        """`n_shared`: how many leading blocks an earlier prompt had too."""
        addresses, agent = lookup.prompt.addresses, lookup.agent
        if agent is None:
            with self._budget.using(None, addresses):
                own, other = self._blocks_of_session(lookup)
                restored = self._from_ram(lookup, own, other) or self._from_disk(lookup, own, other)
                # A prompt of whole blocks leaves out one token of its last block.
                n_tokens = restored.prefix.n_tokens if restored.prefix else 0
                n_saved = (n_tokens + (n_tokens == lookup.limit)) // BLOCK_TOKENS
                if n_saved:
                    self._notes.read(addresses[n_saved - 1])
                return replace(restored, to_share=n_shared * BLOCK_TOKENS if n_shared > n_saved else 0)
        own, other = self._own_blocks(lookup, agent)
        with self._budget.using(agent.agent_id, addresses):
            in_ram = None if other else self._from_ram(lookup, own, None)
            return in_ram or self._from_disk(lookup, own, other)

    def _from_ram(self, lookup: Lookup, own: AgentBlocks, other: str | None) -> Restored | None:
        """The prefix in RAM; ``None`` when there is none or the disk may have a longer one. The engine goes on in the
        arrays that are there if the prompt fits into them, nothing else uses them and the turn will be saved; otherwise
        it gets a copy."""
        if own.owner is None:
            return None
        cache = self._ram_cache.find(own.owner, lookup.prompt, lookup.model.spec)
        if cache is None or cache.n_tokens < self._most_on_disk(lookup, own):
            return None
        reason = self._report(lookup, own, FoundOnDisk(cache), other if cache.n_tokens < lookup.limit else None)
        room = cache.room
        if lookup.is_saved and room is not None and room.has_room_for(len(lookup.prompt.token_ids)):
            self._ram_cache.drop(own.owner.agent_id)
            cache = replace(cache, layers=())
            if not room.is_viewed:
                return Restored(cache, "memory", miss_reason=reason)  # the turn gives it back
            cache = replace(cache, layers=room.layers()).up_to(cache.n_tokens)
        room = lookup.make_room(cache.n_tokens)
        return Restored(cache if room is None else cache.copied_into(room), "memory", miss_reason=reason)

    def _most_on_disk(self, lookup: Lookup, own: AgentBlocks) -> int:
        """How many tokens of the prompt a lookup on disk may find."""
        on_disk = self._on_disk(lookup, own)
        n_tokens = max((place.n_tokens for place in islice(on_disk.places(), 1)), default=0)
        if lookup.model.spec.snapshot_layers:
            return n_tokens
        return max(n_tokens, on_disk.own_tokens, min(lookup.limit, on_disk.n_blocks_there * BLOCK_TOKENS))

    def _from_disk(self, lookup: Lookup, own: AgentBlocks, other: str | None) -> Restored:
        """`other`: why the agent's own cache cannot be used."""
        found = find_prefix(self._on_disk(lookup, own))
        if lookup.session is not None and any(x.fault == "missing" and x.kind != "block" for x in found.faults):
            own, other = self._blocks_of_session(lookup)  # another call has replaced its files meanwhile
            found = find_prefix(self._on_disk(lookup, own))
        cache = found.cache
        reason = self._report(lookup, own, found, other if cache.n_tokens < lookup.limit else None)
        if found.checkpoint is not None:
            self._notes.resumed(found.checkpoint)
        if not cache.n_tokens:
            return Restored(None, "none", miss_reason=reason)
        if lookup.agent is not None:
            self._keep(lookup, lookup.agent, cache)
        return Restored(replace(cache, layers=()) if cache.room else cache, "disk", miss_reason=reason)

    def _on_disk(self, lookup: Lookup, own: AgentBlocks) -> BlockLookup:
        spec, path_of = lookup.model.spec, self._parts.blocks.path_of
        return BlockLookup(
            lookup.prompt, lookup.limit, spec, own, path_of, lookup.n_readers, make_room=lookup.make_room
        )

    def _keep(self, lookup: Lookup, agent: AgentVersion, cache: SequenceCache) -> None:
        """Keep in RAM what was read from disk. The engine's memory comes back with a turn that is saved; otherwise it
        is copied here."""
        if cache.room is not None:
            if lookup.is_saved or cache.n_tokens * lookup.model.spec.bytes_per_token > self._ram_cache.max_bytes:
                return
            layers = tuple((keys.copy(), values.copy()) for keys, values in cache.layers)
            cache = replace(cache, layers=layers, room=None)
        chain = lookup.prompt.up_to(cache.n_tokens)
        self._ram_cache.put(agent.agent_id, RamCacheEntry(agent.number, chain, cache))

    def _blocks_of_session(self, lookup: Lookup) -> tuple[AgentBlocks, str | None]:
        """The session's conversation that shares most with the prompt, and the reason if that is little."""
        if lookup.session is None:
            return AgentBlocks(), None
        try:
            kept = self._sessions.conversations(lookup.session, lookup.prompt)
        except (OSError, Damaged) as error:
            _log.warning("session %r: its caches cannot be looked up: %s", lookup.session, error)
            return AgentBlocks(), None
        has_snapshots = bool(lookup.model.spec.snapshot_layers)
        n_there = 0 if has_snapshots else self._parts.blocks.n_there(lookup.prompt) * BLOCK_TOKENS
        reason = why_missed(kept, len(lookup.prompt.token_ids), n_elsewhere=n_there, has_snapshots=has_snapshots)
        longest = max(kept, key=lambda one: one.n_common, default=None)
        if longest is None:
            return AgentBlocks(), None
        row = longest.row
        if longest.goes_on:
            self._notes.used(row.agent_id)
        owner = AgentVersion(row.agent_id, row.version, None, evicted=row.evicted)
        return AgentBlocks(longest.token_ids, longest.tail, longest.snapshots, owner), reason

    def _own_blocks(self, lookup: Lookup, agent: AgentVersion) -> tuple[AgentBlocks, str | None]:
        """The agent's own cache, if this model and salt may use it; else none and the reason."""
        model, cache, transcript = lookup.model, agent.cache, agent.transcript
        nothing = AgentBlocks(owner=agent)
        if cache is None or transcript is None:
            is_lost = agent.number > 0 and transcript is None and not agent.begins_again
            return nothing, "transcript_unreadable" if is_lost else None
        if transcript.tokenizer_fingerprint != model.tokenizer_fingerprint:
            return nothing, "other_tokenizer"
        if cache.model != model.fingerprint:
            return nothing, "other_model"
        if cache.salt != lookup.prompt.salt:
            return nothing, "other_salt"
        return AgentBlocks.of(agent, self._parts.pieces), None

    def _report(self, lookup: Lookup, own: AgentBlocks, found: FoundOnDisk, other: str | None) -> str | None:
        """Remove files that could not be used, so that the next save writes them again; log and return the first reason
        of a miss."""
        for faulty in found.faults:
            if faulty.fault != "missing":
                with contextlib.suppress(OSError):
                    self._parts.files.remove(faulty.path)
            if faulty.kind in ("block", "checkpoint"):
                self._notes.block_changed(faulty.path)
            elif own.owner is not None:
                self._notes.pieces_changed(own.owner.agent_id)
        was_evicted = own.owner is not None and own.owner.evicted
        reasons = [
            "evicted" if was_evicted and faulty.fault == "missing" else f"{faulty.kind}_{faulty.fault}"
            for faulty in found.faults
        ] or ([other] if other else [])
        if not reasons:
            return None
        where = f": {found.faults[0].path}" if found.faults else ""
        level = logging.INFO if reasons[0] in _EXPECTED else logging.WARNING
        agent, session = lookup.agent, lookup.session
        whose = f"agent {agent.agent_id!r}" if agent else f"session {session!r}" if session else "no agent"
        _log.log(level, "%s: cache missed after %d tokens: %s%s", whose, found.cache.n_tokens, reasons[0], where)
        self.misses[reasons[0]] += 1
        return reasons[0]


def find_prefix(lookup: BlockLookup) -> FoundOnDisk:
    """The longest prefix on disk. With window or recurrent layers it ends at the last whole snapshot or checkpoint
    within the prompt whose preceding blocks are all whole."""
    spec, faults = lookup.spec, list[FaultyPiece]()
    blocks: SequenceCache | None = None
    n_whole = 0
    for place in lookup.places():
        n_tokens, n_before = place.n_tokens, place.n_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        if blocks is not None and n_whole < n_before:
            continue
        if lookup.before_each is not None:
            lookup.before_each()
        chain = lookup.prompt.up_to(n_tokens)
        rest, states, fault = load_snapshot(place.path, chain, spec)
        if fault == "foreign" and place.block and (read_place(place.path) or ("", ()))[1] != chain.rest:
            continue  # a save has replaced it since it was listed
        if fault is not None:
            faults.append(FaultyPiece(place.path, "checkpoint" if place.block else "snapshot", fault))
            continue
        if blocks is None:
            blocks, n_whole = SequenceCache(n_tokens, ()), n_before
            if spec.full_layers:
                blocks, n_whole, of_blocks = replace(lookup, limit=n_before).read(n_tokens)
                faults += of_blocks
        if n_whole >= n_before:
            cache = blocks.up_to(n_tokens)
            for (keys, values), (to_keys, to_values) in zip(rest, cache.layers, strict=True):
                to_keys[:, n_before:], to_values[:, n_before:] = keys, values
            snapshots = (Snapshot(n_tokens, states),) if states else ()
            return FoundOnDisk(replace(cache, snapshots=snapshots), tuple(faults), place.block)
    if spec.snapshot_layers:
        return FoundOnDisk(SequenceCache(0, ()), tuple(faults))
    if blocks is not None:
        return FoundOnDisk(blocks.up_to(n_whole), tuple(faults))
    found = lookup.run()
    return replace(found, faults=(*faults, *found.faults))
