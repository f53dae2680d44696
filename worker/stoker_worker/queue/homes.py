"""The homes of agents: the member that claims an agent's jobs, and the store that has its memory.

Owns the entries of `HOMES_KEY`; the claim script (`claim_scripts.py`) decides by them, and changes them with each claim
of an agent that has no home or whose home is gone. A worker enters an agent in all of its queues, and looks into all of
them, so two workers that have any queue in common never work on one agent at a time. Fetcher thread; `keep` also
finisher threads.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from redis import Redis
from redis.client import Pipeline

from stoker_shared.wire import COUNTS_KEY, HOMES_KEY, LEFT_KEY, MEMBERS_KEY
from stoker_worker.queue.home_scripts import FORGET, GIVE_UP, HOLD, HOLD_BACK, KEEP_ELSEWHERE
from stoker_worker.queue.keeping import Keeping
from stoker_worker.queue.lease import Lease

NOBODY: Final = "-"
_HERE: Final = "="
_UNTIL: Final = ">"


def as_field(agent_id: str) -> bytes:
    """An agent's field in `HOMES_KEY`. Only an id that is refused anyway has characters that are no UTF-8."""
    return agent_id.encode(errors="replace")


class Home(NamedTuple):
    """`member`: the agent's home; `store`: where its memory is; each is `NOBODY` for none. `version`: may be empty."""

    member: str
    store: str
    version: str = ""

    @classmethod
    def of(cls, entry: bytes | None) -> "Home":
        found = (entry or b"").decode(errors="replace").split(" ")
        if not 2 <= len(found) <= 4:
            return cls(NOBODY, NOBODY)
        version = "" if found[2:3] == ["0"] else "".join(found[2:3])
        return cls(found[0], found[0] if found[1] == _HERE else found[1], version)

    def waits_for_another(self, job_id: str) -> bool:
        """Whether the agent had to wait for another job than this one, which has gone on to another queue."""
        return self.member.startswith(_UNTIL) and self.member != f"{_UNTIL}{job_id}"


class Homes:
    """The entries of one worker's queues."""

    def __init__(self, connection: Redis, lease: Lease, *, memory_travels: bool = False) -> None:
        """`memory_travels`: whether there is a shared store."""
        self._connection = connection
        self._lease = lease
        self._memory_travels = memory_travels
        self.keys = {queue: HOMES_KEY.format(queue=queue) for queue in lease.queues}
        self._count_keys = [COUNTS_KEY.format(queue=queue) for queue in lease.queues]
        self._give_up = connection.register_script(GIVE_UP)
        self._hold = connection.register_script(HOLD)
        self._forget = connection.register_script(FORGET)
        self._hold_back = connection.register_script(HOLD_BACK)
        self._keep_elsewhere = connection.register_script(KEEP_ELSEWHERE)

    def give_up(self, agents: Mapping[str, bool]) -> int:
        """Set agents free of which this worker has no job in flight; returns how many were at home here.

        Args:
            agents: each with whether it may go although its memory is in a store.
        """
        if not agents:
            return 0
        keys = [self._lease.keys[0], *self._count_keys, *self.keys.values()]
        args: list[str | bytes | int] = [self._lease.value, self._lease.member]
        for agent_id, with_memory in agents.items():
            args += [as_field(agent_id), int(with_memory)]
        given: int = self._give_up(keys=keys, args=args)
        return given

    def forget(self, agents: Mapping[str, int]) -> None:
        """This worker's store has removed these agents at these versions, and no job of theirs is in flight here: they
        need no entry, unless another store has something of them."""
        if agents:
            args: list[str | bytes | int] = [self._lease.value, self._lease.member, self._lease.store]
            for agent_id, version in agents.items():
                args += [as_field(agent_id), version]
            keys = [self._lease.keys[0], MEMBERS_KEY, LEFT_KEY, *self._count_keys, *self.keys.values()]
            self._forget(keys=keys, args=args)

    def hold(self, agent_id: str) -> str | None:
        """Make this worker the home of an agent that a job is about to make; another member or store that has the
        agent, or ``None``."""
        args: list[str | bytes | int] = [self._lease.value, self._lease.member, as_field(agent_id), self._lease.store]
        args.append(int(self._memory_travels))
        found: bytes = self._hold(keys=[self._lease.keys[0], MEMBERS_KEY, *self.keys.values()], args=args)
        return found.decode() or None

    def hold_back(self, pipeline: Pipeline, agent_id: str, *, until: str | None) -> None:
        """With the transaction in which a job that writes the agent's turn goes on to the next model: the agent gets
        another home, and its other jobs wait.

        Args:
            until: the job, if it goes to another queue: they wait until it has ended. In the same queue they are behind
                it anyway.
        """
        home = NOBODY if until is None else f"{_UNTIL}{until}"
        keys = [*self._count_keys, *self.keys.values()]
        self._hold_back(keys=keys, args=[as_field(agent_id), home], client=pipeline)

    def keep(self, pipeline: Pipeline, keeping: Keeping, result: Mapping[str, Any]) -> None:
        """With the end of a job that has changed an agent: its memory is in this worker's store now, or nowhere. In the
        queues from which the job came here, the agent's jobs learn that they have waited for a turn in this store.

        Where memory travels, its version is noted too, by which a worker knows whether it has all of it. Once one is
        noted, workers without a shared store go on counting: their turns are missed by those that have one.
        """
        version = keeping.version_after(result) if self._memory_travels else keeping.unshared_version_after(result)
        for key in self.keys.values():
            if keeping.forgets and not version:
                pipeline.hdel(key, as_field(keeping.agent_id))
            elif version or not keeping.is_here:
                pipeline.hset(key, mapping={as_field(keeping.agent_id): self._entry(version)})
        for queue in keeping.came_from:
            if queue not in self.keys:
                args: list[str | bytes | int] = [as_field(keeping.agent_id), f"{_UNTIL}{keeping.job_id}"]
                args += [self._lease.store, version, int(not self._memory_travels)]
                self._keep_elsewhere(keys=[HOMES_KEY.format(queue=queue)], args=args, client=pipeline)

    def _entry(self, version: int) -> str:
        member, store = self._lease.member, self._lease.store
        entry = f"{member} {_HERE if store == member else store}"
        return f"{entry} {version}" if version else entry
