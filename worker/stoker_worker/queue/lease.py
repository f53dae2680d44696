"""Leases: the right to claim and end jobs in a member's name. `Lease` is renewed on any thread.

A member is a worker by the name that stays when it is started again. A queue has several members only if all have the
same shared store and the same model. A lease expires unless its holder renews it, and is taken over at once from a
holder that is certainly dead (same host and boot, process gone). Each holder has a higher fencing number than all
before, so one that slept sees whether another has held the lease since. Another member takes the lease of a dead one
to put its jobs back (`recover.py`).

`Members` owns the other members as they were last seen; fetcher thread. One counts as dead at once if its process is
certainly gone, else once its lease has been missing for as long as a lease lasts, while this worker reached Redis all
the time.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

from redis import Redis
from redis.exceptions import RedisError

from stoker_shared.errors import QueueHeld, StokerError, StoreUnusable
from stoker_shared.wire import FENCE_KEY, LEASE_KEY, MEMBERS_KEY, RENEWALS_KEY, SERVED_KEY, STORE_KEY
from stoker_worker.ports import ClaimedJob, DataLoss
from stoker_worker.process_identity import ProcessIdentity, pid_namespace
from stoker_worker.queue.client import lua

log = logging.getLogger(__name__)

T = TypeVar("T")

_RELEASE: Final = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
# ARGV: the lease's value, the member, its new record.
_DESCRIBE: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[3], ARGV[2], ARGV[3])
return 1
"""

FENCE_KEPT_S: Final = 30 * 86_400
"""Names that are used once, as by containers, would fill the server otherwise. A worker that sleeps longer finds its
executions gone."""

_RETRY_S: Final = 0.05
_LOOK_S: Final = 1.0
_N_KEYS: Final = 4  # of a lease, without those of its queues


@dataclass(frozen=True)
class Member:
    """A worker of some queues, as its lease and its record in Redis describe it.

    Attributes:
        name: stays when the worker is started again.
        worker: its name as an RQ worker, which no other process has.
        store: the name of its store.
        shared: the id of the shared store behind that one; empty: none.
        model: the name of the model that it has loaded or is loading.
        is_ready: its model is loaded.
        is_leaving: it drains and claims nothing more.
        recovers: the dead member whose lease it holds, to put that one's jobs back; empty: none.
        pids: the PID namespace of its process, as a pid of another container means nothing here; empty: none.
    """

    name: str
    worker: str
    queues: tuple[str, ...]
    store: str
    process: ProcessIdentity
    shared: str = ""
    model: str = ""
    is_ready: bool = False
    is_leaving: bool = False
    recovers: str = ""
    pids: str = ""

    @property
    def share(self) -> str:
        """The value of `SERVED_KEY` of its queues; members with the same value may serve a queue together."""
        return f"shared {self.shared} {self.model}" if self.shared else f"only {self.name}"

    @property
    def kept_in(self) -> str:
        """The value of `STORE_KEY` of its queues."""
        return f"shared {self.shared}" if self.shared else self.kept_alone

    @property
    def kept_alone(self) -> str:
        """As `kept_in`, before its store was shared."""
        return f"store {self.store}"

    def described(self) -> str:
        """The JSON that `of` reads."""
        about: dict[str, Any] = {"worker": self.worker, "queues": self.queues, "store": self.store}
        about |= {"shared": self.shared, "model": self.model, "loading": not self.is_ready, "leaving": self.is_leaving}
        about |= {"pids": self.pids, **asdict(self.process)}
        return json.dumps(about | ({"recovers": self.recovers} if self.recovers else {}), sort_keys=True)

    @classmethod
    def of(cls, name: str, value: bytes) -> "Member":
        """From a lease or a record, with placeholders for what is missing or of another type."""
        try:
            parsed = json.loads(value.decode(errors="replace"))
        except (ValueError, RecursionError):
            parsed = None
        given = parsed if isinstance(parsed, dict) else {}

        def get(key: str, missing: T) -> T:
            return found if type(found := given.get(key)) is type(missing) else missing

        no_queues: list[Any] = []
        queues = tuple(queue for queue in get("queues", no_queues) if isinstance(queue, str))
        process = ProcessIdentity(get("host", "unknown"), get("boot", ""), get("pid", 0), get("started", ""))
        state = (not get("loading", False), get("leaving", False), get("recovers", ""), get("pids", ""))
        shared, model = get("shared", ""), get("model", "")
        return cls(name, get("worker", "unknown"), queues, get("store", ""), process, shared, model, *state)

    def is_certainly_dead(self) -> bool:
        return self.pids in ("", pid_namespace()) and self.process.is_certainly_dead()

    def __str__(self) -> str:
        return f"worker {self.worker} on host {self.process.host}, pid {self.process.pid}"


