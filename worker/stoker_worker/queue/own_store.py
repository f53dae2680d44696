"""What the queue has to know of its worker's store. Pure, no I/O."""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple


class OwnStore(NamedTuple):
    """
    Attributes:
        name: it stays, and the worker is called like it if the settings have no name; ``None``: called like the worker.
        shared: as in `Lease`.
        take_removed: the agents that it has removed since the last call, because nobody used them, each with its last
            version. Fetcher thread.
    """

    name: str | None = None
    shared: str = ""
    take_removed: Callable[[], Mapping[str, int]] = dict


NO_STORE: Final = OwnStore()
