"""Keeps the caches of a session's calls, each of which carries its whole conversation. Loader and finisher threads.

A session may have side calls under its name, so it has up to 16 conversations; the one used longest ago is replaced
first. Each is a row in `agents` without a transcript, whose version counts its calls, so its cache is evicted and
removed like an agent's: the blocks of its last prompt and answer, and the tail or the snapshots after them. A call
belongs to the conversation whose tokens it continues; no field names it. A row's name begins with a newline, which no
agent's id does.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from stoker_worker.memory import cache_index, transcripts
from stoker_worker.memory.agent_changes import forget_agent
from stoker_worker.memory.blocks import BlockChain, Places, read_place
from stoker_worker.memory.database import Connection, Damaged
from stoker_worker.memory.eviction import DiskBudget
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.memory.transcripts import AgentRow
from stoker_worker.memory.turn_saver import LOG_BYTES, enter_saved, own_pieces
from stoker_worker.ports import LoadedModel, SequenceCache
from stoker_worker.ports.cache_spec import BLOCK_TOKENS
from stoker_worker.ports.memory import common_length

MOST_CONVERSATIONS: Final = 16
"""Of one session, model and salt."""

_OPENING_TOKENS: Final = 8
"""A template may write the end of a prompt, where the answer begins, differently once the answer is there."""

_MOST_STEPS: Final = 4096
"""Blocks of one conversation that are searched for the place where a prompt leaves it: a million tokens."""

_MOST_LOOKS: Final = 4

_FIRST: Final = "\n"


def is_of_session(name: str) -> bool:
    """True if a row in `agents` is a session's."""
    return name.startswith(_FIRST)


def shown(name: str) -> str:
    """The name of a row in `agents` for logs."""
    return f"conversation of session {name.split(_FIRST)[1]!r}" if is_of_session(name) else f"agent {name!r}"


def names_of(session: str, root: str) -> list[str]:
    """The names that the session's conversations may have. `root`: of their chains, the same for one model and salt."""
    start = f"{_FIRST}{session}{_FIRST}{root[:32]}{_FIRST}"
    return [f"{start}{n}" for n in range(MOST_CONVERSATIONS)]


