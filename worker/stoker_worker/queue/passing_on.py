"""Passes on what this worker cannot serve: leaves such jobs to others, and gives up the agents whose jobs they are.

An agent's jobs stay in order, so an agent whose next job is for another model has to go where that is served. If its
memory cannot go with it, it stays, and the job fails at last. Fetcher thread.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from redis import Redis

from stoker_shared.needs import READS, Needs
from stoker_shared.wire import HOMES_KEY
from stoker_worker.periodic import Periodic
from stoker_worker.ports import Serving
from stoker_worker.queue.claimer import Claimer
from stoker_worker.queue.homes import Home, as_field
from stoker_worker.queue.lease import Lease
from stoker_worker.queue.left_to_others import LeftToOthers
from stoker_worker.queue.members import Members
from stoker_worker.queue.moving import Moving
from stoker_worker.queue.offers import Offer
from stoker_worker.queue.waiting_job import HomeRule

_LOOK_S: Final = 0.5
_LOOKED_AT: Final = 500
_MOST_SHOWN: Final = 10
_MOST_OF_A_NAME: Final = 200


class PassingOn:
    """For the queues of one worker.

    Attributes:
        unserved: as in `WORKER_KEY`.
    """

    def __init__(
        self,
        connection: Redis,
        lease: Lease,
        members: Members,
        moving: Moving,
        claimers: Mapping[str, Claimer],
        *,
        rule: HomeRule,
    ) -> None:
        self._connection = connection
        self._lease = lease
        self._members = members
        self._moving = moving
        self._claimers = claimers
        self._rule = rule
        self._left = {
            queue: LeftToOthers(claimer.lines, members, queue, wait_s=rule.wait_s)
            for queue, claimer in claimers.items()
        }
        self._look = Periodic(_LOOK_S)
        self._to_announce: Offer | None = None
        self.unserved: tuple[Mapping[str, Any], ...] = ()

    def serve(self, serving: Serving) -> None:
        """From now on leave to others what this worker cannot serve. Main thread, before the first claim."""
        self._to_announce = Offer(serving.model, dict(READS))
        for left in self._left.values():
            left.offer = self._to_announce

    def before_claim(self) -> None:
        """Let the other members know what this one serves, unless they do, and see whether one can serve what this one
        would refuse."""
        for left in self._left.values():
            left.look_at_refused()
        offer = self._to_announce
        # Until the jobs of the last worker of this name are back in the queue, the others see that worker.
        if offer is not None and not self._lease.former_queues and self._lease.announce(offer.as_record()):
            self._to_announce = None

    def look_around(self, in_flight: Callable[[], frozenset[str]]) -> None:
        """After a claim: let agents go whose next jobs others can serve, and see whether there are such others.

        Args:
            in_flight: the agents of which this worker has jobs in flight.
        """
        if not self._look.is_due():
            return
        for queue, left in self._left.items():
            if agents := left.some_agents(_LOOKED_AT):
                self._let_go(queue, agents, in_flight())
            left.look()
        self.unserved = tuple(entry for queue in self._left for entry in self._shown(queue))

    def _let_go(self, queue: str, agents: list[str], in_flight: frozenset[str]) -> None:
        left, lines = self._left[queue], self._claimers[queue].lines
        present = self._members.of(queue)
        fields: Any = [as_field(agent_id) for agent_id in agents]
        entries: Any = self._connection.hmget(HOMES_KEY.format(queue=queue), fields)
        stuck, free = set(), set()
        for agent_id, entry in zip(agents, entries, strict=True):
            home, head = Home.of(entry), lines.left[agent_id]
            if home.member in present:
                lines.put_aside(agent_id, home.member)
            elif head.use.continues and not self._rule.memory_travels and home.store == self._lease.store:
                stuck.add(agent_id)
            elif home.member == self._lease.member and agent_id not in in_flight:
                free.add(agent_id)
        stuck |= free - self._moving.give_up(dict.fromkeys(free, True))
        left.stay(stuck, among=set(agents))

    def _shown(self, queue: str) -> list[dict[str, Any]]:
        left, me = self._left[queue], self._lease.member
        entries = [_entry(queue, needs, n_jobs, None) for needs, n_jobs in left.served_by_nobody(_MOST_SHOWN)]
        return entries + [_entry(queue, needs, n_jobs, me) for needs, n_jobs in left.stuck_here(_MOST_SHOWN)]


def _entry(queue: str, needs: Needs, n_jobs: int, only_at: str | None) -> dict[str, Any]:
    # Any producer may have written the name: half a character is no JSON for everybody.
    model = needs.model and needs.model.encode(errors="replace").decode()[:_MOST_OF_A_NAME]
    return {"queue": queue, "jobs": n_jobs, **needs._asdict(), "model": model, "only_at": only_at}
