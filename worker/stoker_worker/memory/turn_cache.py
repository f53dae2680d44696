"""Turns a turn's cache into an agent's files: how much of the transcript is cached, the tail, the snapshots. Pure.

Finisher thread. `BlockFolder` writes the full blocks.
"""

from collections.abc import Iterable
from pathlib import Path

from stoker_worker.memory.agent_folder import AgentFolder
from stoker_worker.memory.agent_writer import Pieces
from stoker_worker.memory.block_chain import BlockChain, common_length
from stoker_worker.memory.cache_file import CachePiece
from stoker_worker.memory.cache_layout import fits, state_fits
from stoker_worker.memory.files import Chunk
from stoker_worker.memory.record import MOST_SNAPSHOTS, AgentState, are_snapshots
from stoker_worker.ports import CacheSlice, Turn
from stoker_worker.ports.cache_spec import BLOCK_TOKENS


def cached_chain(turn: Turn, state: AgentState) -> BlockChain | None:
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
        state.cache is not None
        and (state.cache.model, state.cache.salt) == (model.fingerprint, turn.cache_salt)
        and model.spec.full_layers
    ):
        # Saved without cache: the parent's blocks serve as far as its tokens were kept; tail and snapshots go.
        base = state.version.transcript.token_ids if state.version.transcript else ()
        n_tokens = common_length(base[: state.cache.tokens], token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
    else:
        return None
    return BlockChain(model.fingerprint, turn.cache_salt, token_ids[:n_tokens])


def own_pieces(turn: Turn, cache: CacheSlice, folder: AgentFolder, chain: BlockChain) -> Pieces:
    """The agent's own files of its next version: tail and snapshots. `chain`: of the tokens that are cached."""
    version, spec = turn.parent + 1, turn.model.spec
    pieces: dict[Path, Iterable[Chunk]] = {}
    if chain.rest and spec.full_layers:
        tail = CachePiece("tail", chain.model, spec, chain.last, chain.rest)
        pieces[folder.tail_path(version)] = tail.encode(cache.layers, chain.n_blocks * BLOCK_TOKENS - cache.start)
    for index, snapshot in enumerate(cache.snapshots):
        piece = CachePiece.snapshot(spec, chain.up_to(snapshot.n_tokens))
        pieces[folder.snapshot_path(version, index)] = piece.encode_states(snapshot.states)
    return pieces


def _check(turn: Turn, cache: CacheSlice) -> None:
    """Raises `ValueError` unless `cache` is the cache of the turn's transcript."""
    n_tokens, spec = cache.stop - cache.start, turn.model.spec
    if cache.start % BLOCK_TOKENS or not n_tokens >= 0 or cache.stop > len(turn.transcript.token_ids):
        length = len(turn.transcript.token_ids)
        raise ValueError(f"cache of tokens {cache.start} to {cache.stop}, of a transcript of {length}")
    if not fits(spec, cache.layers, n_tokens):
        raise ValueError("the cache arrays do not have the shapes and dtype of the model's cache spec")
    counts = [snapshot.n_tokens for snapshot in cache.snapshots]
    if not are_snapshots(counts, cache.stop) or (counts and not spec.snapshot_layers):
        raise ValueError(f"snapshots after {counts} tokens of {cache.stop}: at most {MOST_SNAPSHOTS}, in order")
    if not all(state_fits(spec, snapshot.states, snapshot.n_tokens) for snapshot in cache.snapshots):
        raise ValueError("the snapshot's arrays do not have the shapes and dtypes of the model's cache spec")
