"""How token ids become block addresses. Pure: no I/O, any thread.

A block's address is a chained SHA-256: it names the model, the salt and every token up to the block's end. Equal
address, equal cache: that is what lets agents share blocks, and what keeps one salt's blocks from another's.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from stoker_worker.cache_spec import BLOCK_TOKENS

_DOMAIN: Final = b"stoker block chain 1\0"


def chain_root(fingerprint: str, salt: str | None) -> str:
    """Hex address that stands before the first block of every chain of this model and salt."""
    model = fingerprint.encode()
    # The length keeps ("ab", "c") and ("a", "bc") apart.
    return hashlib.sha256(_DOMAIN + struct.pack("<I", len(model)) + model + (salt or "").encode()).hexdigest()


def chain(root: str, token_ids: Sequence[int]) -> list[str]:
    """``[root, address of block 0, address of block 1, …]`` for every full block of `token_ids`.

    So ``chain[i]`` is the parent of block ``i`` and ``chain[i + 1]`` is its address; a rest shorter than a block has
    parent ``chain[-1]`` and no address.
    """
    addresses = [root]
    n_full = len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
    packed = memoryview(np.asarray(token_ids[:n_full], dtype="<u4").tobytes())
    for start in range(0, len(packed), 4 * BLOCK_TOKENS):
        block = packed[start : start + 4 * BLOCK_TOKENS]
        addresses.append(hashlib.sha256(bytes.fromhex(addresses[-1]) + block).hexdigest())
    return addresses


def common_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """How many leading items two sequences of the same type share."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low < high:  # left[:low] is shared, left[: high + 1] is not
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
