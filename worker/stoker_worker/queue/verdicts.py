"""Counts the verdicts on models' answers, each in the transaction that ends its run. Finisher threads.

Owns what workers write into `TRUST_KEY`. A transaction is carried out once, and so a verdict counts once, whichever
worker or reply got lost.
"""

from collections.abc import Mapping
from typing import Any, Final

from redis import Redis
from redis.client import Pipeline

from stoker_shared.result import Attempt
from stoker_shared.trust import MEMORY, MOST_PAIRS, field_of
from stoker_shared.wire import TRUST_KEY

# As `Counts.parsed` and `Counts.after`. KEYS: counts. ARGV: field, whether it was accepted, most that all weights of a
# pair come to, most pairs.
_COUNT: Final = """
local found = redis.pcall('HGET', KEYS[1], ARGV[1])
if not found and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[4]) then return end
local accepted, rejected = string.match(type(found) == 'string' and found or '', '^(%S+) (%S+)$')
accepted, rejected = tonumber(accepted) or 0, tonumber(rejected) or 0
local total, yes, memory = accepted + rejected, tonumber(ARGV[2]), tonumber(ARGV[3])
if not (accepted >= 0 and rejected >= 0 and total < math.huge) then accepted, rejected, total = 0, 0, 0 end
local kept = (1 - 1 / memory) * memory / math.max(memory, total)
local counts = string.format('%.4f %.4f', accepted * kept + yes, rejected * kept + 1 - yes)
redis.pcall('HSET', KEYS[1], ARGV[1], counts)
"""


class Verdicts:
    """Adds verdicts to the counts."""

    def __init__(self, connection: Redis) -> None:
        self._count = connection.register_script(_COUNT)

    def count(self, pipeline: Pipeline, attempt: Attempt, task: str) -> None:
        args: list[str | int] = [field_of(attempt.model, task), int(attempt.accepted), MEMORY, MOST_PAIRS]
        self._count(keys=[TRUST_KEY], args=args, client=pipeline)

    def count_last(self, pipeline: Pipeline, result: Mapping[str, Any]) -> None:
        """The verdict on a result, if its job has a check; those on the attempts before were counted with them."""
        attempts, task = result.get("attempts"), result.get("task")
        if attempts and task:
            self.count(pipeline, Attempt.model_validate(attempts[-1]), task)
