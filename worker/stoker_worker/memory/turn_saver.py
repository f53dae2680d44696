"""Saves a turn: first its cache files, unsynced, then its version and its answer in one transaction. Finisher threads.
On a full disk idle caches make room for it. If its cache still cannot be written, the turn is saved without."""

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

from stoker_shared.errors import AgentVersionConflict
from stoker_worker.memory import cache_index, transcripts
from stoker_worker.memory.blocks import (
    MOST_SNAPSHOTS,
    BlockChain,
    BlockFolder,
    CachePiece,
    Pieces,
    Places,
    SavedBlocks,
    fits,
    layout_of,
    state_fits,
)
from stoker_worker.memory.database import Connection, Damaged
from stoker_worker.memory.eviction import DiskBudget, is_full
from stoker_worker.memory.files import Chunk, allocated_bytes, is_there
from stoker_worker.memory.store_parts import NextVersion, StoreParts
from stoker_worker.memory.transcripts import (
    FULL_EVERY,
    UNTIL_ENDED_S,
    About,
    AgentRow,
    MadeBy,
    TurnRecord,
    delivery_key,
    delta,
)
from stoker_worker.ports import AgentVersion, CachedPrefix, Delivery, SequenceCache, Transcript, Turn
from stoker_worker.ports.cache_spec import BLOCK_TOKENS, ModelCacheSpec
from stoker_worker.ports.memory import common_length


