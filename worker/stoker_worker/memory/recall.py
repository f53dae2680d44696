"""What a prompt gets of its agent's memory: from RAM, from disk, or nothing and why. Loader thread.

Owns the choice between the two and what is said about a miss. `restore` reads the files, `hot` keeps what is in RAM.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from stoker_worker.cache_spec import BLOCK_TOKENS
from stoker_worker.memory.agent_folder import AgentFolder
from stoker_worker.memory.agent_state import AgentState
from stoker_worker.memory.block_folder import BlockFolder
from stoker_worker.memory.block_paths import chain_paths
from stoker_worker.memory.block_search import Found, OwnCache, Source
from stoker_worker.memory.blocks import common_length
from stoker_worker.memory.budget import DiskBudget
from stoker_worker.memory.files import Files, is_there
from stoker_worker.memory.hot import HotMemory
from stoker_worker.memory.restore import find_prefix
from stoker_worker.memory.shared_prefixes import SharedPrefixes
from stoker_worker.ports import AgentVersion, LoadedModel, Restored, RestoredPrefix

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """Whose memory is asked for which prompt, by which model; and how many threads may read it."""

    prompt: tuple[int, ...]
    agent: AgentVersion | None
    model: LoadedModel
    salt: str | None
    n_readers: int

    @property
    def limit(self) -> int:
        """Most tokens that may come from memory: the model has to see the last one."""
        return max(0, len(self.prompt) - 1)


class Recall:
    """
    Attributes:
        misses: how often less was reused than an agent's history allowed, by reason.
    """

    def __init__(
        self,
        files: Files,
        blocks: BlockFolder,
        budget: DiskBudget,
        hot: HotMemory,
        *,
        folder_of: Callable[[str], AgentFolder],
        state_of: Callable[[str], AgentState],
    ) -> None:
        self.misses: Counter[str] = Counter()
        self._files = files
        self._blocks = blocks
        self._budget = budget
        self._hot = hot
        self._folder_of = folder_of
        self._state_of = state_of
        self._shared = SharedPrefixes()

    def answer(self, asked: Question) -> Restored:
        """The longest verified cache prefix of the prompt."""
        blocks = chain_paths(asked.model.fingerprint, asked.salt, asked.prompt, self._blocks.path_of)
        if (agent := asked.agent) is None:
            return self._for_nobody(asked, blocks)
        own, other = self._own_cache(asked, agent)
        with self._budget.using(agent.agent_id, blocks):
            restored = None
            if other is None and agent.agent_id in self._hot:
                restored = self._from_memory(asked, agent, own, blocks)
            return restored or self._from_disk(asked, agent, own, other)

    def _for_nobody(self, asked: Question, blocks: tuple[Path, ...]) -> Restored:
        """What other jobs of this salt have left of the same beginning."""
        model, n_shared = asked.model, self._shared.note(blocks)
        source = Source(model.fingerprint, asked.salt, model.spec, None, self._blocks.path_of, asked.n_readers)
        with self._budget.lending(blocks):
            found = find_prefix(asked.prompt, source)
            reason = self._report(None, found, None)
        prefix = RestoredPrefix(found.n_tokens, found.layers) if found.n_tokens else None
        return Restored(
            prefix, "disk" if prefix else "none", found.saved_blocks, miss_reason=reason, shared_blocks=n_shared
        )

    def _from_memory(
        self, asked: Question, agent: AgentVersion, own: OwnCache | None, blocks: tuple[Path, ...]
    ) -> Restored | None:
        """What the agent's hot cache gives; ``None`` when the disk may give more. `blocks` are the prompt's."""
        saved_blocks = sum(1 for _ in takewhile(is_there, blocks))
        disk_tokens = common_length(own.token_ids, asked.prompt[: asked.limit]) if own else 0
        if not asked.model.spec.snapshot_layers:
            disk_tokens = max(disk_tokens, min(asked.limit, saved_blocks * BLOCK_TOKENS))
        prefix = self._hot.restore(
            asked.prompt, agent=agent, model=asked.model, salt=asked.salt, disk_tokens=disk_tokens
        )
        if prefix is None:
            return None
        # A prompt of whole blocks leaves out one token, and its last block needs no second write all the same.
        return Restored(prefix, "memory", saved_blocks=min(saved_blocks, (prefix.n_tokens + 1) // BLOCK_TOKENS))

    def _from_disk(self, asked: Question, agent: AgentVersion, own: OwnCache | None, other: str | None) -> Restored:
        """`other`: why the agent's own cache cannot serve."""
        model = asked.model
        source = Source(model.fingerprint, asked.salt, model.spec, own, self._blocks.path_of, asked.n_readers)
        found = find_prefix(asked.prompt, source)
        reason = self._report(agent.agent_id, found, other if found.n_tokens < asked.limit else None)
        if not found.n_tokens:
            return Restored(None, "none", saved_blocks=found.saved_blocks, miss_reason=reason)
        prefix = RestoredPrefix(found.n_tokens, found.layers, found.states)
        has_all = prefix.n_tokens >= (len(own.token_ids) if own else 0)
        self._hot.loaded(prefix, asked.prompt, agent=agent, model=model, salt=asked.salt, has_all=has_all)
        return Restored(prefix, "disk", saved_blocks=found.saved_blocks, miss_reason=reason)

    def _own_cache(self, asked: Question, agent: AgentVersion) -> tuple[OwnCache | None, str | None]:
        """The agent's own cache as far as model and salt may use it, else why they may not."""
        model = asked.model
        state, transcript = self._state_of(agent.agent_id), agent.transcript
        cache = state.cache if state.version.number == agent.number else None
        if cache is None or transcript is None:
            return None, "transcript_unreadable" if state.problem and state.version.transcript is None else None
        if transcript.tokenizer_fingerprint != model.tokenizer_fingerprint:
            return None, "other_tokenizer"
        if cache.model != model.fingerprint:
            return None, "other_model"
        if cache.salt != asked.salt:
            return None, "other_salt"
        folder = self._folder_of(agent.agent_id)
        snapshots = [(n, folder.snapshot_path(agent.number, index)) for index, n in enumerate(cache.snapshots)]
        tail = folder.tail_path(agent.number)
        return OwnCache(transcript.token_ids[: cache.tokens], tail, tuple(snapshots)), None

    def _report(self, agent_id: str | None, found: Found, other: str | None) -> str | None:
        """Remove what is damaged, so that the next save writes it anew; log, count and return the first reason."""
        for faulty in found.faults:
            if faulty.fault != "missing":
                with contextlib.suppress(OSError):
                    self._files.remove(faulty.path)
        if found.faults:
            self._budget.look_again(agent_id, (faulty.path for faulty in found.faults if faulty.kind == "block"))
        was_evicted = agent_id is not None and self._budget.was_evicted(agent_id)
        reasons = [
            "evicted" if was_evicted and faulty.fault == "missing" else f"{faulty.kind}_{faulty.fault}"
            for faulty in found.faults
        ] or ([other] if other else [])
        if not reasons:
            return None
        where = f": {found.faults[0].path}" if found.faults else ""
        level = logging.INFO if reasons[0] == "evicted" else logging.WARNING
        whose = "no agent" if agent_id is None else f"agent {agent_id!r}"
        _log.log(level, "%s: cache missed after %d tokens: %s%s", whose, found.n_tokens, reasons[0], where)
        self.misses[reasons[0]] += 1
        return reasons[0]
