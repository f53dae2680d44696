"""Removes the ids of canceled jobs whose hashes are gone from their registry. Owns where it goes on; fetcher thread.

RQ keeps canceled jobs for ever. A job that `stoker` cancels expires, and its id would stay.
"""

from collections.abc import Callable
from typing import Final

from redis import Redis
from rq.job import Job
from rq.registry import CanceledJobRegistry

from stoker_worker.periodic import Periodic

_PAGE: Final = 500
_EVERY_S: Final = 60.0

# In one step: the id may be used again, and canceled again. Any producer can write a key of another type.
_REMOVE: Final = """
if redis.call('TYPE', KEYS[1]).ok ~= 'zset' then return {0, 0} end
local found, n_gone = redis.call('ZRANGE', KEYS[1], ARGV[1], ARGV[2]), 0
for _, job_id in ipairs(found) do
  if redis.call('EXISTS', ARGV[3] .. job_id) == 0 then n_gone = n_gone + redis.call('ZREM', KEYS[1], job_id) end
end
return {#found, n_gone}
"""


class CanceledJobs:
    """Looks through the canceled jobs of some queues, a page of one queue at a time."""

    def __init__(self, connection: Redis, queues: Callable[[], list[str]]) -> None:
        """
        Args:
            queues: those to look through now; asked when a round begins.
        """
        self._connection = connection
        self._queues = queues
        self._round = Periodic(_EVERY_S)
        self._left: list[str] = []
        self._position = 0
        self._remove = connection.register_script(_REMOVE)

    def step(self) -> None:
        """Look at the next page, if a round is under way or due."""
        if not self._left and self._round.is_due():
            self._left = self._queues()
        if not self._left:
            return
        key = CanceledJobRegistry(self._left[0], connection=self._connection).key
        last = self._position + _PAGE - 1
        n_found, n_gone = self._remove(keys=[key], args=[self._position, last, Job.key_for("")])
        self._position += n_found - n_gone
        if n_found < _PAGE:
            self._left, self._position = self._left[1:], 0
