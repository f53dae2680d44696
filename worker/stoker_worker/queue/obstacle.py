"""The reasons why a worker may not serve its queues: the scripts' replies, and the operator's errors. Owns no state."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

from redis import Redis

from stoker_shared.errors import QueueHeld, StokerError, StoreUnusable
from stoker_shared.wire import LEASE_KEY, MEMBERS_KEY
from stoker_worker.queue.member import Member


class Obstacle(NamedTuple):
    """
    Attributes:
        kind: `held`: the name has another holder; `served`: a queue is served by others, which this worker may not
            join; `kept`: a queue's conversations are in another store; `copied`: another worker has a copy of this
            one's.
        found: the value in Redis that is in the way.
        left_s: until it expires.
        queue: which queue; of `held` and `copied` any.
        holders: the workers behind it, as far as they are known.
    """

    kind: Literal["held", "served", "kept", "copied"]
    found: str
    left_s: float
    queue: str
    holders: tuple[Member, ...] = ()

    @classmethod
    def of(cls, connection: Redis, reply: Sequence[Any], me: Member) -> "Obstacle":
        """From a reply of `TAKE` that is not `taken`; two round trips for those that need to know who is behind it."""
        kind, found, left_ms, index = reply
        found = found.decode(errors="replace")
        obstacle = cls(kind.decode(), found, left_ms / 1000, me.queues[index])
        if obstacle.kind == "held":
            return obstacle._replace(holders=(Member.of(me.name, found.encode()),))
        if obstacle.kind == "kept":
            return obstacle
        members = _members(connection)
        if obstacle.kind == "served":
            here = [one for one, _ in members if obstacle.queue in one.queues]
            holders = [one for one in here if one.share == found or found.startswith("shared ")]
        else:
            alike = [(one, has_lease) for one, has_lease in members if one.store == me.store and one.name != me.name]
            holders = [one for one, has_lease in alike if has_lease]
        return obstacle._replace(holders=tuple(holders))

    def is_gone(self, me: Member) -> bool:
        """Returns whether all workers behind it are certainly gone, or are this very one, whose earlier try had no
        reply."""
        if not self.holders:
            return self.kind == "copied"  # the other one's lease ran out
        return all(one.worker == me.worker or one.is_certainly_dead() for one in self.holders)

    def error(self, me: Member) -> StokerError:
        if self.kind == "kept":
            return StoreUnusable(_kept(self.queue, self.found, me))
        if self.kind == "copied":
            other = self.holders[0]
            return StoreUnusable(
                f"{_who(other)}, has a store of the same name, {other.store!r}: one is a copy of the other. Remove the "
                "file worker-name in the folder of the copy, and it gets another name"
            )
        left = f"if that worker is gone, its lease runs out in {self.left_s:.1f} s"
        if self.kind == "held":
            return QueueHeld(f"the name {me.name!r} is held by {_rq_worker(self)}; {left}")
        who = _who(next((one for one in self.holders if not one.is_certainly_dead()), None))
        reason, ways = _served(self.found, me.share)
        ways += ", or give it another queue (--queues)"
        return QueueHeld(f"queue {self.queue!r} is served by {who}, {reason}: {ways}; {left}")


def _members(connection: Redis) -> list[tuple[Member, bool]]:
    """All members, each as its lease describes it, or if it has none as its record does; and whether it has one."""
    records = cast(dict[bytes, bytes], connection.hgetall(MEMBERS_KEY))
    names = [name.decode(errors="replace") for name in records]
    keys = [LEASE_KEY.format(member=name) for name in names]
    leases = cast(list[bytes | None], connection.mget(keys)) if keys else []
    both = zip(names, records.values(), leases, strict=True)
    return [(Member.of(name, lease or record), lease is not None) for name, record, lease in both]


def _who(member: Member | None) -> str:
    if member is None:
        return "another worker"
    return f"worker {member.name!r} on host {member.process.host}, pid {member.process.pid}"


def _rq_worker(obstacle: Obstacle) -> str:
    [holder] = obstacle.holders
    return f"worker {holder.worker} on host {holder.process.host}, pid {holder.process.pid}"


def _served(found: str, share: str) -> tuple[str, str]:
    """The reason why two such workers may not serve one queue, and what to do."""
    theirs, ours = _shared_parts(found), _shared_parts(share)
    if theirs is None and ours is None:
        reason = "and a queue has only one worker, unless all of its workers have the same shared store"
        return reason, "give both the same --shared-store, or start this one with --standby"
    if theirs is None:
        reason = "which has no shared store, so it serves the queue alone"
        return reason, "run `stoker-worker memory share` on its store and start it with this one's --shared-store"
    if ours is None:
        return f"which has the shared store {theirs[0]}, and this one has none", "start it with the same --shared-store"
    if theirs[0] != ours[0]:
        reason = f"which has the shared store {theirs[0]}, and this one has {ours[0]}"
        return reason, "start it with the same --shared-store"
    reason = f"which has the model {theirs[1]!r}, and this one has {ours[1]!r}; a queue has one model"
    return reason, "start it with the other one's model, or stop all workers of the queue first"


def _kept(queue: str, found: str, me: Member) -> str:
    kind, _, name = found.partition(" ")
    ours = f"the shared store {me.shared}" if me.shared else f"the store {me.store!r}"
    if kind == "shared":
        theirs, way = f"the shared store {name}", "start it with that --shared-store"
    elif me.shared:
        theirs = f"the store {name!r}, whose worker has not served it with a shared store yet"
        way = "run `stoker-worker memory share` on that store and start its worker with the same --shared-store first"
    else:
        theirs, way = f"the store {name!r}", "start the worker of that store instead"
    return (
        f"the agents of queue {queue!r} have their conversations in {theirs}, and this worker has {ours}: {way}, or "
        "give it another queue (--queues), or start it with --new-store, and these agents begin anew"
    )


def _shared_parts(share: str) -> tuple[str, str] | None:
    """The shared store and the model; ``None``: there is no shared store."""
    kind, shared, model = [*share.split(" ", 2), "", ""][:3]
    return (shared, model) if kind == "shared" else None
