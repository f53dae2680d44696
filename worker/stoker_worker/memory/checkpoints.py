"""Where a prompt's prefill takes checkpoints, for any prompt that begins alike: at the end of its system prompt, and,
for window and recurrent layers, at the ends of blocks. Pure.

A state can be as large as the blocks of thousands of tokens, so there are few places: where the prompt leaves what
another one began with, where its system prompt and tools end, and at regular distances in the rest. If nothing is known
of a prompt's beginning, they are near its end: agents often share nearly all of their first prompts.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from stoker_worker.ports.cache_spec import BLOCK_TOKENS, ModelCacheSpec

LEAST_APART: Final = 4
"""Fewest blocks between two regular checkpoints: each one ends a pass of the prefill."""

MOST_REGULAR: Final = 8
"""Regular checkpoints of a prompt, or those near its end."""

_SHARE: Final = 2
"""Regular checkpoints take at most one byte for this many bytes of the prompt's blocks."""


def checkpoint_places(
    spec: ModelCacheSpec, *, n_prompt: int, n_restored: int, ends: Sequence[int] = (), system_tokens: int = 0
) -> tuple[int, ...]:
    """After how many tokens of a prompt checkpoints are taken, ascending: at ends of blocks, except that of the system
    prompt. A model of full attention alone has the blocks themselves there, so it takes only that one.

    Args:
        n_restored: tokens that are not prefilled, where nothing can be taken.
        ends: after how many tokens it departs from other prompts, or may do so.
        system_tokens: of its system prompt and tools.
    """
    apart = BLOCK_TOKENS * _blocks_apart(spec, n_prompt)
    regular = range(apart, n_prompt, apart)
    places = {n // BLOCK_TOKENS * BLOCK_TOKENS for n in ends if n >= BLOCK_TOKENS}
    # A restore up to the block in which the system prompt ends used that block's checkpoint, which stays.
    is_taken = bool(spec.snapshot_layers) and n_restored // BLOCK_TOKENS >= system_tokens // BLOCK_TOKENS
    if system_tokens >= BLOCK_TOKENS and not is_taken:
        places.add(system_tokens)
    if not spec.snapshot_layers:
        places = {n for n in places if n % BLOCK_TOKENS}
    elif places or n_restored:
        places |= {n for n in regular if n >= n_restored + apart}  # others may go on from what was restored, too
    else:
        places = set(_near_end(n_prompt, max(1, len(regular))))
    return tuple(sorted(n for n in places if n_restored < n < n_prompt))


def _near_end(n_prompt: int, n_most: int) -> Iterator[int]:
    """1, 2, 4, ... blocks before the end: a prompt that departs from this one prefills at most twice the tokens of its
    own."""
    for exponent in range(n_most):
        n_blocks = n_prompt // BLOCK_TOKENS - 2**exponent
        if n_blocks >= LEAST_APART:
            yield n_blocks * BLOCK_TOKENS


def _blocks_apart(spec: ModelCacheSpec, n_prompt: int) -> int:
    """A power of two, so that prompts of different lengths take theirs at the same places."""
    n_blocks, state_bytes = LEAST_APART, spec.snapshot_bytes(n_prompt)
    while n_blocks * BLOCK_TOKENS < n_prompt and (
        n_blocks * BLOCK_TOKENS * MOST_REGULAR < n_prompt
        or (spec.full_layers and n_blocks * spec.bytes_per_block < _SHARE * state_bytes)
    ):
        n_blocks *= 2
    return n_blocks
