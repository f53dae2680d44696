"""The models that a batch may ask, and the check of its answers. Owns their place in each line's request; no files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stoker.operations import Operation
from stoker.presence import live_workers
from stoker.routing import Models, Routing
from stoker_shared.request import GenerationRequest, build_request

_LEAST_WINDOW: Final = 100


@dataclass(frozen=True)
class ModelChoice:
    """`models`, `min_trust`: as for `Routing.routed`."""

    routing: Routing
    models: Models
    check: Mapping[str, Any]
    min_trust: float | None

    def routed(self, request: GenerationRequest) -> Operation[GenerationRequest]:
        """A line's request with the check and its route.

        Raises:
            NobodyServes: no live worker serves one of the models.
            InvalidRequest: this line cannot have the check or a route.
        """
        checked = build_request({**request.as_payload(), "check": self.check})
        return (yield from self.routing.routed(checked, self.models, self.min_trust))

    def window(self, queues: Sequence[str]) -> Operation[int]:
        """Lines to have in Redis at a time. No more than keep the workers busy: a line begins with the model that was
        trusted when it was sent."""
        workers = yield from live_workers()
        places = sum(worker.max_batch or 0 for worker in workers if not set(queues).isdisjoint(worker.queues))
        return max(_LEAST_WINDOW, 2 * places)

    def queues(self) -> Operation[list[str]]:
        """The queues in which the lines may be, the cheapest model's first.

        Raises:
            NobodyServes: no live worker serves one of the models.
        """
        steps = yield from self.routing.steps(self.models)
        return list(dict.fromkeys(step.queue for step in steps))
