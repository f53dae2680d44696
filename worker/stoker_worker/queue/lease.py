"""A worker's share of its queues. Owns the member's lease and fencing number; main and heartbeat thread.

A member is a worker by the name that stays when it is started again. A queue has several members if all of them have
the same shared store and the same model, else one. Only the holder of a member's lease may claim in that name, and end
the jobs that were claimed so. The lease expires if the holder stops renewing it, and is taken over at once from a
holder that is certainly dead (same host and boot, process gone). Each holder has a fencing number, higher than all
before: a holder that slept until its lease ran out sees from the last number handed out whether another worker has held
it since.

Another member takes the lease of a dead one to put its jobs back (`recoverer.py`), by the same rules.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from redis import Redis
from redis.exceptions import RedisError

from stoker_shared.wire import FENCE_KEY, LEASE_KEY, MEMBERS_KEY, RENEWALS_KEY, SERVED_KEY, STORE_KEY
from stoker_worker.process_identity import ProcessIdentity, pid_namespace
from stoker_worker.queue.lease_scripts import DESCRIBE, LEAVE, RELEASE, RENEW, TAKE
from stoker_worker.queue.lost_data import LostData
from stoker_worker.queue.member import Member
from stoker_worker.queue.obstacle import Obstacle

log = logging.getLogger(__name__)

_RETRY_S: Final = 0.05
_N_KEYS: Final = 4  # without those of queues


class Lease:
    """The right to work on some queues in a member's name.

    Attributes:
        member: the name.
        worker_name: of the RQ worker that holds it.
        store: the name of the member's store.
        queues: where it claims.
        shared: the id of the shared store behind that one; empty: none.
        ttl_s: how long it lasts after a renewal.
        former_queues: where an earlier holder, which did not leave, has claimed, until `settle`.
        lost_data: what the renewals have shown.
        has_agents: whether the store has conversations, so that another one must not take its place unnoticed. Set by
            the thread that finishes the first turn.
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
            store: ``None``: it is called like the member.
            model: the one that the worker is going to load.
            new_store: it may serve queues whose agents' conversations are in another store.
        """
        process, pids = ProcessIdentity.of_this_process(), pid_namespace()
        self._me = Member(member, worker_name, tuple(queues), store or member, process, shared, model, pids=pids)
        self.member, self.worker_name, self.queues = member, worker_name, self._me.queues
        self.store, self.shared = self._me.store, shared
        self.ttl_s = ttl_s
        self.has_agents = has_agents
        self.lost_data = lost_data or LostData()
        self.former_queues: tuple[str, ...] = ()
        self.keys = [LEASE_KEY.format(member=member), FENCE_KEY.format(member=member)]
        of_queues = [key.format(queue=queue) for queue in queues for key in (SERVED_KEY, STORE_KEY)]
        self._all_keys = [*self.keys, MEMBERS_KEY, RENEWALS_KEY, *of_queues]
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._new_store = new_store
        self._connection = connection
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

    def acquire(self, *, recovers: bool = False, waits: bool = False) -> None:
        """Take the lease, and serve its queues.

        Args:
            recovers: only put the member's jobs back: the set of members, and who serves a queue, stay as they are.
            waits: the caller tries again after `QueueHeld`, so it has to know at once if that is of no use.

        Raises:
            QueueHeld: another worker, which is not certainly dead, has the name, or serves one of the queues, and the
                two may not share it.
            StoreUnusable: the conversations of a queue are in another store, or another worker has a copy of this one.
        """
        if recovers:
            del self._all_keys[_N_KEYS:]
        me, gives_up_at = replace(self._me, recovers=self.member if recovers else ""), 0.0
        passed = [me.kept_alone]  # a store may have been shared since
        args: list[str | int] = [self._ttl_ms, me.name, me.described(), me.store, me.shared]
        args += [me.share, me.kept_in, int(waits), int(self.has_agents)]
        while True:
            reply = self._take(keys=self._all_keys, args=[*args, *passed])
            if reply[0] == b"taken":
                _, value, self._fence, before = reply
                self._value = self._record = value.decode()
                self.former_queues = Member.of(self.member, before).queues
                return
            obstacle = Obstacle.of(self._connection, reply, me)
            if obstacle.found not in passed and self._passes(obstacle):
                passed.append(obstacle.found)
                continue
            gives_up_at = gives_up_at or time.monotonic() + obstacle.left_s + _RETRY_S
            is_recovered = obstacle.kind == "held" and obstacle.holders[0].recovers
            if not is_recovered or recovers or time.monotonic() > gives_up_at:
                raise obstacle.error(me)
            time.sleep(_RETRY_S)  # it only puts this member's jobs back

    def renew(self, connection: Redis | None = None) -> bool:
        """Postpone the expiry; ``False`` if this worker is deposed: another one holds the lease, or has held it since,
        or serves a queue which the two may not share.

        Args:
            connection: used instead of the lease's own.
        """
        if not self.is_held:
            return False
        before = self.lost_data.before_renewal()
        args = [*self.args, self.member, self._record, self._me.share, self._me.kept_in if self.has_agents else ""]
        reply = self._renew(keys=self._all_keys, args=args, client=connection)
        if isinstance(reply, list):
            with suppress(RedisError):
                obstacle = Obstacle.of(connection or self._connection, reply, self._me)
                log.error("%s", obstacle.error(self._me))
            return False
        if reply:
            self.lost_data.renewed(reply, before)
        return bool(reply)

    def is_ours(self) -> bool:
        """Whether no other worker has taken it. A lease that ran out is taken up again, as in `HOLDS`."""
        return self.renew()

    def settle(self) -> None:
        """The jobs of the earlier holder are put back: the others see this one as it is."""
        if self.former_queues and (self._show() or (self.renew() and self._show())):  # it may have run out for a moment
            self.former_queues = ()

    def announce(self, what: Mapping[str, Any]) -> bool:
        """Let the others know more of this member; ``False`` if its lease has run out for a moment: try again."""
        self._record = json.dumps({**json.loads(self._record), **what}, sort_keys=True)
        return self._show()

    def leave(self) -> None:
        """Leave the members, and give up the lease. Nothing may be claimed or in flight in this name any more."""
        self._leave(keys=self._all_keys, args=[self._value, self.member, self._me.share, *self.queues])
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

    def _passes(self, obstacle: Obstacle) -> bool:
        return self._new_store if obstacle.kind == "kept" else obstacle.is_gone(self._me)

    def _show(self) -> bool:
        return bool(self._describe(keys=self._all_keys, args=[self._value, self.member, self._record]))
