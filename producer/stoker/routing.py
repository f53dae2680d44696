"""Routes jobs to the queues of models: from the models that a job names to its `route`. Owns the dice.

Reads what is on offer, and how far it is trusted, twice a second.
"""

import random
import time
from collections.abc import Sequence
from typing import Final, Literal

from stoker.offers import Offer, all_offered, offered, offers_of
from stoker.operations import Operation
from stoker.presence import live_workers
from stoker.trust_counts import Trusted, read_trust
from stoker_shared.errors import InvalidRequest
from stoker_shared.request import READS_ONLY, GenerationRequest, build_request
from stoker_shared.route import Step
from stoker_shared.selection import Candidate, cheapest_first, route_of
from stoker_shared.task_class import task_of
from stoker_shared.trust import Counts

Models = Sequence[str] | Literal["auto"]
"""Names of models, the cheapest first; ``auto``: all that are served, by their measured costs."""

_LOOK_S: Final = 0.5


class Routing:
    """The routes of one producer's jobs. Any thread."""

    def __init__(self, queue: str, seed: int | None = None) -> None:
        """
        Args:
            queue: preferred where a model is served in several.
            seed: of the dice that decide when a model is tried that is not trusted.
        """
        self._queue = queue
        self._dice = random.Random(seed)
        self._looked_at = float("-inf")
        self._offers: list[Offer] = []
        self._counts: dict[tuple[str, str], Counts] = {}

    def routed(
        self, request: GenerationRequest, models: Models, min_trust: float | None
    ) -> Operation[GenerationRequest]:
        """The request with its route.

        Raises:
            NobodyServes: no live worker serves one of the models.
            InvalidRequest: the request cannot have a route, or the arguments are wrong.
        """
        if min_trust is not None and not 0.0 <= min_trust <= 1.0:
            raise InvalidRequest("min_trust: must be from 0 to 1")
        if request.route or request.model is not None:
            raise InvalidRequest("models: 'model' or 'route' is given already")
        if request.access == "write":
            raise InvalidRequest(f"models: {READS_ONLY}")
        steps, task = (yield from self.steps(models)), task_of(request)
        candidates = [Candidate(step, self._counts.get((step.model, task), Counts())) for step in steps]
        has_check = request.check is not None
        route = route_of(candidates, min_trust=min_trust, escalates=has_check, dice=self._dice)
        asked = [step.model_dump() for step in (route if has_check else route[:1])]
        return build_request({**request.as_payload(), "task": task, "route": asked})

    def steps(self, models: Models) -> Operation[list[Step]]:
        """A step for each model, the cheapest first.

        Raises:
            NobodyServes, InvalidRequest: as `routed`.
        """
        if (isinstance(models, str) and models != "auto") or not models:
            raise InvalidRequest("models: a list of names, or 'auto'")
        yield from self._look()
        if isinstance(models, str):
            return cheapest_first([offer.step for offer in all_offered(self._offers, usual_queue=self._queue)])
        return [offered(model, self._offers, usual_queue=self._queue).step for model in models]

    def _look(self) -> Operation[None]:
        if time.monotonic() - self._looked_at < _LOOK_S:
            return
        workers = yield from live_workers()
        known: list[Trusted] = yield from read_trust()
        self._offers, self._looked_at = offers_of(workers), time.monotonic()
        self._counts = {(trusted.model, trusted.task): trusted.counts for trusted in known}