class Obstacle(NamedTuple):
    """The reason why a worker may not serve its queues, from a script's reply.

    Attributes:
        kind: `held`: the name has another holder; `served`: workers that this one may not join serve a queue; `kept`: a
            queue's conversations are in another store.
        found: the value in Redis that is in the way.
        left_s: until it expires.
        queue: the one concerned; for `held`, any of the worker's.
        holders: the workers behind it, as far as they are known.
    """

    kind: Literal["held", "served", "kept"]
    found: str
    left_s: float
    queue: str
    holders: tuple[Member, ...] = ()

    @classmethod
    def of(cls, connection: Redis, reply: Sequence[Any], me: Member) -> "Obstacle":
        """From a reply of lease_take.lua or lease_renew.lua; two round trips for `served`."""
        kind, found, left_ms, index = reply
        found = found.decode(errors="replace")
        queue, holders = me.queues[index], []
        if kind == b"held":
            holders = [Member.of(me.name, found.encode())]
        elif kind == b"served":
            here = [one for one in _members(connection) if queue in one.queues]
            holders = [one for one in here if one.share == found or found.startswith("shared ")]
        return cls(kind.decode(), found, left_ms / 1000, queue, tuple(holders))

    def is_gone(self, me: Member) -> bool:
        """True if all holders are certainly dead, or are this very worker, whose earlier try got no reply."""
        is_gone = (one.worker == me.worker or one.is_certainly_dead() for one in self.holders)
        return bool(self.holders) and all(is_gone)

    def error(self, me: Member) -> StokerError:
        if self.kind == "kept":
            return StoreUnusable(
                f"the agents of queue {self.queue!r} have their conversations in {self.found!r}, and this worker "
                f"has {me.kept_in!r}: start the worker of that store instead (`stoker-worker memory share` makes "
                "a store shared), or give this one another queue (--queues), or start it with --new-store, and these "
                "agents begin anew"
            )
        left = f"if that worker is gone, its lease runs out in {self.left_s:.1f} s"
        if self.kind == "held":
            return QueueHeld(f"the name {me.name!r} is held by {self.holders[0]}; {left}")
        other = next((one for one in self.holders if not one.is_certainly_dead()), "another worker")
        return QueueHeld(
            f"queue {self.queue!r} is served by {other} ({_shown(self.found)}), and this worker "
            f"has {_shown(me.share)}: all workers of a queue need one shared store and one model (--shared-store, "
            f"--model). Or start this one with --standby, or give it another queue (--queues); {left}"
        )


def _members(connection: Redis) -> list[Member]:
    """All members, each from its lease, or from its record if it has no lease."""
    records = cast(dict[bytes, bytes], connection.hgetall(MEMBERS_KEY))
    names = [name.decode(errors="replace") for name in records]
    leases = _leases(connection, names)
    return [
        Member.of(name, lease or record) for name, record, lease in zip(names, records.values(), leases, strict=True)
    ]


def _leases(connection: Redis, names: Collection[str]) -> list[bytes | None]:
    keys = [LEASE_KEY.format(member=name) for name in names]
    return cast(list[bytes | None], connection.mget(keys)) if keys else []


def _shown(share: str) -> str:
    """A value of `SERVED_KEY` in words."""
    kind, shared, model = [*share.split(" ", 2), "", ""][:3]
    return f"the shared store {shared} and the model {model!r}" if kind == "shared" else "no shared store"


class OwnStore(NamedTuple):
    """The facts about the worker's store that the queue needs.

    Attributes:
        name: permanent, and the worker's name too if the settings have none; ``None``: the store is named after the
            worker.
        shared, has_agents: as in `Lease`.
        is_at_hand: as in `CacheStorePort`.
    """

    name: str | None = None
    shared: str = ""
    has_agents: bool = True
    is_at_hand: Callable[[str], bool] = lambda agent_id: True


NO_STORE: Final = OwnStore()


BeforeRenewal = tuple[int, int]
"""The state of `LostData` when a renewal is sent: how often data was lost, and the highest number."""


