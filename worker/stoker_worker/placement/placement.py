"""The agents that have jobs in flight at some worker, and the workers that made their newest versions.

Owns the entries of `HELD_KEY` and `LAST_KEY`; any thread. The queue's claim script includes `FRAGMENT`: it refuses a
job of an agent that another worker works on, and leaves a job for a while to the worker with the agent's cache. A
worker enters an agent in all of its queues, and looks into all of them, so two workers with a common queue never work
on one agent at a time. Both hashes may be lost at any time: the shared store takes one turn of each number.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Final, NamedTuple, Self

from redis import Redis
from redis.client import Pipeline

from stoker_shared.agents import AgentRequest
from stoker_shared.request import GenerationRequest
from stoker_shared.wire import HELD_KEY, LAST_KEY

FRAGMENT: Final = (files(__package__) / "placement.lua").read_text(encoding="utf-8")
_SWEEP: Final = FRAGMENT + (files(__package__) / "sweep.lua").read_text(encoding="utf-8")
_MOST_LAST: Final = 2**18  # entries of about 100 bytes for each queue


def as_field(agent_id: str) -> Any:
    """An agent's field in both hashes. Only ids that are refused anyway have characters that are replaced here."""
    return agent_id.encode(errors="replace")


class Writes(NamedTuple):
    """The agents that a job writes.

    Attributes:
        held: the agent under which the job is entered in `HELD_KEY`.
        agent_id: the agent that gets a new version: the target of a fork, else the same one.
        known: the number of its newest version when the job was claimed; 0: unknown.
    """

    held: str
    agent_id: str
    known: int

    @classmethod
    def of(cls, request: GenerationRequest | AgentRequest, known: int) -> Self | None:
        """``None`` for a job that writes nothing. `known`: of the request's own agent."""
        if request.access != "write" or request.agent_id is None:
            return None
        target = request.target if isinstance(request, AgentRequest) else None
        return cls(request.agent_id, target or request.agent_id, 0 if target else known)


class Placement:
    """`held`, `last`: the keys by queue; none for a worker without a shared store, which is alone on its queues."""

    def __init__(self, connection: Redis, queues: Sequence[str], *, worker_name: str) -> None:
        """`worker_name`: as an RQ worker, which no other process has."""
        self.held = {queue: HELD_KEY.format(queue=queue) for queue in queues}
        self.last = {queue: LAST_KEY.format(queue=queue) for queue in queues}
        self.worker_name = worker_name
        self._sweep = connection.register_script(_SWEEP)

    def ended(self, pipeline: Pipeline, writes: Writes, result: Mapping[str, Any]) -> None:
        """Add the commands with which a job ends: its agent is free, and this worker made the newest version. A
        replayed answer changes no newer version. `result`: JSON values; empty if the job failed."""
        number = _version_in(result)
        for queue in self.held:
            pipeline.hdel(self.held[queue], as_field(writes.held))
            if number > writes.known:
                pipeline.hset(self.last[queue], as_field(writes.agent_id), f"{self.worker_name} {number}")

    def sweep(self, queue: str) -> None:
        """Remove some entries of `held` whose jobs are over, and some of `last` if it is too long."""
        if queue in self.held:
            self._sweep(keys=[self.held[queue], self.last[queue]], args=[_MOST_LAST])


def _version_in(result: Mapping[str, Any]) -> int:
    """The newest version after a job with this result; 0 if it made none."""
    if (cache := result.get("cache")) is not None:
        return (cache["agent_version"] or 0) if cache["saved"] else 0
    return result.get("version") or 0
