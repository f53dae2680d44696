"""From the models that a job names to its route: which live workers serve them, and the cheapest model that is trusted.

A producer reads the workers' records and the counts of verdicts twice a second at most. Any thread.
"""

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Final, Literal

from stoker.cascade.trust import read_trust
from stoker.operations import Operation
from stoker.presence import LiveWorker, live_workers
from stoker_shared.errors import InvalidRequest, StokerError
from stoker_shared.request import READS_ONLY, GenerationRequest, build_request
from stoker_shared.route import RouteStep
from stoker_shared.trust import Counts, task_of

Models = Sequence[str] | Literal["auto"]
"""Names of models, the cheapest first; ``auto``: all that are served, by their measured costs."""

USUAL_TRUST: Final = 0.8
"""The share of accepted answers that is required where costs are unknown or do not decide."""

_LOOK_S: Final = 0.5
_FEW_VERDICTS: Final = 40.0
"""Weight of about fifty verdicts. A model with less in a class is new there."""
_TRIES_WHILE_NEW: Final = 0.25
_TRIES: Final = 0.01
"""Shares of the jobs that begin with a model that is not trusted: models change, so it may regain trust."""
_PROMPT_TOKENS: Final = 1000.0
_TOKENS: Final = 250.0
"""The job by which costs are compared."""


class NobodyServes(StokerError):
    """No live worker serves one of the models; the message names the workers and their models."""

    retryable = True  # a worker may be started


@dataclass(frozen=True)
class Offer:
    """A model in a queue, and the names of the workers that serve it there."""

    step: RouteStep
    workers: tuple[str, ...]


class Routing:
    """The routes of one producer's jobs. `queue` is preferred for a model that several queues serve."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
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
        counts = [self._counts.get((step.model, task), Counts()) for step in steps]
        first = first_to_ask(steps, counts, min_trust, has_check=request.check is not None)
        asked = steps[first:] if request.check is not None else [steps[first]]
        return build_request({**request.as_payload(), "task": task, "route": [step.model_dump() for step in asked]})

    def steps(self, models: Models) -> Operation[list[RouteStep]]:
        """A step for each model, the cheapest first. Raises as `routed`."""
        if (isinstance(models, str) and models != "auto") or not models:
            raise InvalidRequest("models: a list of names, or 'auto'")
        yield from self._look()
        if not isinstance(models, str):
            return [self._step(model) for model in models]
        if not self._offers:
            raise NobodyServes("no live worker serves any model")
        return cheapest_first(self._step(model) for model in sorted({offer.step.model for offer in self._offers}))

    def _step(self, model: str) -> RouteStep:
        """The model's step in the usual queue if that serves it, else in the queue with the most workers."""
        found = [offer for offer in self._offers if offer.step.model == model]
        if not found:
            raise NobodyServes(f"no live worker serves model {model!r}; {_who_serves_what(self._offers)}")
        return min(found, key=lambda one: (one.step.queue != self._queue, -len(one.workers), one.step.queue)).step

    def _look(self) -> Operation[None]:
        if time.monotonic() - self._looked_at < _LOOK_S:
            return
        workers = yield from live_workers()
        known = yield from read_trust()
        self._offers, self._looked_at = offers_of(workers), time.monotonic()
        self._counts = {(trusted.model, trusted.task): trusted.counts for trusted in known}


def first_to_ask(
    steps: Sequence[RouteStep], counts: Sequence[Counts], min_trust: float | None, *, has_check: bool
) -> int:
    """The index of the model with which a job begins: the cheapest one that is trusted or tried, else the last.

    Args:
        steps: the cheapest model first.
        counts: the verdicts on each of them in the job's class.
        min_trust: a model is trusted if at least this share of its answers is accepted, by the lower bound. ``None``:
            the share from which it is cheaper to begin with it, because a rejected answer also costs the next model's;
            `USUAL_TRUST` without a check.
    """
    for place, (step, verdicts) in enumerate(zip(steps[:-1], counts, strict=False)):
        needed = min_trust
        if needed is None:
            needed = _break_even(step, steps[place + 1]) if has_check else USUAL_TRUST
        tries = _TRIES_WHILE_NEW if verdicts.total < _FEW_VERDICTS else _TRIES
        if verdicts.lower_bound() >= needed or random.random() < tries:
            return place
    return len(steps) - 1


def cheapest_first(steps: Iterable[RouteStep]) -> list[RouteStep]:
    """Sorted by measured costs; steps without come last, by name."""

    def key(step: RouteStep) -> tuple[bool, float, str]:
        cost_s = _usual_cost_s(step)
        return cost_s is None, cost_s or 0.0, step.model

    return sorted(steps, key=key)


def offers_of(workers: Sequence[LiveWorker]) -> list[Offer]:
    """The model of each queue, sorted by model, for workers that have loaded theirs and do not drain.

    A queue serves one model. If there are records of two, the worker that started first was killed, and its record has
    not expired yet.
    """
    ready = [worker for worker in workers if worker.model is not None and not worker.leaving]
    models: dict[str, str] = {}
    for worker in sorted(ready, key=lambda worker: worker.started_at):
        models.update(dict.fromkeys(worker.queues, worker.model or ""))
    return [
        _offer(model, queue, [worker for worker in ready if worker.model == model and queue in worker.queues])
        for queue, model in sorted(models.items(), key=lambda served: (served[1], served[0]))
    ]


def _offer(model: str, queue: str, workers: Sequence[LiveWorker]) -> Offer:
    """The offer with the mean costs of the workers that know theirs."""
    figures = [worker.now for worker in workers if worker.now is not None]
    prompt = [now.prompt_token_s for now in figures if now.prompt_token_s is not None]
    generated = [now.token_s for now in figures if now.token_s is not None]
    step = RouteStep(
        model=model,
        queue=queue,
        prompt_token_s=mean(prompt) if prompt else None,
        token_s=mean(generated) if generated else None,
    )
    return Offer(step, tuple(worker.name for worker in workers))


def _who_serves_what(offers: Sequence[Offer]) -> str:
    if not offers:
        return "nor any other"
    return "; ".join(f"{one.step.model!r} in queue {one.step.queue!r}: {', '.join(one.workers)}" for one in offers)


def _usual_cost_s(step: RouteStep) -> float | None:
    if step.prompt_token_s is None or step.token_s is None:
        return None
    return step.cost_s(_PROMPT_TOKENS, _TOKENS)


def _break_even(step: RouteStep, dearer: RouteStep) -> float:
    """The least trust with which beginning at `step` is cheaper; `USUAL_TRUST` at most. Costs depend on each worker's
    load: a rarely used model has no full batch, in which tokens are cheap, and would otherwise stay expensive."""
    cost_s, dearer_s = _usual_cost_s(step), _usual_cost_s(dearer)
    if cost_s is None or not dearer_s:
        return USUAL_TRUST
    return min(USUAL_TRUST, cost_s / dearer_s)