def cached_chain(turn: Turn) -> BlockChain | None:
    """The part of the transcript that is cached after `turn`; ``None``: nothing is, not even an empty part. Raises
    `ValueError`: the turn's cache is not the cache of its transcript."""
    token_ids, cache, model = turn.transcript.token_ids, turn.cache, turn.model
    if not model.has_memory:
        return None
    if cache is not None:
        _check(turn, cache)
        n_tokens = cache.n_tokens
    elif (
        (before := turn.base.cache) is not None
        and (before.model, before.salt) == (model.fingerprint, turn.cache_salt)
        and model.spec.full_layers
    ):
        # Saved without cache: the base's blocks serve as far as its tokens were kept; tail and snapshots go.
        base = turn.base.transcript.token_ids if turn.base.transcript else ()
        n_tokens = common_length(base[: before.tokens], token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
    else:
        return None
    return BlockChain(model.fingerprint, turn.cache_salt, token_ids[:n_tokens])


def own_pieces(chain: BlockChain, cache: SequenceCache, spec: ModelCacheSpec, places: Sequence[Path]) -> Pieces:
    """A version's own files: tail or snapshots. `chain`: of the cached tokens. `places`: from `PieceFolder.paths`."""
    tail_path, *snapshot_paths = places
    pieces: dict[Path, Iterable[Chunk]] = {}
    if chain.rest and not spec.snapshot_layers:
        tail = CachePiece("tail", chain.model, spec, chain.last, chain.rest)
        pieces[tail_path] = tail.encode(cache.layers, chain.n_blocks * BLOCK_TOKENS)
    for path, snapshot in zip(snapshot_paths, cache.snapshots, strict=False):
        before = chain.up_to(snapshot.n_tokens)
        start = before.n_blocks * BLOCK_TOKENS
        pieces[path] = CachePiece.snapshot(spec, before).encode(cache.layers, start, snapshot.states)
    return pieces


def record_of(turn: Turn, chain: BlockChain | None) -> TurnRecord:
    """The turn's version as a record. `chain`: of the cached tokens."""
    counts = tuple(snapshot.n_tokens for snapshot in turn.cache.snapshots) if turn.cache else ()
    finish_reason = turn.result.get("finish_reason")
    return make_record(
        turn.base,
        turn.transcript,
        cached_prefix(chain, counts) if chain is not None else None,
        made_by="turn",
        delivery=turn.delivery,
        finish_reason=finish_reason if isinstance(finish_reason, str) else None,
    )


def make_record(
    base: AgentVersion,
    transcript: Transcript,
    cache: CachedPrefix | None,
    *,
    made_by: MadeBy,
    delivery: Delivery | None,
    finish_reason: str | None = None,
) -> TurnRecord:
    """The version after `base` as a record. `delivery`: ``None`` for a command."""
    now = time.time()
    whole = base.transcript is None or base.since_full + 1 >= FULL_EVERY
    changes = delta(None if whole else base.transcript, transcript, base.head)
    about = About(
        ended_by=transcript.ended_by,
        carry_text=transcript.carry_text,
        tokenizer=transcript.tokenizer_fingerprint,
        cache=cache,
        made_by=made_by,
        job_id=delivery.job_id if delivery else None,
        finish_reason=finish_reason,
        answer_until=now + UNTIL_ENDED_S if delivery else now,
        saved_at=now,
        tokens=len(transcript.token_ids),
        since_full=0 if changes["parent"] is None else base.since_full + 1,
    )
    return TurnRecord(
        agent_id=base.agent_id,
        version=base.number + 1,
        delivery=delivery_key(base.agent_id, delivery) if delivery else None,
        about=about,
        **changes,
    )


def cached_prefix(chain: BlockChain, snapshots: tuple[int, ...] = ()) -> CachedPrefix:
    return CachedPrefix(chain.model, chain.salt, len(chain.token_ids), chain.last, snapshots)


def chain_of(cache: CachedPrefix, token_ids: tuple[int, ...]) -> BlockChain:
    """The blocks of a cached prefix; `token_ids` are the transcript's."""
    return BlockChain(cache.model, cache.salt, token_ids[: cache.tokens])


def are_snapshots(counts: Sequence[int], most_tokens: int) -> bool:
    """True if a version may have snapshots after these numbers of tokens."""
    return len(counts) <= MOST_SNAPSHOTS and all(x < y for x, y in pairwise([0, *counts, most_tokens + 1]))


def _check(turn: Turn, cache: SequenceCache) -> None:
    """Raises `ValueError` unless `cache` is the cache of the turn's transcript."""
    spec, length = turn.model.spec, len(turn.transcript.token_ids)
    if not 0 <= cache.n_tokens <= length:
        raise ValueError(f"cache of {cache.n_tokens} tokens, of a transcript of {length}")
    if not fits(spec, cache.layers, cache.n_tokens):
        raise ValueError("the cache arrays do not have the shapes and dtype of the model's cache spec")
    counts = [snapshot.n_tokens for snapshot in cache.snapshots]
    if not are_snapshots(counts, cache.n_tokens) or (counts and not spec.snapshot_layers):
        raise ValueError(f"snapshots after {counts} tokens of {cache.n_tokens}: at most {MOST_SNAPSHOTS}, in order")
    places = [checkpoint.n_tokens for checkpoint in cache.checkpoints]
    if not all(BLOCK_TOKENS <= n <= cache.n_tokens for n in places):
        raise ValueError(f"checkpoints after {places} tokens of {cache.n_tokens}: only behind full blocks")
    taken = (*cache.snapshots, *cache.checkpoints)
    if not all(state_fits(spec, snapshot.states, snapshot.n_tokens) for snapshot in taken):
        raise ValueError("the snapshot's arrays do not have the shapes and dtypes of the model's cache spec")


LOG_BYTES: Final = 1 << 17
"""Most bytes that a transaction adds to the write-ahead log, beside long texts."""

ROW_BYTES: Final = 32
"""For each new token and its text, in the log and in the database."""


class CacheNotWritten(OSError):
    """A turn's cache files could not be written; with the disk's `errno`."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.errno = error.errno


class TurnSaver:
    def __init__(self, parts: StoreParts, budget: DiskBudget, *, keep_versions: int) -> None:
        self._parts = parts
        self._database = parts.database
        self._blocks = parts.blocks
        self._pieces = parts.pieces
        self._budget = budget
        self._keep_versions = keep_versions
        self._known_models: set[str] = set()

    def save(self, turn: Turn) -> tuple[Turn, int]:
        """Make the turn durable.

        Returns:
            the turn as saved, perhaps without its cache; and how many bytes the store has grown at most.

        Raises:
            AgentVersionConflict: `turn.base` is not the agent's newest version (any more).
            VersionTaken, SharedStoreAway: as `StoreParts.commit_next`.
            OSError, Damaged: it could not be written; the agent is still at `turn.base`.
        """
        chain = cached_chain(turn)
        try:
            with self._budget.using(turn.agent_id, chain.addresses if chain else ()):
                save = partial(self._save, turn, chain)
                return turn, self._budget.with_room(save, partial(self._n_bytes, turn, chain))
        except AgentVersionConflict:
            raise
        except Exception as error:
            self._budget.not_saved(chain.paths(self._blocks.path_of) if chain else ())
            # A damaged row may be one of the cache index; if it is another one, the turn fails without its cache too.
            is_of_cache = isinstance(error, CacheNotWritten | Damaged) or is_full(error)
            if turn.cache is None or not is_of_cache:
                raise
            reason = f"its cache is not saved: {error}"
        return self.save(turn.without_cache(reason))

    def _save(self, turn: Turn, chain: BlockChain | None) -> int:
        """`chain`: of the cached tokens. Raises as `save`, and `CacheNotWritten`."""
        saved = SavedBlocks()
        pieces: Pieces = {}
        if turn.cache is not None and chain is not None:
            pieces = own_pieces(chain, turn.cache, turn.model.spec, self._pieces.paths(turn.agent_id, turn.version))
        if any(map(is_there, pieces)):  # left by a crash, or of a newer version than `turn.base`
            with self._database.snapshot() as connection:
                check_base(turn.base, transcripts.find_agent(connection, turn.agent_id))
        try:
            if turn.cache is not None and chain is not None:
                saved = self._blocks.save(chain, turn.cache, turn.model.spec, before=self._goes_on_from(turn, chain))
            piece_bytes = self._pieces.write(pieces)
        except OSError as error:
            raise CacheNotWritten(error) from error
        record, result = record_of(turn, chain), json.dumps(turn.result)
        layout = turn.model.spec.describe() if record.about.cache is not None else None
        next_version = NextVersion(turn.agent_id, turn.version, record, record.delivery, result, layout)

        def change(connection: Connection) -> None:
            row = transcripts.find_agent(connection, turn.agent_id)
            check_base(turn.base, row)
            row = transcripts.write_version(
                connection, row, record, keep_versions=self._keep_versions, piece_bytes=piece_bytes
            )
            self._enter_cache(connection, row, turn, chain, saved)
            assert record.delivery is not None  # a job made it
            until = record.about.answer_until
            transcripts.remember_answer(connection, row.number, record.delivery, result, until, version=record.version)

        try:
            self._parts.commit_next(next_version, change)
        except Exception:
            self._pieces.remove(pieces)
            raise
        self._known_models.add(turn.model.fingerprint)
        for path in self._pieces.keep_only(pieces, turn.agent_id, turn.version, outlived=saved.outlived):
            self._budget.notes.block_changed(path)
        return saved.n_bytes + piece_bytes + LOG_BYTES + ROW_BYTES * len(record.new_tokens)

    def _goes_on_from(self, turn: Turn, chain: BlockChain) -> Places:
        """The snapshots of the version before that lie within the tokens that the turn keeps."""
        cache, transcript = turn.base.cache, turn.base.transcript
        if cache is None or transcript is None or (cache.model, cache.salt) != (chain.model, chain.salt):
            return ()
        n_common = common_length(transcript.token_ids[: cache.tokens], chain.token_ids)
        return [place for place in self._pieces.snapshots(turn.base) if place[0] <= n_common]

    def _enter_cache(
        self, connection: Connection, row: AgentRow, turn: Turn, chain: BlockChain | None, saved: SavedBlocks
    ) -> None:
        now = time.time()
        if chain is not None:
            enter_saved(connection, self._blocks, chain, saved, turn.model.spec, now=now)
        if row.last_block is not None or (chain is not None and chain.n_blocks):
            cache_index.use_chain(connection, row.number, chain, now=now)
        if turn.model.fingerprint not in self._known_models and turn.model.has_memory:
            cache_index.note_model(connection, turn.model.fingerprint, turn.model.spec.describe())

    def _n_bytes(self, turn: Turn, chain: BlockChain | None) -> int:
        """The approximate size of its cache files and its transaction."""
        spec, cache = turn.model.spec, turn.cache
        n_bytes = LOG_BYTES + ROW_BYTES * len(turn.transcript.token_ids)
        if cache is None or chain is None:
            return n_bytes
        taken = (*cache.snapshots, *cache.checkpoints)
        snapshots = sum(layout_of(spec, "snapshot", snapshot.n_tokens).n_bytes for snapshot in taken)
        n_new = cache.n_tokens - BLOCK_TOKENS * self._blocks.n_there(chain)
        return n_bytes + n_new * spec.bytes_per_token + snapshots


def enter_saved(
    connection: Connection,
    blocks: BlockFolder,
    chain: BlockChain,
    saved: SavedBlocks,
    spec: ModelCacheSpec,
    *,
    now: float,
) -> None:
    """Enter saved blocks and checkpoints, and earlier blocks whose files a crash left without their transaction."""
    first = min(saved.blocks, default=chain.n_blocks)
    found = dict.fromkeys(range(cache_index.n_known(connection, chain, first), first), 0)
    for n in found if spec.full_layers else ():
        with suppress(OSError):
            found[n] = allocated_bytes(blocks.path_of(chain.model, chain.addresses[n]))
    sizes = {n: n_bytes for n, n_bytes in found.items() if n_bytes or not spec.full_layers}
    cache_index.add_blocks(connection, chain, sizes | dict(saved.blocks), now=now)
    cut = not spec.snapshot_layers
    cache_index.add_checkpoints(connection, chain, saved.checkpoints, can_be_cut=cut, now=now)


def check_base(base: AgentVersion, row: AgentRow | None) -> None:
    """Raises `AgentVersionConflict` unless `base` is the agent's newest version. An agent that was forgotten on another
    machine begins again after its last number."""
    number, head = (
        (row.version, row.head) if row is not None and row.version else (0 if base.head else base.number, b"")
    )
    if (number, head) != (base.number, base.head):
        raise AgentVersionConflict(f"agent {base.agent_id!r} is at version {number}, the turn continues {base.number}")