@dataclass(frozen=True)
class KeptConversation:
    """A conversation of a session, compared with a prompt.

    Attributes:
        prompt_tokens: in the prompt of its last call.
        token_ids: the cached tokens, up to the end of the first piece in which the two differ.
        tail: its file.
        snapshots: those within the common tokens: after how many each was taken, ascending, and its file.
        n_common: leading tokens that both have.
    """

    row: AgentRow
    prompt_tokens: int
    token_ids: tuple[int, ...]
    tail: Path
    snapshots: Places
    n_common: int

    @property
    def goes_on(self) -> bool:
        """True if the prompt begins with the prompt of this conversation's last call, except perhaps for its last few
        tokens."""
        return self.n_common >= max(self.prompt_tokens - _OPENING_TOKENS, self.prompt_tokens // 2 + 1)


def why_missed(kept: list[KeptConversation], n_prompt: int, *, n_elsewhere: int, has_snapshots: bool) -> str | None:
    """Why a prompt of `n_prompt` tokens finds less than its session has cached; ``None``: it finds what it may expect.
    `kept`: the session's conversations, most recently used first. `n_elsewhere`: how many tokens of the prompt others
    have cached. `has_snapshots`: whether the model resumes at snapshots only."""
    longest = max(kept, key=lambda one: one.n_common, default=None)
    last = next((one for one in kept if one.prompt_tokens <= n_prompt), None)
    if longest is None or last is None:
        return None
    if has_snapshots and longest.n_common and not longest.snapshots:
        return "no_snapshot"
    if 2 * max(longest.n_common, n_elsewhere) >= last.prompt_tokens:
        return None
    return "evicted" if last.row.evicted and last.n_common == len(last.token_ids) else "prompt_changed"


class SessionCaches:
    def __init__(self, parts: StoreParts, budget: DiskBudget) -> None:
        self._database = parts.database
        self._blocks = parts.blocks
        self._pieces = parts.pieces
        self._budget = budget
        self._lock = threading.Lock()
        self._saving: set[str] = set()

    def conversations(self, session: str, prompt: BlockChain) -> list[KeptConversation]:
        """The session's conversations of the prompt's model and salt, most recently used first. Raises `OSError`,
        `Damaged`."""
        n_before = {prompt.root: 0} | {address: n for n, address in enumerate(prompt.addresses, start=1)}
        names = names_of(session, prompt.root)
        kept: list[KeptConversation] = []
        for _ in range(_MOST_LOOKS):
            with self._database.snapshot() as connection:
                rows = transcripts.session_rows(connection, names)
                kept = [self._compare(connection, row, n_prompt, prompt, n_before) for row, n_prompt in rows]
            with self._database.snapshot() as connection:  # a save may have removed files meanwhile
                now = transcripts.session_rows(connection, names)
            if {row.agent_id: row.version for row, _ in rows} == {row.agent_id: row.version for row, _ in now}:
                break
        return kept

    def save(
        self, session: str, chain: BlockChain, cache: SequenceCache, *, prompt_tokens: int, model: LoadedModel
    ) -> tuple[str, int, int]:
        """Keep the cache of a call's prompt and answer, in place of that of the conversation that it continues.
        `chain`: of the cached tokens, `prompt_tokens` of which are the prompt. Returns the name of the conversation,
        its version, and how many bytes the store has grown at most. Raises `OSError`, `Damaged`: what was kept before
        still is."""
        with self._budget.using(None, chain.addresses):
            name, version, before = self._take(session, chain)
            save = partial(
                self._save, name, version, chain, cache, before=before, prompt_tokens=prompt_tokens, model=model
            )
            most_bytes = LOG_BYTES + model.spec.bytes_per_token * len(chain.token_ids)
            try:
                n_bytes = self._budget.with_room(save, lambda: most_bytes)
            finally:
                with self._lock:
                    self._saving.discard(name)
        return name, version, n_bytes

    def _save(
        self,
        name: str,
        version: int,
        chain: BlockChain,
        cache: SequenceCache,
        *,
        before: Places,
        prompt_tokens: int,
        model: LoadedModel,
    ) -> int:
        spec, now = model.spec, time.time()
        pieces = own_pieces(chain, cache, spec, self._pieces.paths(name, version))

        def change(connection: Connection) -> None:
            row = transcripts.write_session(
                connection, name, version, prompt_tokens=prompt_tokens, cached_tokens=len(chain.token_ids), now=now
            )
            enter_saved(connection, self._blocks, chain, saved, spec, now=now)
            cache_index.use_chain(connection, row.number, chain, now=now)
            cache_index.set_piece_bytes(connection, row.number, piece_bytes)
            cache_index.note_model(connection, model.fingerprint, spec.describe())

        try:
            saved = self._blocks.save(chain, cache, spec, before=before)
            piece_bytes = self._pieces.write(pieces)
            self._database.commit(change)
        except (OSError, Damaged):
            self._pieces.remove(pieces)
            raise
        for path in self._pieces.keep_only(pieces, name, version, outlived=saved.outlived):
            self._budget.notes.block_changed(path)
        return saved.n_bytes + piece_bytes + LOG_BYTES

    def _take(self, session: str, chain: BlockChain) -> tuple[str, int, Places]:
        """Reserve a row in `_saving`: its name, its next version, and the snapshots that the call continues from. It is
        the row of the conversation that the call continues; or a free one; or the one used longest ago."""
        with self._lock:
            kept = self.conversations(session, chain)
            idle = [one for one in kept if one.row.agent_id not in self._saving]
            longest = max((one for one in idle if one.goes_on), key=lambda one: one.n_common, default=None)
            in_use = {one.row.agent_id for one in kept} | self._saving
            free = next((name for name in names_of(session, chain.root) if name not in in_use), None)
            if longest is None and free is None:
                longest = idle[-1]  # fewer threads than conversations
            name, version = (longest.row.agent_id, longest.row.version) if longest else (str(free), 0)
            self._saving.add(name)
            return name, version + 1, longest.snapshots if longest else ()

    def _compare(
        self, connection: Connection, row: AgentRow, n_prompt: int, prompt: BlockChain, n_before: Mapping[str, int]
    ) -> KeptConversation:
        """`n_before`: how many blocks of the prompt come up to each address, its root's included."""
        tail, *places = self._pieces.paths(row.agent_id, row.version)
        snapshots = []
        for path in places:
            after = _after(path, n_before)
            if after is not None and prompt.token_ids[after[0] : after[0] + len(after[1])] == after[1]:
                snapshots.append((after[0] + len(after[1]), path))
        last = next((after for path in (tail, *reversed(places)) if (after := _after(path, n_before))), None)
        start, rest = last or self._end_of_chain(connection, row, prompt.model, n_before)
        token_ids = (*prompt.token_ids[:start], *rest)
        n_common = common_length(token_ids, prompt.token_ids)
        return KeptConversation(row, n_prompt, token_ids, tail, tuple(snapshots), n_common)

    def _end_of_chain(
        self, connection: Connection, row: AgentRow, model: str, n_before: Mapping[str, int]
    ) -> tuple[int, tuple[int, ...]]:
        """How many leading tokens the prompt shares with the conversation's blocks, and the tokens of the one after."""
        if row.last_block is None:
            return 0, ()
        if (n_blocks := n_before.get(row.last_block.hex())) is not None:
            return n_blocks * BLOCK_TOKENS, ()
        for address, parent in cache_index.addresses_back(connection, row.last_block, _MOST_STEPS):
            if parent in n_before:
                return _after(self._blocks.path_of(model, address), n_before) or (0, ())
        return 0, ()


def remove_session(parts: StoreParts, session: str) -> tuple[int, int]:
    """Remove what is kept of the session, for every model and salt, and the blocks that only it used; returns how many
    conversations and blocks. A call that is still running is saved when it ends. Raises `OSError`: some files or rows
    are left; `Damaged`."""
    with parts.database.snapshot() as connection:
        names = transcripts.session_names(connection, f"{_FIRST}{session}{_FIRST}")
    blocks = sum(forget_agent(parts, name, only_here=True).blocks for name in names)
    return len(names), blocks


def _after(path: Path, n_before: Mapping[str, int]) -> tuple[int, tuple[int, ...]] | None:
    """How many tokens come before a cache file, and its own as its header has them: the user of the file verifies both.
    ``None``: it does not follow a block of the prompt, or is not there."""
    parent, ids = read_place(path) or ("", ())
    n_blocks = n_before.get(parent)
    return None if n_blocks is None else (n_blocks * BLOCK_TOKENS, ids)
