"""An agent's next version on its way: into the shared store first, if there is one, and then into the database. Any
thread.

Every change of an agent that makes a version goes through `commit_next`: a turn, a fork, a rollback, an import, a
forget. A store without a shared one has `Alone`, which does nothing.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from stoker_worker.memory.connection import Connection
from stoker_worker.memory.turn_record import TurnRecord

if TYPE_CHECKING:
    from stoker_worker.memory.store_parts import StoreParts

_log = logging.getLogger(__name__)

T = TypeVar("T")


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
    """How a delivery has ended: in which version, and until when (Unix time) it may come again."""

    version: int
    until: float


@dataclass(frozen=True)
class Forgotten:
    """An agent whose newest version is an empty one. Its numbers go on.

    Attributes:
        ended: of each delivery's key.
    """

    number: int = 0
    ended: Mapping[bytes, Ended] = field(default_factory=dict)


NEVER_MADE = Forgotten()


class Replica(Protocol):
    """What a store's database is a copy of.

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
        """Of an agent that is unknown here; as of the last look."""
        ...

    def result_in(self, agent_id: str, version: int, key: bytes) -> str | None:
        """The answer to the delivery of this key, from the version in the shared store; ``None``: it is not there any
        more.

        Raises:
            SharedStoreAway, Damaged: that cannot be known.
        """
        ...

    def expire(self, agent_id: str, unused_s: float) -> bool:
        """Whether the agent may go here, being unused here for so long. If no other worker has used it either, it is
        forgotten everywhere."""
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


def commit_next(parts: "StoreParts", version: Callable[[], NextVersion], change: Callable[[Connection], T]) -> T | None:
    """Make the version the agent's newest one, there and here, by the transaction of `change`.

    Returns:
        what `change` returned; ``None``: it failed here, but the version is in the shared store, and so it is made. The
        next look brings it in.

    Raises:
        VersionTaken, SharedStoreAway: as `Replica.publish`; nothing has changed here.
        Exception: there is no shared store, and `change` failed; nothing has changed.
    """
    replica = parts.replica
    if not replica.is_shared:
        return parts.database.commit(change)
    made = version()
    replica.publish(made)

    def run(connection: Connection) -> T:
        result = change(connection)
        replica.committed(connection, made)
        return result

    try:
        return parts.database.commit(run)
    except Exception as error:
        _log.warning(
            "agent %r: version %d is in the shared store, and comes here later: %s", made.agent_id, made.number, error
        )
        return None
