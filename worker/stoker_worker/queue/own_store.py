"""What the queue has to know of its worker's store. Pure, no I/O."""

from typing import Final, NamedTuple


class OwnStore(NamedTuple):
    """
    Attributes:
        name: it stays, and the worker is called like it if the settings have no name; ``None``: called like the worker.
        shared: as in `Lease`.
    """

    name: str | None = None
    shared: str = ""


NO_STORE: Final = OwnStore()
