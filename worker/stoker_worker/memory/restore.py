"""The longest cached prefix of a prompt. Loader thread; writes nothing.

Full attention alone can be taken up anywhere, so the prefix is what `block_search` finds. With window or recurrent
layers it has to end where one of the agent's own snapshots stands.
"""

from pathlib import Path

from stoker_worker.memory.block_search import BlockSearch, FaultyPiece, Found, OwnCache, Source
from stoker_worker.memory.blocks import common_length
from stoker_worker.memory.cache_file import CachePiece, bytes_of
from stoker_worker.memory.cache_layout import empty_states


def find_prefix(prompt_ids: tuple[int, ...], source: Source) -> Found:
    """The longest prefix of the prompt that the source has, less the last token, which the model has to see."""
    limit = max(0, len(prompt_ids) - 1)
    if not source.spec.snapshot_layers:
        return BlockSearch(prompt_ids, limit, source).run()
    return _find_snapshot(prompt_ids, limit, source)


def _find_snapshot(prompt_ids: tuple[int, ...], limit: int, source: Source) -> Found:
    """The agent's last snapshot on the prompt's way that is whole, and for which K/V is there."""
    own, faults = source.own or OwnCache((), Path()), []
    own_tokens = common_length(own.token_ids, prompt_ids[:limit])
    blocks: Found | None = None
    for n_tokens, path in reversed(own.snapshots):
        if n_tokens > own_tokens:
            continue
        piece = CachePiece.snapshot(source.model, source.salt, source.spec, prompt_ids[:n_tokens])
        states = empty_states(source.spec, n_tokens)
        fault = piece.load(path, [bytes_of(array) for arrays in states for array in arrays])
        if fault is not None:
            faults.append(FaultyPiece(path, "snapshot", fault))
            continue
        if blocks is None:
            blocks = _blocks_up_to(n_tokens, prompt_ids, source)
            faults += blocks.faults
        if blocks.n_tokens >= n_tokens:
            if blocks.n_tokens > n_tokens:
                blocks.cut(n_tokens)
            return Found(n_tokens, blocks.saved_blocks, blocks.layers, states, faults)
    return Found(saved_blocks=blocks.saved_blocks if blocks else 0, faults=faults)


def _blocks_up_to(n_tokens: int, prompt_ids: tuple[int, ...], source: Source) -> Found:
    if not source.spec.full_layers:
        return Found(n_tokens)
    return BlockSearch(prompt_ids, n_tokens, source).run()
