"""Turns a turn into what is written: its record, how much of the transcript is cached, the tail, the snapshots. Pure.

Finisher thread. `BlockFolder` writes the full blocks.
"""

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from stoker_worker.memory.blocks import (
    MOST_SNAPSHOTS,
    BlockChain,
    CachePiece,
    PieceFolder,
    Pieces,
    common_length,
    fits,
    state_fits,
)
from stoker_worker.memory.deliveries import UNTIL_ENDED_S, delivery_key
from stoker_worker.memory.files import Chunk
from stoker_worker.memory.turn_record import FULL_EVERY, About, MadeBy, TurnRecord, delta
from stoker_worker.ports import AgentVersion, CachedPrefix, CacheSlice, Delivery, Transcript, Turn
from stoker_worker.ports.cache_spec import BLOCK_TOKENS


def cached_chain(turn: Turn) -> BlockChain | None:
    """The part of the transcript that is cached after `turn`; ``None``: nothing is, not even an empty part.

    Raises:
        ValueError: the turn's cache is not the cache of its transcript.
    """
    token_ids, cache, model = turn.transcript.token_ids, turn.cache, turn.model
    if not model.has_memory:
        return None
    if cache is not None:
        _check(turn, cache)
        n_tokens = cache.stop
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


def own_pieces(turn: Turn, cache: CacheSlice, folder: PieceFolder, chain: BlockChain) -> Pieces:
    """The agent's own files of its next version: tail and snapshots. `chain`: of the tokens that are cached."""
    agent_id, version, spec = turn.agent_id, turn.version, turn.model.spec
    pieces: dict[Path, Iterable[Chunk]] = {}
    if chain.rest and spec.full_layers:
        tail = CachePiece("tail", chain.model, spec, chain.last, chain.rest)
        pieces[folder.tail_path(agent_id, version)] = tail.encode(cache.layers, chain.n_blocks * BLOCK_TOKENS)
    for index, snapshot in enumerate(cache.snapshots):
        piece = CachePiece.snapshot(spec, chain.up_to(snapshot.n_tokens))
        pieces[folder.snapshot_path(agent_id, version, index)] = piece.encode_states(snapshot.states)
    return pieces


def record_of(turn: Turn, chain: BlockChain | None) -> TurnRecord:
    """The turn's version as a record. `chain`: of the tokens that are cached."""
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
    """The version after `base` as a record. `delivery`: ``None``: a command makes it."""
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
    """What the version's record has of the cache of `chain`."""
    return CachedPrefix(chain.model, chain.salt, len(chain.token_ids), chain.last, snapshots)


def chain_of(cache: CachedPrefix, token_ids: tuple[int, ...]) -> BlockChain:
    """The blocks of a cached prefix; `token_ids` are the transcript's."""
    return BlockChain(cache.model, cache.salt, token_ids[: cache.tokens])


def are_snapshots(counts: Sequence[int], most_tokens: int) -> bool:
    """Whether a version's snapshots may be after these numbers of tokens."""
    return len(counts) <= MOST_SNAPSHOTS and all(x < y for x, y in pairwise([0, *counts, most_tokens + 1]))


def _check(turn: Turn, cache: CacheSlice) -> None:
    """Raises `ValueError` unless `cache` is the cache of the turn's transcript."""
    spec, length = turn.model.spec, len(turn.transcript.token_ids)
    if cache.start % BLOCK_TOKENS or not cache.start <= cache.stop <= length:
        raise ValueError(f"cache of tokens {cache.start} to {cache.stop}, of a transcript of {length}")
    if not fits(spec, cache.layers, cache.stop):
        raise ValueError("the cache arrays do not have the shapes and dtype of the model's cache spec")
    counts = [snapshot.n_tokens for snapshot in cache.snapshots]
    if not are_snapshots(counts, cache.stop) or (counts and not spec.snapshot_layers):
        raise ValueError(f"snapshots after {counts} tokens of {cache.stop}: at most {MOST_SNAPSHOTS}, in order")
    if not all(state_fits(spec, snapshot.states, snapshot.n_tokens) for snapshot in cache.snapshots):
        raise ValueError("the snapshot's arrays do not have the shapes and dtypes of the model's cache spec")
