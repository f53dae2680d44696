"""The addresses of the cache blocks of some tokens. Pure: no I/O, any thread.

A block's address is a chained SHA-256 over the model, the salt and every token up to the block's end. Blocks of the
same address hold the same cache: agents share them, and blocks of different salts never mix.
"""

import hashlib
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from stoker_worker.ports.cache_spec import BLOCK_TOKENS

PathOf = Callable[[str, str], Path]
"""The file of a block, from the model's fingerprint and the block's address."""

_DOMAIN: Final = b"stoker block chain 1\0"
_FINGERPRINT: Final = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True)
class BlockChain:
    """The full blocks of `token_ids`, as one model caches them under one salt. Hashed once, when first asked.

    Attributes:
        model: fingerprint of the model.
        salt: ``None`` is the same as the empty salt.
    """

    model: str
    salt: str | None
    token_ids: tuple[int, ...]

    @property
    def n_blocks(self) -> int:
        """Number of full blocks."""
        return len(self.token_ids) // BLOCK_TOKENS

    @cached_property
    def root(self) -> str:
        """The parent of the first block: hex, like every address."""
        model = self.model.encode()
        # The length keeps ("ab", "c") and ("a", "bc") apart.
        return hashlib.sha256(_DOMAIN + struct.pack("<I", len(model)) + model + (self.salt or "").encode()).hexdigest()

    @cached_property
    def addresses(self) -> tuple[str, ...]:
        """One for each full block."""
        addresses, address = [], self.root
        n_full = self.n_blocks * BLOCK_TOKENS
        packed = memoryview(np.asarray(self.token_ids[:n_full], dtype="<u4").tobytes())
        for start in range(0, len(packed), 4 * BLOCK_TOKENS):
            address = _next_address(address, packed[start : start + 4 * BLOCK_TOKENS])
            addresses.append(address)
        return tuple(addresses)

    @property
    def last(self) -> str:
        """Address of the last full block, or the root: the parent of what follows."""
        return self.addresses[-1] if self.n_blocks else self.root

    @property
    def rest(self) -> tuple[int, ...]:
        """The tokens behind the last full block."""
        return self.token_ids[self.n_blocks * BLOCK_TOKENS :]

    def parent(self, index: int) -> str:
        """The address before block `index`, which may be the first that is not full."""
        return self.addresses[index - 1] if index else self.root

    def block(self, index: int) -> tuple[int, ...]:
        """The tokens of block `index`; fewer than a block's where the chain ends."""
        return self.token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]

    def up_to(self, n_tokens: int) -> "BlockChain":
        """The chain of the first `n_tokens` tokens."""
        first = BlockChain(self.model, self.salt, self.token_ids[:n_tokens])
        first.__dict__["addresses"] = self.addresses[: first.n_blocks]  # nothing is hashed twice
        return first

    def paths(self, path_of: PathOf) -> tuple[Path, ...]:
        """The files of the full blocks; none if the model is no fingerprint: no record may choose a path."""
        return tuple(path_of(self.model, address) for address in self.addresses) if self.has_fingerprint else ()

    @property
    def has_fingerprint(self) -> bool:
        return _FINGERPRINT.fullmatch(self.model) is not None


def block_address(parent: str, token_ids: Sequence[int]) -> str:
    """The address of one block that follows `parent`."""
    return _next_address(parent, np.asarray(token_ids, dtype="<u4").tobytes())


def _next_address(parent: str, packed: bytes | memoryview) -> str:
    return hashlib.sha256(bytes.fromhex(parent) + packed).hexdigest()


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
