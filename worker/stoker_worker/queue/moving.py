"""How agents change their homes while these are alive: a worker with free places asks, and the home gives up.

Owns what others have asked for, and how fast this worker claims. Only the home knows what it has in flight, so only the
home gives an agent up, and only one of which nothing is in flight: its jobs stay in order. Fetcher thread; requests
arrive on the thread of RQ's commands. What happens to agents of dead members is decided by the claim script.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from heapq import nlargest
from math import inf
from typing import Final

from redis import Redis
from rq.command import send_command

from stoker_shared.wire import GIVE_UP_COMMAND
from stoker_worker.periodic import Periodic
from stoker_worker.queue.claimer import Claimer
from stoker_worker.queue.homes import Homes
from stoker_worker.queue.members import Members

PREFILL_S: Final = 10.0
"""Taken for what a move costs an agent with a memory, if its cache cannot be had elsewhere: its whole prompt is
prefilled."""

WORTH_A_MOVE_S: Final = 0.5
"""No agent moves for a shorter wait: it would be its turn by the time that the other one has it."""

_MOVING_IN_AT_ONCE: Final = 1
"""While jobs of so many agents that moved here are in flight, no more agents with a memory are asked for. Each costs a
prefill, and free places do not mean that there is time for it. Without a limit, a fleet that falls behind spends its
time on moves and falls further behind (EXP-026)."""

_LOOK_S: Final = 0.5
_REST_SHARE: Final = 20.0
"""Rests last so many times as long as a look, which walks past all jobs of other workers: 0.1 s for 100,000."""
_ASKED_AT_ONCE: Final = 32
_CLAIMS_REMEMBERED: Final = 64


class AskedFor:
    """The agents that other members asked for. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agents: set[str] = set()
        self._n_with_memory = 0

    def add(self, agents: Iterable[str], n_with_memory: int = 0) -> None:
        """A member asks for these, and of those that have a memory for so many at most."""
        with self._lock:
            self._agents.update(agents)
            self._n_with_memory += n_with_memory

    def take(self) -> tuple[frozenset[str], int]:
        with self._lock:
            taken = frozenset(self._agents), self._n_with_memory
            self._agents, self._n_with_memory = set(), 0
            return taken


