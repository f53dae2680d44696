"""An agent's next version on its way: into the shared store first, if there is one, and then into the database. Any
thread.

Every change of an agent that makes a version goes through `StoreParts.commit_next`: a turn, a fork, a rollback, an
import, a forget. A store without a shared one has `Alone`, which does nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from stoker_worker.memory.connection import Connection
from stoker_worker.memory.turn_record import TurnRecord


@dataclass(frozen=True)
class NextVersion:
    """
    Attributes:
        record: ``None``: an empty version, because the agent is forgotten.
        delivery: key of the delivery that makes it; ``None``: a command does.
        result: the answer to that delivery, as JSON.
        layout: of the caches of the model that made its cache.
    """

    agent_id: str
    number: int
    record: TurnRecord | None = None
    delivery: bytes | None = None
    result: str | None = None
    layout: str | None = None


class Ended(NamedTuple):
    """The end of a delivery: the version that it made, and until when (Unix time) the delivery may come again."""

    version: int
    until: float


@dataclass(frozen=True)
class Forgotten:
    """An agent whose newest version is an empty one. Its numbers go on.

    Attributes:
        ended: the ends of its deliveries, by their keys.
    """

    number: int = 0
    ended: Mapping[bytes, Ended] = field(default_factory=dict)


NEVER_MADE = Forgotten()


class Replica(Protocol):
    """The shared store behind a store's database, which is a copy of it.

    Attributes:
        is_shared: whether there is a shared store.
    """

    is_shared: bool

    def publish(self, version: NextVersion) -> None:
        """Make this the agent's newest version in the shared store.

        Raises:
            VersionTaken: there is another one of this number, or a newer one.
            SharedStoreAway: it may be there or not.
        """
        ...

    def committed(self, connection: Connection, version: NextVersion) -> None:
        """In the transaction that makes it the newest version here."""
        ...

    def forgotten(self, agent_id: str) -> Forgotten:
        """The agent, which is unknown here, as the last look found it in the shared store."""
        ...

    def result_in(self, agent_id: str, version: int, key: bytes) -> str | None:
        """The answer to the delivery of this key, from the version in the shared store; ``None``: it is not there any
        more.

        Raises:
            SharedStoreAway, Damaged: that cannot be known.
        """
        ...

    def expire(self, agent_id: str, unused_s: float) -> bool:
        """Returns whether the agent may be removed here, where it was unused for so long. It is forgotten everywhere if
        its newest version is as old."""
        ...


class Alone(Replica):
    """There is no shared store."""

    is_shared = False

    def publish(self, version: NextVersion) -> None:
        pass

    def committed(self, connection: Connection, version: NextVersion) -> None:
        pass

    def forgotten(self, agent_id: str) -> Forgotten:
        return NEVER_MADE

    def result_in(self, agent_id: str, version: int, key: bytes) -> str | None:
        return None

    def expire(self, agent_id: str, unused_s: float) -> bool:
        return True
