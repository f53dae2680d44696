"""Looks up the longest cached prefix of a prompt: in RAM, then on disk. Loader thread; writes nothing.

Owns the choice between the two, and the name of a miss. `RamCache` keeps the copies in RAM. On disk, the K/V of full
attention may be cut anywhere, so the prefix ends where the blocks do. A model with window or recurrent layers resumes
only where one of the agent's own snapshots was taken.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile

from stoker_worker.memory.block_chain import BlockChain, common_length
from stoker_worker.memory.block_lookup import AgentBlocks, BlockLookup, DiskPrefix, FaultyPiece, load_snapshot
from stoker_worker.memory.budget import DiskBudget
from stoker_worker.memory.files import is_there
from stoker_worker.memory.notes import Notes
from stoker_worker.memory.ram_cache import RamCache
from stoker_worker.memory.shared_prefixes import SharedPrefixes
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.ports import AgentVersion, LoadedModel, PrefixRoom, Restored, RestoredPrefix
from stoker_worker.ports.cache_spec import BLOCK_TOKENS

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lookup:
    """One prompt to look up.

    Attributes:
        prompt: with the model's fingerprint and the job's salt.
        agent: ``None`` for a job without one.
        max_tokens: most tokens that come after the prompt.
        is_saved: whether the engine hands the cache back, for the turn to be saved.
        n_readers: threads that may read.
    """

    prompt: BlockChain
    agent: AgentVersion | None
    model: LoadedModel
    max_tokens: int
    is_saved: bool
    n_readers: int

    @property
    def limit(self) -> int:
        """Most tokens that may come from a cache: the model has to see the last one."""
        return max(0, len(self.prompt.token_ids) - 1)

    @property
    def make_room(self) -> Callable[[int], PrefixRoom] | None:
        """Makes the engine's memory for a prefix of so many tokens, if the engine has a way to.

        With room for the prompt and some of its answer, unless most of the prompt is new: the job may wait for its
        place in the batch, and until then nothing counts this memory.
        """
        make, n_prompt = self.model.make_room, len(self.prompt.token_ids)
        if make is None:
            return None
        return lambda n: make(n_prompt, self.max_tokens) if 2 * n >= n_prompt else make(n, 0)


class PrefixLookup:
    """
    Attributes:
        misses: how often less was reused than an agent's history allowed, by reason.
    """

    def __init__(self, parts: StoreParts, budget: DiskBudget, ram_cache: RamCache, notes: Notes) -> None:
        self.misses: Counter[str] = Counter()
        self._parts = parts
        self._path_of = parts.blocks.path_of
        self._budget = budget
        self._ram_cache = ram_cache
        self._notes = notes
        self._shared = SharedPrefixes()

    def find(self, lookup: Lookup) -> Restored:
        """The longest verified prefix, or none and the reason."""
        addresses, agent = lookup.prompt.addresses, lookup.agent
        if agent is None:
            with self._budget.holds.lending(addresses):
                n_shared = self._shared.note(addresses)
                restored = self._from_disk(lookup, AgentBlocks(), None)
                if restored.saved_blocks:
                    self._notes.read(addresses[restored.saved_blocks - 1])
                return replace(restored, shared_blocks=n_shared)
        own, other = self._own_blocks(lookup, agent)
        with self._budget.holds.using(agent.agent_id, addresses):
            in_ram = other is None and agent.agent_id in self._ram_cache
            return (self._from_ram(lookup, agent, own) if in_ram else None) or self._from_disk(lookup, own, other)

    def _from_ram(self, lookup: Lookup, agent: AgentVersion, own: AgentBlocks) -> Restored | None:
        """The prefix in RAM; ``None`` when the disk may have a longer one."""
        paths = (self._path_of(lookup.prompt.model, address) for address in lookup.prompt.addresses)
        saved_blocks = sum(1 for _ in takewhile(is_there, paths))
        disk_tokens = common_length(own.token_ids, lookup.prompt.token_ids[: lookup.limit])
        if not lookup.model.spec.snapshot_layers:
            disk_tokens = max(disk_tokens, min(lookup.limit, saved_blocks * BLOCK_TOKENS))
        spec, make_room = lookup.model.spec, lookup.make_room
        prefix = self._ram_cache.restore(
            lookup.prompt, agent=agent, spec=spec, disk_tokens=disk_tokens, make_room=make_room
        )
        if prefix is None:
            return None
        # A prompt of whole blocks leaves out one token, and its last block needs no second write all the same.
        return Restored(prefix, "memory", saved_blocks=min(saved_blocks, (prefix.n_tokens + 1) // BLOCK_TOKENS))

    def _from_disk(self, lookup: Lookup, own: AgentBlocks, other: str | None) -> Restored:
        """`other`: why the agent's own cache cannot be used."""
        spec, agent = lookup.model.spec, lookup.agent
        found = find_prefix(
            BlockLookup(
                lookup.prompt,
                lookup.limit,
                spec,
                own,
                self._path_of,
                lookup.n_readers,
                make_room=lookup.make_room,
            )
        )
        reason = self._report(lookup, found, other if found.n_tokens < lookup.limit else None)
        if not found.n_tokens:
            return Restored(None, "none", saved_blocks=found.saved_blocks, miss_reason=reason)
        if agent is not None:
            self._keep(lookup, agent, found, has_all=found.n_tokens >= len(own.token_ids))
        layers = () if found.room else found.layers
        prefix = RestoredPrefix(found.n_tokens, layers, found.states, found.room)
        return Restored(prefix, "disk", saved_blocks=found.saved_blocks, miss_reason=reason)

    def _keep(self, lookup: Lookup, agent: AgentVersion, found: DiskPrefix, *, has_all: bool) -> None:
        """Keep in RAM what was read from disk. The engine's memory comes back when its turn is saved; only a prompt
        that is never saved makes a copy."""
        layers = found.layers
        if found.room is not None:
            if lookup.is_saved or found.n_tokens * lookup.model.spec.bytes_per_token > self._ram_cache.max_bytes:
                return
            layers = tuple((keys.copy(), values.copy()) for keys, values in layers)
        prefix = RestoredPrefix(found.n_tokens, layers, found.states)
        self._ram_cache.loaded(prefix, lookup.prompt, agent=agent, has_all=has_all)

    def _own_blocks(self, lookup: Lookup, agent: AgentVersion) -> tuple[AgentBlocks, str | None]:
        """The agent's own cache, if this model and salt may use it; else none and why."""
        model, cache, transcript = lookup.model, agent.cache, agent.transcript
        if cache is None or transcript is None:
            is_lost = agent.number > 0 and transcript is None and not agent.begins_again
            return AgentBlocks(), "transcript_unreadable" if is_lost else None
        if transcript.tokenizer_fingerprint != model.tokenizer_fingerprint:
            return AgentBlocks(), "other_tokenizer"
        if cache.model != model.fingerprint:
            return AgentBlocks(), "other_model"
        if cache.salt != lookup.prompt.salt:
            return AgentBlocks(), "other_salt"
        return AgentBlocks.of(agent, self._parts.pieces), None

    def _report(self, lookup: Lookup, found: DiskPrefix, other: str | None) -> str | None:
        """Remove damaged files, so that the next save writes them again; log the first reason of a miss and return
        it."""
        agent = lookup.agent
        for faulty in found.faults:
            if faulty.fault != "missing":
                with contextlib.suppress(OSError):
                    self._parts.files.remove(faulty.path)
            if faulty.kind == "block":
                self._notes.block_changed(faulty.path)
            elif agent is not None:
                self._notes.pieces_changed(agent.agent_id)
        was_evicted = agent is not None and agent.evicted
        reasons = [
            "evicted" if was_evicted and faulty.fault == "missing" else f"{faulty.kind}_{faulty.fault}"
            for faulty in found.faults
        ] or ([other] if other else [])
        if not reasons:
            return None
        where = f": {found.faults[0].path}" if found.faults else ""
        level = logging.INFO if reasons[0] == "evicted" else logging.WARNING
        whose = "no agent" if agent is None else f"agent {agent.agent_id!r}"
        _log.log(level, "%s: cache missed after %d tokens: %s%s", whose, found.n_tokens, reasons[0], where)
        self.misses[reasons[0]] += 1
        return reasons[0]


def find_prefix(lookup: BlockLookup) -> DiskPrefix:
    """The longest prefix on disk; with window or recurrent layers it ends at the agent's last snapshot within the
    prompt that is whole and whose K/V is there."""
    spec, prompt = lookup.spec, lookup.prompt
    if not spec.snapshot_layers:
        return lookup.run()
    faults: list[FaultyPiece] = []
    blocks: DiskPrefix | None = None
    for n_tokens, path in reversed(lookup.own.snapshots):
        if n_tokens > lookup.own_tokens:
            continue
        states, fault = load_snapshot(path, prompt.up_to(n_tokens), spec)
        if fault is not None:
            faults.append(FaultyPiece(path, "snapshot", fault))
            continue
        if blocks is None:
            blocks = replace(lookup, limit=n_tokens).run() if spec.full_layers else DiskPrefix(n_tokens)
            faults += blocks.faults
        if blocks.n_tokens >= n_tokens:
            if blocks.n_tokens > n_tokens:
                blocks.cut(n_tokens)
            return DiskPrefix(n_tokens, blocks.saved_blocks, blocks.layers, states, faults, blocks.room)
    return DiskPrefix(saved_blocks=blocks.saved_blocks if blocks else 0, faults=faults)
