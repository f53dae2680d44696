"""What is remembered of an end until all that follows it is done. Owns nothing; any thread."""

import json
from dataclasses import asdict, dataclass, field
from typing import Literal

End = Literal["finished", "failed", "stopped"]


@dataclass
class EndedNote:
    """Kept in Redis, under the execution's name, from the transaction that ended a job to the last step behind it.

    A worker that never got the reply sees from it that the end was written; one that comes after a dead worker, what is
    left to do.

    Attributes:
        end: how; a failure that is retried is ``failed`` too.
        dependents: ids of jobs that may wait for this end.
        rate_limit: key of the rate limit under which the job held a place, or empty.
    """

    end: End
    dependents: list[str] = field(default_factory=list)
    rate_limit: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "EndedNote":
        return cls(**json.loads(text))