class ClaimRate:
    """How many jobs a second this worker has claimed lately, since it had a free place last. Pure policy."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=_CLAIMS_REMEMBERED)

    def note(self, n_jobs: int, *, is_full: bool = True) -> None:
        if not is_full:  # while places are free, the rate is that at which jobs come
            self._times.clear()
        self._times.extend([self._clock()] * n_jobs)

    def wait_s(self, n_ahead: int) -> float:
        """Until as many jobs more have been claimed, and one."""
        if not self._times:
            return inf
        return (n_ahead + 1) * (self._clock() - self._times[0]) / len(self._times)


class Moving:
    """
    Attributes:
        asked: what other members want.
        unserved: the same, for jobs in queues that this worker does not serve: these agents go in any case.
        is_only_here, move_s: of an agent with a memory, as in `CacheStorePort`, where memory travels.
    """

    def __init__(self, connection: Redis, members: Members, homes: Homes, claimers: Mapping[str, Claimer]) -> None:
        self._connection = connection
        self._members = members
        self._homes = homes
        self._claimers = claimers
        self.asked, self.unserved = AskedFor(), AskedFor()
        self.is_only_here: Callable[[str], bool] = lambda agent_id: False
        self.move_s: Callable[[str], float | None] = lambda agent_id: None
        self._look = Periodic(_LOOK_S)
        self._rate = ClaimRate()
        self._promised: set[str] = set()
        self._has_asked: list[str] = []

    def look_around(self, n_claimed: int, n_free: int, n_moved_in: int) -> None:
        """After a claim: see which agents have another home no more, and ask for some if there are free places.

        Args:
            n_moved_in: jobs in flight whose agents had another home before.
        """
        self._rate.note(n_claimed, is_full=n_free == 0)
        if not self._look.is_due():
            return
        begin = time.thread_time()
        # First: what is taken back is not aside any more.
        asked = self._ask(n_with_memory=max(0, _MOVING_IN_AT_ONCE - n_moved_in), has_room=n_free > 0)
        for queue, claimer in self._claimers.items():
            claimer.look_around(self._members.of(queue), self._has_asked)
        self._has_asked = asked
        self._look.rest(_REST_SHARE * (time.thread_time() - begin))

    def answer(self, in_flight: Callable[[], frozenset[str]], *, is_full: bool) -> None:
        """Give up agents that were asked for, if their next jobs would wait for longer than a move takes; of those with
        a memory the ones that would wait the longest."""
        self._promised |= self.unserved.take()[0]
        self._keep_promises(in_flight)
        asked, n_with_memory = self.asked.take()
        if not (asked and is_full):
            return
        waits = {agent_id: self._wait_s(agent_id) for agent_id in asked - in_flight()}
        waiting = {agent_id: wait_s for agent_id, wait_s in waits.items() if wait_s > WORTH_A_MOVE_S}
        worth = [agent_id for agent_id, wait_s in waiting.items() if wait_s > self._cost_s(agent_id)]
        may_go = frozenset(nlargest(n_with_memory, worth, key=lambda agent_id: (waiting[agent_id], agent_id)))
        self.give_up({agent_id: agent_id in may_go for agent_id in waiting})

    def leave(self, in_flight: Callable[[], frozenset[str]]) -> None:
        """This worker drains: give up each agent that is asked for, as soon as nothing of it is in flight."""
        self._promised |= self.asked.take()[0] | self.unserved.take()[0]
        self._keep_promises(in_flight)

    def _keep_promises(self, in_flight: Callable[[], frozenset[str]]) -> None:
        if not self._promised:
            return
        self._promised -= self.give_up(dict.fromkeys(self._promised - in_flight(), True))

    def give_up(self, agents: Mapping[str, bool]) -> set[str]:
        """Set those free that may go.

        Args:
            agents: each with whether it may go although its memory is in a store.
        """
        free = {agent_id: with_memory for agent_id, with_memory in agents.items() if not self.is_only_here(agent_id)}
        self._homes.give_up(free)
        return set(free)

    def _cost_s(self, agent_id: str) -> float:
        move_s = self.move_s(agent_id)
        return PREFILL_S if move_s is None else min(move_s, PREFILL_S)

    def _ask(self, *, n_with_memory: int, has_room: bool) -> list[str]:
        """Those with a memory come from the home of which the most agents wait; a member that drains gives up all.

        Returns:
            the agents that were asked for.
        """
        wanted: dict[tuple[str, bool], list[str]] = defaultdict(list)
        others = self._members.others
        leaving = {name for name, member in others.items() if member.is_leaving}
        sharing = {name for name, member in others.items() if member.shared}
        if not (has_room or leaving):
            return []
        for queue, claimer in self._claimers.items():
            for agent_id, home in claimer.first_aside(_ASKED_AT_ONCE, sharing):
                if home in others and (has_room or home in leaving):
                    wanted[home, queue not in others[home].queues].append(agent_id)
        furthest = max(wanted, key=lambda of: len(wanted[of]), default=None)
        for of, agents in wanted.items():
            (home, unserved), number = of, n_with_memory if of == furthest else 0
            asks = {"agents": agents, "n_with_memory": number, "unserved": unserved}
            send_command(self._connection, others[home].worker, GIVE_UP_COMMAND, **asks)
        return [agent_id for agents in wanted.values() for agent_id in agents]

    def _wait_s(self, agent_id: str) -> float:
        """Until the agent's next job is claimed here; 0 if none is known to wait."""
        ahead = [n for claimer in self._claimers.values() if (n := claimer.n_ahead(agent_id)) is not None]
        return self._rate.wait_s(min(ahead)) if ahead else 0.0
