"""What members of a queue offer: the model that each has loaded, and the requests that it reads. Pure, no I/O."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from stoker_shared.needs import Needs


class Offer(NamedTuple):
    """
    Attributes:
        model: its name.
        reads: the newest request version, by task.
    """

    model: str
    reads: Mapping[str, int]

    def serves(self, needs: Needs) -> bool:
        return needs.model in (None, self.model) and needs.version <= self.reads.get(needs.task, 0)

    def as_record(self) -> dict[str, Any]:
        """As other members see it once the model is loaded."""
        return {**self._asdict(), "loading": False}


def serves(offer: Offer | None, needs: Needs) -> bool:
    """Whether a member can serve the job. One of an earlier version has no offer while it loads its model."""
    return offer is None or offer.serves(needs)


def offer_in(record: Mapping[str, Any]) -> Offer | None:
    """A member's, from its record in `MEMBERS_KEY`; ``None`` while one of an earlier version loads its model."""
    reads = {task: version for task, version in record["reads"].items() if isinstance(version, int)}
    return Offer(record["model"], reads) if record["model"] else None
