"""What is remembered of an end until all that follows it is done. Owns nothing; any thread."""

import json
from dataclasses import asdict, dataclass, field
from typing import Literal

End = Literal["finished", "failed", "stopped"]


@dataclass
class EndedNote:
    """Stands in Redis from the transaction that ended a job to the last step behind it, under the execution's name.

    It says that the end was written, to a worker that never got the reply, and what is left to do, to whoever comes
    after one that died.

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