class LostData:
    """Notices that Redis has lost data: it was restarted without an append-only file, it was flushed, or an old replica
    was promoted. Its count of the renewals of a member's lease then goes back; otherwise it only grows. Any thread."""

    def __init__(
        self, in_flight: Callable[[], Sequence[ClaimedJob]] = tuple, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._in_flight = in_flight
        self._clock = clock
        self._lock = threading.Lock()
        self._times = self._jobs = self._highest = 0
        self._last_claim = -1
        self._noticed_at = float("-inf")

    def before_renewal(self) -> BeforeRenewal:
        with self._lock:
            return self._times, self._highest

    def renewed(self, number: int, before: BeforeRenewal) -> None:
        """`before`: from before the renewal was sent, because replies to several threads may come in another order."""
        times, highest = before
        with self._lock:
            if times != self._times:  # another thread has noticed the loss, before or after this renewal
                return
            if number > highest:
                self._highest = max(self._highest, number)
                return
            claims = [job.claim_number for job in self._in_flight()]
            self._times, self._jobs, self._highest = self._times + 1, self._jobs + len(claims), number
            self._last_claim, self._noticed_at = max(claims, default=-1), self._clock()
        log.error(
            "Redis has lost data (restarted without an append-only file, flushed, or an old replica was promoted): "
            "its count of this worker's renewals went back from %d to %d; %d jobs were in flight",
            highest,
            number - 1,
            len(claims),
        )

    def had_in_flight(self, claim_number: int) -> bool:
        """True if a job in flight was in flight already when the last loss was noticed."""
        return claim_number <= self._last_claim

    def so_far(self) -> DataLoss:
        with self._lock:
            return DataLoss(self._times, self._jobs, self._clock() - self._noticed_at)


class Lease:
    """The right to work on some queues in a member's name.

    Attributes:
        member, worker_name, queues, shared: as in `Member`.
        ttl_s: how long it lasts after a renewal.
        value: of the lease's key while it is ours; scripts compare it before they write.
        former_queues: the queues of an earlier holder that did not leave, until `settle`.
        has_agents: whether the store has conversations, so that no other store must take its place unnoticed.
    """

    def __init__(
        self,
        connection: Redis,
        member: str,
        queues: Sequence[str],
        *,
        worker_name: str,
        ttl_s: float,
        store: str | None = None,
        shared: str = "",
        model: str = "",
        new_store: bool = False,
        has_agents: bool = True,
        lost_data: LostData | None = None,
    ) -> None:
        """
        Args:
            store, model: as in `Member`; ``None``: the store has the member's name.
            new_store: serve queues even if their agents' conversations are in another store.
        """
        process, pids = ProcessIdentity.of_this_process(), pid_namespace()
        self._me = Member(member, worker_name, tuple(queues), store or member, process, shared, model, pids=pids)
        self.member, self.worker_name, self.queues = member, worker_name, self._me.queues
        self.shared, self.ttl_s = shared, ttl_s
        self.has_agents, self._first_turn = has_agents, threading.Lock()
        self.lost_data = lost_data or LostData()
        self.former_queues: tuple[str, ...] = ()
        self.keys = [LEASE_KEY.format(member=member), FENCE_KEY.format(member=member)]
        of_queues = [key.format(queue=queue) for queue in queues for key in (SERVED_KEY, STORE_KEY)]
        self._all_keys = [*self.keys, MEMBERS_KEY, RENEWALS_KEY, *of_queues]
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._new_store = new_store
        self._connection = connection
        self._take = connection.register_script(lua("lease_take"))
        self._renew = connection.register_script(lua("holds", "lease_renew"))
        self._release = connection.register_script(_RELEASE)
        self._leave = connection.register_script(lua("lease_leave"))
        self._describe = connection.register_script(_DESCRIBE)
        self.value, self._fence = "", 0  # number 0: not held
        self._record = ""  # as other members see this one: the value, with what was announced

    @property
    def args(self) -> list[str | int]:
        """Value, number and lifetime in milliseconds: the first ARGV of a script that begins with `lua/holds.lua`. Its
        first KEYS are `keys`."""
        return [self.value, self._fence, self._ttl_ms]

    def acquire(self, *, recovers: bool = False, waits: bool = False) -> None:
        """Take the lease, and serve its queues.

        Args:
            recovers: only to put the member's jobs back, without becoming a member or serving its queues.
            waits: the caller tries again after `QueueHeld`, so raise `StoreUnusable` first: to wait does not help then.

        Raises:
            QueueHeld: another worker that is not certainly dead has the name, or serves a queue that the two may not
                share.
            StoreUnusable: the conversations of a queue are in another store.
        """
        if recovers:
            del self._all_keys[_N_KEYS:]
        me, gives_up_at = replace(self._me, recovers=self.member if recovers else ""), 0.0
        passed = [me.kept_alone]  # a store may have been shared since
        args: list[str | int] = [self._ttl_ms, me.name, me.described(), me.share, me.kept_in]
        args += [int(waits), int(self.has_agents)]
        while True:
            reply = self._take(keys=self._all_keys, args=[*args, *passed])
            if reply[0] == b"taken":
                _, value, self._fence, before = reply
                self.value = self._record = value.decode()
                self.former_queues = Member.of(self.member, before).queues
                return
            obstacle = Obstacle.of(self._connection, reply, me)
            passes = self._new_store if obstacle.kind == "kept" else obstacle.is_gone(me)
            if obstacle.found not in passed and passes:
                passed.append(obstacle.found)
                continue
            gives_up_at = gives_up_at or time.monotonic() + obstacle.left_s + _RETRY_S
            is_recovered = obstacle.kind == "held" and obstacle.holders[0].recovers
            if not is_recovered or recovers or time.monotonic() > gives_up_at:
                raise obstacle.error(me)
            time.sleep(_RETRY_S)  # the holder only puts this member's jobs back

    def renew(self, connection: Redis | None = None, *, notes_store: bool = False) -> bool:
        """Postpone the expiry, or take the lease again after it. ``False`` if this worker has no lease (any more), or
        is deposed: another one holds the lease, has held it since, or serves a queue that the two may not share.

        Args:
            connection: used instead of the lease's own.
            notes_store: write `STORE_KEY` although the store has no conversations yet.
        """
        if not self._fence:
            return False
        before = self.lost_data.before_renewal()
        kept_in = self._me.kept_in if self.has_agents or notes_store else ""
        args = [*self.args, self.member, self._record, self._me.share, kept_in]
        reply = self._renew(keys=self._all_keys, args=args, client=connection)
        if isinstance(reply, list):
            with suppress(RedisError):
                obstacle = Obstacle.of(connection or self._connection, reply, self._me)
                log.error("%s", obstacle.error(self._me))
            return False
        if reply:
            self.lost_data.renewed(reply, before)
        return bool(reply)

    def has_a_turn(self) -> bool:
        """Write `STORE_KEY` before the store's first conversation; ``False`` as from `renew`. Finisher threads."""
        with self._first_turn:
            if not self.has_agents:
                self.has_agents = self.renew(notes_store=True)
            return self.has_agents

    def settle(self) -> None:
        """After the jobs of the earlier holder are put back: show the other members this worker instead of it."""
        if self.former_queues and (self._show() or (self.renew() and self._show())):  # it may have run out for a moment
            self.former_queues = ()

    def announce(self, what: Mapping[str, Any]) -> bool:
        """Add to this member's record for the others; ``False`` if its lease has run out for a moment: try again."""
        self._record = json.dumps({**json.loads(self._record), **what}, sort_keys=True)
        return self._show()

    def leave(self) -> None:
        """Leave the members, and give up the lease. No job may be claimed or in flight in this name any more."""
        self._leave(
            keys=self._all_keys, args=[self.value, self.member, self._me.share, FENCE_KEPT_S * 1000, *self.queues]
        )
        self._fence = 0

    def release(self) -> None:
        """Give up the lease and stay a member, so that the next holder puts the jobs back. Errors of Redis are ignored:
        the lease then expires."""
        if self._fence:
            with suppress(RedisError):
                self._release(keys=self.keys, args=[self.value])
            self._fence = 0

    def _show(self) -> bool:
        return bool(self._describe(keys=self._all_keys, args=[self.value, self.member, self._record]))


class Members:
    """The members as they were at the last look.

    Attributes:
        everybody: the names of all members, this one and those with other queues included.
        others: the members that have a queue in common with this worker, by name.
        dead: those of them that died. The first member that recovers puts their jobs back.
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
        self.others: dict[str, Member] = {}
        self.dead: tuple[Member, ...] = ()

    def of(self, queue: str) -> dict[str, Member]:
        """The other members of a queue."""
        return {name: member for name, member in self.others.items() if queue in member.queues}

    def duties(self) -> list[str]:
        """The queues for which this worker does the work of one member: no other that is ready and not leaving comes
        before it by name. Two may do it for a moment, so that work must be safe to do twice."""
        others = self.others.items()
        before = {
            queue
            for name, member in others
            if name < self._lease.member and member.is_ready and not member.is_leaving
            for queue in member.queues
        }
        return [queue for queue in self._lease.queues if queue not in before]

    def look_if_due(self) -> None:
        """`look`, unless the last one was a moment ago. Half a lease must not pass between two looks."""
        if self._clock() - self._looked_at >= min(_LOOK_S, self._ttl_s / 4):
            self.look()

    def look(self, *, asks_processes: bool = False) -> None:
        """Read the members: in one round trip while this worker is alone, else in two.

        Args:
            asks_processes: count a member on this host without a process as dead even while its lease lasts.
        """
        found = cast(dict[bytes, bytes], self._connection.hgetall(MEMBERS_KEY))
        members = [Member.of(name.decode(errors="replace"), value) for name, value in found.items()]
        self.everybody = frozenset(member.name for member in members)
        mine = frozenset(self._lease.queues)
        self.others = {
            member.name: member
            for member in members
            if member.name != self._lease.member and not mine.isdisjoint(member.queues)
        }
        leases = dict(zip(self.others, _leases(self._connection, self.others), strict=True))
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
            or (asks_processes and (lease := leases[name]) and Member.of(name, lease).is_certainly_dead())
        )

    def _is_gone(self, member: Member, now: float) -> bool:
        return now - self._missing_since[member.name] >= self._ttl_s or member.is_certainly_dead()
