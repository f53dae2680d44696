"""The workers that share queues with this one: which there are, and which of them has died. Fetcher thread.

Owns what was seen of them, and since when a lease is missing. A lease also runs out while Redis is away, and its holder
takes it up again; so a member counts as dead only once its lease has been missing for as long as a lease lasts, while
this worker reached Redis all the time. One whose process is certainly gone is dead at once.
"""

import time
from collections.abc import Callable, Iterable
from typing import Final, cast

from redis import Redis

from stoker_shared.wire import LEASE_KEY, MEMBERS_KEY
from stoker_worker.queue.lease import Lease, Member

_LOOK_S: Final = 1.0


class Members:
    """
    Attributes:
        everybody: the names of all members, this one and those with other queues included.
        others: the members that have a queue in common with this worker, by name, as they were at the last look.
        dead: those of them that died. Their jobs are to be put back, by whichever member does it first.
    """

    def __init__(
        self, connection: Redis, lease: Lease, *, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connection = connection
        self._lease = lease
        self._ttl_s = ttl_s
        self._clock = clock
        self._looked_at = float("-inf")
        self._missing_since: dict[str, float] = {}
        self.everybody = frozenset({lease.member})
        self._workers: frozenset[str] = frozenset()
        self.others: dict[str, Member] = {}
        self.dead: tuple[Member, ...] = ()

    @property
    def me(self) -> str:
        return self._lease.member

    def of(self, queue: str) -> dict[str, Member]:
        """The other members of a queue."""
        return {name: member for name, member in self.others.items() if queue in member.queues}

    def is_first(self, queue: str) -> bool:
        """True if this worker does on the queue what one member has to do: of those that stay, it is the first by name.
        For a moment two may think so; all of it may be done twice."""
        before = (member for name, member in self.others.items() if name < self.me and not member.is_leaving)
        return not any(queue in member.queues for member in before)

    def duties(self) -> list[str]:
        """The queues on which this worker is the first."""
        return [queue for queue in self._lease.queues if self.is_first(queue)]

    def look_if_due(self) -> None:
        """As `look`, if the last one is some time ago. A part of a lease must not pass between two looks."""
        if self._clock() - self._looked_at >= min(_LOOK_S, self._ttl_s / 4):
            self.look()

    def look(self, *, asks_processes: bool = False) -> None:
        """See which members there are, in one round trip while this worker is alone, else in two.

        Args:
            asks_processes: whether a member whose lease is there, on this host, is dead all the same.
        """
        found = cast(dict[bytes, bytes], self._connection.hgetall(MEMBERS_KEY))
        members = [Member.of(name.decode(errors="replace"), value) for name, value in found.items()]
        self.everybody = frozenset(member.name for member in members)
        mine = frozenset(self._lease.queues)
        self.others = {
            member.name: member for member in members if member.name != self.me and not mine.isdisjoint(member.queues)
        }
        leases = self._leases(self.others)
        holders = (Member.of(name, value).worker for name, value in leases.items() if value)
        self._workers = frozenset([*(member.worker for member in members), *holders])
        now = self._clock()
        if now - self._looked_at > self._ttl_s / 2:  # this worker slept, or Redis was away
            self._missing_since.clear()
        self._looked_at = now
        missing = [name for name, value in leases.items() if value is None]
        self._missing_since = {name: self._missing_since.get(name, now) for name in missing}
        self.dead = tuple(
            member
            for name, member in self.others.items()
            if (leases[name] is None and self._is_gone(member, now))
            or (asks_processes and _is_held_by_the_dead(name, leases[name]))
        )

    def is_alive(self, worker: str) -> bool:
        """True if the RQ worker of this name is a member's, this worker included."""
        return worker in self._workers or worker == self._lease.worker_name

    def _leases(self, names: Iterable[str]) -> dict[str, bytes | None]:
        keys = {name: LEASE_KEY.format(member=name) for name in names}
        values = cast(list[bytes | None], self._connection.mget(list(keys.values()))) if keys else []
        return dict(zip(keys, values, strict=True))

    def _is_gone(self, member: Member, now: float) -> bool:
        return now - self._missing_since[member.name] >= self._ttl_s or member.is_certainly_dead()


def _is_held_by_the_dead(name: str, lease: bytes | None) -> bool:
    return lease is not None and Member.of(name, lease).is_certainly_dead()
