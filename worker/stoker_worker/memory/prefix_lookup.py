"""Looks up the longest cached prefix of a prompt: in RAM, then on disk. Loader thread; writes nothing.

Owns the choice between the two, and the name of a miss. `RamCache` keeps the copies in RAM. On disk, the K/V of full
attention may be cut anywhere, so the prefix ends where the blocks do. A model with window or recurrent layers resumes
only where one of the agent's own snapshots was taken.
"""

import contextlib
import logging
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile

from stoker_worker.memory.block_chain import BlockChain, common_length
from stoker_worker.memory.block_lookup import (
    AgentBlocks,
    BlockLookup,
    DiskPrefix,
    DiskSource,
    FaultyPiece,
    load_snapshot,
)
from stoker_worker.memory.budget import DiskBudget
from stoker_worker.memory.files import is_there
from stoker_worker.memory.notes import Notes
from stoker_worker.memory.ram_cache import RamCache
from stoker_worker.memory.shared_prefixes import SharedPrefixes
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.ports import AgentVersion, LoadedModel, Restored, RestoredPrefix
from stoker_worker.ports.cache_spec import BLOCK_TOKENS

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lookup:
    """One prompt to look up.

    Attributes:
        prompt: with the model's fingerprint and the job's salt.
        agent: ``None`` for a job without one.
        n_readers: threads that may read.
    """

    prompt: BlockChain
    agent: AgentVersion | None
    model: LoadedModel
    n_readers: int

    @property
    def limit(self) -> int:
        """Most tokens that may come from a cache: the model has to see the last one."""
        return max(0, len(self.prompt.token_ids) - 1)


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
        addresses = lookup.prompt.addresses
        if (agent := lookup.agent) is None:
            with self._budget.holds.lending(addresses):
                return self._without_agent(lookup)
        own, other = self._own_blocks(lookup, agent)
        with self._budget.holds.using(agent.agent_id, addresses):
            restored = None
            if other is None and agent.agent_id in self._ram_cache:
                paths = (self._path_of(lookup.prompt.model, address) for address in addresses)
                saved_blocks = sum(1 for _ in takewhile(is_there, paths))
                restored = self._from_ram(lookup, agent, own, saved_blocks)
            return restored or self._from_disk(lookup, agent, own, other)

    def _without_agent(self, lookup: Lookup) -> Restored:
        """The blocks that other jobs of this salt left of the same beginning."""
        n_shared = self._shared.note(lookup.prompt.addresses)
        found = find_on_disk(lookup.prompt, lookup.limit, self._source(lookup, AgentBlocks()))
        reason = self._report(lookup, found, None)
        if found.saved_blocks:
            self._notes.read(lookup.prompt.addresses[found.saved_blocks - 1])
        prefix = RestoredPrefix(found.n_tokens, found.layers) if found.n_tokens else None
        return Restored(
            prefix, "disk" if prefix else "none", found.saved_blocks, miss_reason=reason, shared_blocks=n_shared
        )

    def _from_ram(self, lookup: Lookup, agent: AgentVersion, own: AgentBlocks, saved_blocks: int) -> Restored | None:
        """The prefix in RAM; ``None`` when the disk may have a longer one."""
        disk_tokens = common_length(own.token_ids, lookup.prompt.token_ids[: lookup.limit])
        if not lookup.model.spec.snapshot_layers:
            disk_tokens = max(disk_tokens, min(lookup.limit, saved_blocks * BLOCK_TOKENS))
        prefix = self._ram_cache.restore(lookup.prompt, agent=agent, spec=lookup.model.spec, disk_tokens=disk_tokens)
        if prefix is None:
            return None
        # A prompt of whole blocks leaves out one token, and its last block needs no second write all the same.
        return Restored(prefix, "memory", saved_blocks=min(saved_blocks, (prefix.n_tokens + 1) // BLOCK_TOKENS))

    def _from_disk(self, lookup: Lookup, agent: AgentVersion, own: AgentBlocks, other: str | None) -> Restored:
        """`other`: why the agent's own cache cannot be used."""
        found = find_on_disk(lookup.prompt, lookup.limit, self._source(lookup, own))
        reason = self._report(lookup, found, other if found.n_tokens < lookup.limit else None)
        if not found.n_tokens:
            return Restored(None, "none", saved_blocks=found.saved_blocks, miss_reason=reason)
        prefix = RestoredPrefix(found.n_tokens, found.layers, found.states)
        has_all = prefix.n_tokens >= len(own.token_ids)
        self._ram_cache.loaded(prefix, lookup.prompt, agent=agent, has_all=has_all)
        return Restored(prefix, "disk", saved_blocks=found.saved_blocks, miss_reason=reason)

    def _source(self, lookup: Lookup, own: AgentBlocks) -> DiskSource:
        return DiskSource(lookup.model.spec, own, self._path_of, lookup.n_readers)

    def _own_blocks(self, lookup: Lookup, agent: AgentVersion) -> tuple[AgentBlocks, str | None]:
        """The agent's own cache, if this model and salt may use it; else none and why."""
        model, cache, transcript = lookup.model, agent.cache, agent.transcript
        if cache is None or transcript is None:
            is_lost = agent.number > 0 and transcript is None
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
        self._notes.missing([faulty.path for faulty in found.faults if faulty.kind == "block"])
        if agent is not None and any(faulty.kind != "block" for faulty in found.faults):
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


def find_on_disk(prompt: BlockChain, limit: int, source: DiskSource) -> DiskPrefix:
    """The longest prefix on disk, of at most `limit` tokens."""
    if not source.spec.snapshot_layers:
        return BlockLookup(prompt, limit, source).run()
    return _find_snapshot(prompt, limit, source)


def _find_snapshot(prompt: BlockChain, limit: int, source: DiskSource) -> DiskPrefix:
    """The agent's last snapshot within the prompt that is whole and whose K/V is there."""
    own, faults = source.own, []
    own_tokens = common_length(own.token_ids, prompt.token_ids[:limit])
    blocks: DiskPrefix | None = None
    for n_tokens, path in reversed(own.snapshots):
        if n_tokens > own_tokens:
            continue
        states, fault = load_snapshot(path, prompt.up_to(n_tokens), source.spec)
        if fault is not None:
            faults.append(FaultyPiece(path, "snapshot", fault))
            continue
        if blocks is None:
            blocks = _blocks_up_to(n_tokens, prompt, source)
            faults += blocks.faults
        if blocks.n_tokens >= n_tokens:
            if blocks.n_tokens > n_tokens:
                blocks.cut(n_tokens)
            return DiskPrefix(n_tokens, blocks.saved_blocks, blocks.layers, states, faults)
    return DiskPrefix(saved_blocks=blocks.saved_blocks if blocks else 0, faults=faults)


def _blocks_up_to(n_tokens: int, prompt: BlockChain, source: DiskSource) -> DiskPrefix:
    return BlockLookup(prompt, n_tokens, source).run() if source.spec.full_layers else DiskPrefix(n_tokens)
