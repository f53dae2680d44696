"""A worker's share of its queues. Owns the member's lease and fencing number; main and heartbeat thread.

Several workers may serve a queue, each under a name of its own: a member. Only the holder of a member's lease may claim
in that name, and end the jobs that were claimed so. The lease expires if the holder stops renewing it, and is taken
over at once from a holder that is certainly dead (same host and boot, process gone). Each holder has a fencing number,
higher than all before: a holder that slept until its lease ran out sees from the last number handed out whether another
worker has held it since.

Another member takes the lease of a dead one to put its jobs back (`recoverer.py`), by the same rules.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final

from redis import Redis
from redis.exceptions import RedisError

from stoker_shared.errors import QueueHeld
from stoker_shared.needs import READS
from stoker_shared.wire import COUNTS_KEY, FENCE_KEY, LEASE_KEY, LEFT_KEY, MEMBERS_KEY, RENEWALS_KEY, SERVED_KEY
from stoker_worker.process_identity import ProcessIdentity, pid_namespace
from stoker_worker.queue.holder import described, identity_in
from stoker_worker.queue.lease_scripts import DESCRIBE, LEAVE, RELEASE, RENEW, TAKE
from stoker_worker.queue.lost_data import LostData
from stoker_worker.queue.offers import Offer

_RETRY_S: Final = 0.05


class Lease:
    """The right to work on some queues in a member's name.

    Attributes:
        member: the name.
        store: the name of the member's store, which has what its agents remember.
        queues: where it claims.
        shared: which shared store is behind that one; empty: none, or one that has never answered before the start.
        ttl_s: how long it lasts after a renewal.
        former_queues: where an earlier holder, which did not leave, has claimed, until `settle`.
        lost_data: what the renewals have shown.
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
        lost_data: LostData | None = None,
    ) -> None:
        """
        Args:
            worker_name: of the RQ worker that holds the lease.
            store: ``None``: it is called like the member.
            model: the one that the worker is going to load.
        """
        self.member = member
        self.store = store or member
        self.shared = shared
        self.queues = tuple(queues)
        self.ttl_s = ttl_s
        self.lost_data = lost_data or LostData()
        self.former_queues: tuple[str, ...] = ()
        self.keys = [LEASE_KEY.format(member=member), FENCE_KEY.format(member=member)]
        served = [SERVED_KEY.format(queue=queue) for queue in queues]
        self._all_keys = [*self.keys, MEMBERS_KEY, LEFT_KEY, RENEWALS_KEY, *served]
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._worker_name = worker_name
        self._offer = {**Offer(model, dict(READS)).as_record(), "loading": True} if model else {}
        self._take = connection.register_script(TAKE)
        self._renew = connection.register_script(RENEW)
        self._release = connection.register_script(RELEASE)
        self._leave = connection.register_script(LEAVE)
        self._describe = connection.register_script(DESCRIBE)
        self._value, self._fence = "", 0
        self._record = ""  # what other members see: the value, and what was announced

    @property
    def is_held(self) -> bool:
        """Whether it was acquired and not released; no round trip."""
        return self._fence > 0

    @property
    def value(self) -> str:
        """The value of the lease key while it is ours; scripts compare it before they write."""
        return self._value

    @property
    def args(self) -> list[str | int]:
        """Value, number and lifetime in milliseconds: the first ARGV of a script that begins with `HOLDS`. Its first
        KEYS are `keys`."""
        return [self._value, self._fence, self._ttl_ms]

    def acquire(self, *, recovers: bool = False) -> None:
        """Take the lease, and join its queues.

        Args:
            recovers: only put the member's jobs back; the set of members stays as it is.

        Raises:
            QueueHeld: another worker, which is not certainly dead, holds it.
        """
        description: dict[str, Any] = {"worker": self._worker_name, "queues": self.queues, "store": self.store}
        description |= {"shared": self.shared, "pids": pid_namespace(), **self._offer}
        if recovers:
            description["recovers"] = self.member
        mine = json.dumps({**description, **asdict(ProcessIdentity.of_this_process())}, sort_keys=True)
        believed, gives_up_at = "", None
        while True:
            args: list[str | int] = [believed, mine, self._ttl_ms, self.member, int(not recovers), self.store]
            held, fence, left_ms, before = self._take(keys=self._all_keys, args=args)
            if fence:
                self._value = self._record = held.decode()
                self._fence = fence
                self.former_queues = tuple(described(before.decode(errors="replace"))["queues"])
                return
            value = held.decode(errors="replace")
            holder = described(value)
            # The holder is this worker itself if the reply to an earlier try was lost.
            is_free = holder["worker"] == self._worker_name or identity_in(holder).is_certainly_dead()
            if is_free and value != believed:
                believed = value
                continue
            gives_up_at = gives_up_at or time.monotonic() + left_ms / 1000 + _RETRY_S
            if not holder["recovers"] or recovers or time.monotonic() > gives_up_at:
                break
            time.sleep(_RETRY_S)  # it only puts this member's jobs back
        worker = f"worker {holder['worker']} on host {holder['host']}, pid {holder['pid']}"
        held = f"the name {self.member!r} is held by {worker}"
        if not holder["queues"]:
            held = f"queue {','.join(self.queues)!r} is held by {worker}, alone, as earlier versions do"
        raise QueueHeld(f"{held}; if that worker is gone, its lease runs out in {left_ms / 1000:.1f} s")

    def renew(self, connection: Redis | None = None) -> bool:
        """Postpone the expiry; ``False`` if another worker holds the lease, or has held it since: this one is deposed.

        Args:
            connection: used instead of the lease's own.
        """
        if not self.is_held:
            return False
        before = self.lost_data.before_renewal()
        number = self._renew(keys=self._all_keys, args=[*self.args, self.member, self._record], client=connection)
        if number:
            self.lost_data.renewed(number, before)
        return bool(number)

    def is_ours(self) -> bool:
        """Whether no other worker has taken it. A lease that ran out is taken up again, as in `HOLDS`."""
        return self.renew()

    def settle(self) -> None:
        """The jobs of the earlier holder are put back: the others see this one as it is."""
        if self.former_queues:
            counts = [COUNTS_KEY.format(queue=name) for name in self.former_queues if name not in self.queues]
            if self._show(counts) or (self.renew() and self._show(counts)):  # it may have run out for a moment
                self.former_queues = ()

    def announce(self, what: Mapping[str, Any]) -> bool:
        """Let the others know more of this member; ``False`` if its lease has run out for a moment: try again."""
        self._record = json.dumps({**json.loads(self._record), **what}, sort_keys=True)
        return self._show([])

    def leave(self) -> None:
        """Leave the members, and give up the lease. Nothing may be claimed or in flight in this name any more."""
        counts = [COUNTS_KEY.format(queue=queue) for queue in self.queues]
        self._leave(keys=[*self._all_keys, *counts], args=[self._value, self.member, self.store])
        self._fence = 0

    def release(self) -> None:
        """Give up the lease and stay a member, whose jobs the next holder puts back."""
        if self.is_held:
            self._release(keys=self.keys, args=[self._value])
            self._fence = 0

    def release_quietly(self) -> None:
        """As `release`, but ignores errors of Redis: the lease then runs out by itself."""
        with suppress(RedisError):
            self.release()

    def _show(self, counts: Sequence[str]) -> bool:
        args: list[str | int] = [self._value, self.member, self._record, len(self.queues)]
        return bool(self._describe(keys=[*self._all_keys, *counts], args=args))
