"""The workers that share queues with this one: which there are, and which of them has died. Fetcher thread.

Owns what was seen of them, and since when a lease is missing. A lease also runs out while Redis is away, and its holder
takes it up again; so a member counts as dead only once its lease has been missing for as long as a lease lasts, while
this worker reached Redis all the time. One whose process is certainly gone is dead at once.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, cast

from redis import Redis

from stoker_shared.errors import StoreUnusable
from stoker_shared.needs import Needs
from stoker_shared.wire import LEASE_KEY, LEFT_KEY, MEMBERS_KEY
from stoker_worker.process_identity import ProcessIdentity, pid_namespace
from stoker_worker.queue.holder import described, identity_in
from stoker_worker.queue.lease import Lease
from stoker_worker.queue.offers import Offer, offer_in, serves

_LOOK_S: Final = 1.0


@dataclass(frozen=True)
class Member:
    """Another worker.

    Attributes:
        worker: its name as an RQ worker.
        store: the name of its store.
        is_leaving: it drains: it claims nothing more, and gives up its agents.
        offer: ``None`` while one of an earlier version loads its model.
        is_ready: its model is loaded.
        pids: whose pids its own is among: that of a process in another container tells nothing here.
        shared: as in `Lease`.
    """

    name: str
    worker: str
    queues: tuple[str, ...]
    store: str
    process: ProcessIdentity
    is_leaving: bool = False
    pids: str = ""
    shared: str = ""
    offer: Offer | None = None
    is_ready: bool = False

    def takes(self, needs: Needs) -> bool:
        """Whether it may claim such jobs."""
        return not self.is_leaving and serves(self.offer, needs)

    def is_certainly_dead(self) -> bool:
        return self.pids == pid_namespace() and self.process.is_certainly_dead()


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
        self._company_at: dict[str, float] = {}
        self.others: dict[str, Member] = {}
        self.dead: tuple[Member, ...] = ()

    @property
    def me(self) -> str:
        return self._lease.member

    def of(self, queue: str) -> dict[str, Member]:
        """The other members of a queue."""
        return {name: member for name, member in self.others.items() if queue in member.queues}

    def is_served_elsewhere(self, queue: str, needs: Needs) -> bool:
        """Whether another member, which does not drain, can serve such jobs of this queue."""
        return any(queue in member.queues and member.takes(needs) for member in self.others.values())

    def had_company(self, queue: str, within_s: float) -> bool:
        """Whether the queue has another member that has loaded its model, or had one within that time. One that left
        before this worker came may have had other queues."""
        return self._clock() - self._company_at.get(queue, float("-inf")) < within_s

    def is_first(self, queue: str, needs: Needs) -> bool:
        """Whether this worker is the first by name of those that can serve such jobs."""
        others = (member for name, member in self.others.items() if name < self.me)
        return not any(queue in member.queues and member.takes(needs) for member in others)

    def check_stores(self) -> None:
        """Leave the members again if another one, which lives, has a copy of this worker's store, or another shared
        store.

        Raises:
            StoreUnusable: so it is.
        """
        self.look()
        lease, living = self._lease, (one for name, one in self.others.items() if name not in self._missing_since)
        for other in (one for one in living if not one.is_certainly_dead()):
            if other.store == lease.store:
                copied = "one is a copy of the other and needs another name: remove the file worker-name in its folder"
                problem = f"has a store of the same name, {other.store!r}; {copied}"
            elif lease.shared and other.shared and other.shared != lease.shared:
                problem = "has another shared store; all workers of a queue have the same one"
            else:
                continue
            if lease.former_queues:  # there are jobs to be put back
                lease.release()
            else:
                lease.leave()
            process = other.process
            raise StoreUnusable(f"worker {other.name!r} on host {process.host}, pid {process.pid}, {problem}")

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
        members = [_member(name.decode(errors="replace"), value) for name, value in found.items()]
        self.everybody = frozenset(member.name for member in members)
        mine = frozenset(self._lease.queues)
        self.others = {
            member.name: member for member in members if member.name != self.me and not mine.isdisjoint(member.queues)
        }
        leases = self._leases(self.others)
        self._note_company()
        holders = (described(value.decode(errors="replace"))["worker"] for value in leases.values() if value)
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

    def duties(self) -> list[str]:
        """The queues on which this worker does what one member has to do: of those that stay, it is the first by name.
        For a moment two may think so; all of it may be done twice."""
        before = [member for name, member in self.others.items() if name < self.me and not member.is_leaving]
        return [queue for queue in self._lease.queues if not any(queue in member.queues for member in before)]

    def is_alive(self, worker: str) -> bool:
        """Whether the RQ worker of this name is a member's, this worker included."""
        return worker in self._workers or worker == described(self._lease.value)["worker"]

    def _note_company(self) -> None:
        now = self._clock()
        if self._looked_at == float("-inf"):
            left_s = self._left_s()
            self._company_at = {queue: now - left_s for queue in self._lease.queues}
        for member in self.others.values():
            if member.is_ready:
                self._company_at |= dict.fromkeys(member.queues, now)

    def _left_s(self) -> float:
        """How long ago the last member that had loaded its model left; infinite if none did."""
        seconds, _ = self._connection.time()
        left = cast(list[bytes], self._connection.hvals(LEFT_KEY))
        entries = [words for value in left if (words := value.split(b" ")) and b"unready" not in words[2:]]
        moments = [int(stamp) for stamp, *_ in entries if stamp.isdigit()]
        return float(seconds - max(moments)) if moments else float("inf")

    def _leases(self, names: Iterable[str]) -> dict[str, bytes | None]:
        keys = {name: LEASE_KEY.format(member=name) for name in names}
        values = cast(list[bytes | None], self._connection.mget(list(keys.values()))) if keys else []
        return dict(zip(keys, values, strict=True))

    def _is_gone(self, member: Member, now: float) -> bool:
        return now - self._missing_since[member.name] >= self._ttl_s or member.is_certainly_dead()


def _is_held_by_the_dead(name: str, lease: bytes | None) -> bool:
    return lease is not None and _member(name, lease).is_certainly_dead()


def _member(name: str, value: bytes) -> Member:
    found: dict[str, Any] = described(value.decode(errors="replace"))
    queues, process, offer = tuple(found["queues"]), identity_in(found), offer_in(found)
    is_ready = offer is not None and not found["loading"]
    rest = {
        "is_ready": is_ready,
        "is_leaving": found["leaving"],
        "pids": found["pids"],
        "shared": found["shared"],
        "offer": offer,
    }
    return Member(name, found["worker"], queues, found["store"], process, **rest)
