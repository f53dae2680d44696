"""What becomes of a turn's cache: which part of the transcript is cached then, and in which files. Pure.

Finaliser thread. Blocks are written by `BlockFolder`; the bytes of an agent's own pieces are made here.
"""

from collections.abc import Iterable
from pathlib import Path

from stoker_worker.cache_spec import BLOCK_TOKENS
from stoker_worker.memory.agent_folder import AgentFolder, Pieces
from stoker_worker.memory.agent_state import AgentState
from stoker_worker.memory.blocks import chain, chain_root, common_length
from stoker_worker.memory.cache_file import CachePiece
from stoker_worker.memory.cache_layout import fits, state_fits
from stoker_worker.memory.files import Chunk
from stoker_worker.memory.record import MOST_SNAPSHOTS, CachedPrefix, are_snapshots
from stoker_worker.ports import CacheSlice, LoadedModel, Turn


def cached_prefix(turn: Turn, state: AgentState) -> CachedPrefix | None:
    """Which cache the agent has after `turn`.

    Raises:
        ValueError: the turn's cache is not the cache of its transcript.
    """
    token_ids, cache, model = turn.transcript.token_ids, turn.cache, turn.model
    if not model.has_memory:
        return None
    snapshots: tuple[int, ...] = ()
    if cache is not None:
        _check(turn, cache)
        tokens = cache.stop
        snapshots = tuple(snapshot.n_tokens for snapshot in cache.snapshots)
    elif (
        state.cache is not None
        and (state.cache.model, state.cache.salt) == (model.fingerprint, turn.cache_salt)
        and model.spec.full_layers
    ):
        # Saved without cache: the parent's blocks serve as far as its tokens were kept; tail and snapshots go.
        base = state.version.transcript.token_ids if state.version.transcript else ()
        tokens = common_length(base[: state.cache.tokens], token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
    else:
        return None
    last_block = chain(chain_root(model.fingerprint, turn.cache_salt), token_ids[:tokens])[-1]
    return CachedPrefix(model.fingerprint, turn.cache_salt, tokens, last_block, snapshots)


def run_of(token_ids: tuple[int, ...], model: LoadedModel, salt: str | None, cache: CacheSlice) -> CachePiece:
    """The tokens whose K/V `cache` has: full blocks, and perhaps a tail behind them."""
    before = chain(chain_root(model.fingerprint, salt), token_ids[: cache.start])[-1]
    return CachePiece("block", model.fingerprint, model.spec, before, token_ids[cache.start : cache.stop])


def own_pieces(turn: Turn, cache: CacheSlice, folder: AgentFolder, last_block: str) -> Pieces:
    """The agent's own files of its next version: the tail behind `last_block`, and the snapshots."""
    version, model = turn.parent + 1, turn.model
    pieces: dict[Path, Iterable[Chunk]] = {}
    n_full = (cache.stop - cache.start) // BLOCK_TOKENS * BLOCK_TOKENS
    rest = turn.transcript.token_ids[cache.start + n_full : cache.stop]
    if rest and model.spec.full_layers:
        tail = CachePiece("tail", model.fingerprint, model.spec, last_block, rest)
        pieces[folder.tail_path(version)] = tail.encode(cache.layers, n_full)
    for index, snapshot in enumerate(cache.snapshots):
        token_ids = turn.transcript.token_ids[: snapshot.n_tokens]
        piece = CachePiece.snapshot(model.fingerprint, turn.cache_salt, model.spec, token_ids)
        pieces[folder.snapshot_path(version, index)] = piece.encode_states(snapshot.states)
    return pieces


def _check(turn: Turn, cache: CacheSlice) -> None:
    """Raises `ValueError` unless `cache` is the cache of the turn's transcript."""
    n_tokens, spec = cache.stop - cache.start, turn.model.spec
    if cache.start % BLOCK_TOKENS or not n_tokens >= 0 or cache.stop > len(turn.transcript.token_ids):
        length = len(turn.transcript.token_ids)
        raise ValueError(f"cache of tokens {cache.start} to {cache.stop}, of a transcript of {length}")
    if not fits(spec, cache.layers, n_tokens):
        raise ValueError("the cache arrays are not of the shapes and dtype that the model's cache spec says")
    counts = [snapshot.n_tokens for snapshot in cache.snapshots]
    if not are_snapshots(counts, cache.stop) or (counts and not spec.snapshot_layers):
        raise ValueError(f"snapshots after {counts} tokens of {cache.stop}: at most {MOST_SNAPSHOTS}, in order")
    if not all(state_fits(spec, snapshot.states, snapshot.n_tokens) for snapshot in cache.snapshots):
        raise ValueError("the snapshot's arrays are not of the shapes and dtypes that the model's cache spec says")
