"""One agent's cache in RAM: arrays that others made anyway. Or the place kept for one while it is read. Any thread."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stoker_worker.ports import Array, LayerKV, Snapshot


@dataclass(frozen=True)
class RamCacheEntry:
    """One agent's cache in RAM.

    Attributes:
        version: of the agent.
        model: fingerprint.
        token_ids: the tokens it covers, from the first on.
        layers: of at least these tokens; the arrays need not be contiguous.
        has_all: whether it covers everything that the version's own files hold.
    """

    version: int
    model: str
    salt: str | None
    token_ids: tuple[int, ...]
    layers: tuple[LayerKV, ...]
    snapshots: tuple[Snapshot, ...]
    has_all: bool

    @cached_property
    def n_bytes(self) -> int:
        """All memory that the arrays keep alive."""
        arrays = [array for pair in self.layers for array in pair]
        arrays += [array for snapshot in self.snapshots for state in snapshot.states for array in state]
        return sum(base.nbytes for base in {id(base): base for base in map(_base_of, arrays)}.values())

    def belongs_to(self, version: int, model: str, salt: str | None) -> bool:
        return (self.version, self.model, self.salt) == (version, model, salt)


@dataclass
class ExpectedEntry:
    """An agent whose cache is being read ahead.

    Attributes:
        order: the agents whose jobs are next, the next one first.
        n_bytes: reserved for it.
    """

    agent_id: str
    order: Sequence[str]
    n_bytes: int = 0

    @property
    def is_next(self) -> bool:
        return self.agent_id in self.order


def _base_of(array: Array) -> Array:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
