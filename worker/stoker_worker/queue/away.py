"""Agents whose next job here waits for a store that is away. Owns until when each waits; fetcher thread.

Their lines are aside. Otherwise they would be tried again and again before all jobs behind them.
"""

import time
from collections.abc import Container
from itertools import islice
from typing import NamedTuple

from redis import Redis
from rq.job import Job, JobStatus

from stoker_worker.queue.foreign_ids import raw
from stoker_worker.queue.lines import Lines

_PAGE = 500
_QUEUED = JobStatus.QUEUED.value.encode()


class _Wait(NamedTuple):
    job_id: str
    until: float


class Away:
    """``agent_id in away``: whether the agent's next job waits for a store that is away."""

    def __init__(self, connection: Redis, lines: Lines) -> None:
        self._connection = connection
        self._lines = lines
        self._waits: dict[str, _Wait] = {}
        self._to_look_at: list[str] = []

    def __contains__(self, agent_id: object) -> bool:
        return agent_id in self._waits

    def clear(self) -> None:
        """No agent waits any more."""
        self._waits.clear()

    def note(self, agent_id: str, left_s: float) -> None:
        """The first job of this agent's line, which is aside, waits for so many seconds more."""
        if (head := self._lines.first_of(agent_id)) is not None:
            self._waits[agent_id] = _Wait(head.job_id, time.monotonic() + left_s)

    def look(self, stores: Container[str]) -> None:
        """Forget those that wait no more.

        Args:
            stores: those that are not away.
        """
        now = time.monotonic()
        self._waits = {name: wait for name, wait in self._waits.items() if self._goes_on(name, wait, stores, now)}
        self._to_look_at = self._to_look_at or list(self._waits)
        page = [name for name in islice(self._to_look_at, _PAGE) if name in self._waits]
        del self._to_look_at[:_PAGE]
        if page:  # a job may have been canceled or deleted, which a look at the queue's ends does not show
            with self._connection.pipeline(transaction=False) as pipeline:
                for agent_id in page:
                    pipeline.hget(raw(Job.key_for(self._waits[agent_id].job_id)), "status")
                found = pipeline.execute(raise_on_error=False)
            for agent_id, status in zip(page, found, strict=True):
                if status != _QUEUED:
                    del self._waits[agent_id]

    def _goes_on(self, agent_id: str, wait: _Wait, stores: Container[str], now: float) -> bool:
        head, store = self._lines.first_of(agent_id), self._lines.aside.get(agent_id)
        return head is not None and head.job_id == wait.job_id and store not in stores and now < wait.until
