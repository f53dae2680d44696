"""The models on offer: what the live workers serve, by queue, and what a token costs there. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from stoker.presence import LiveWorker
from stoker_shared.errors import StokerError
from stoker_shared.route import Step


class NobodyServes(StokerError):
    """No live worker serves one of the models; the message names the workers and what they serve."""

    retryable = True  # a worker may be started


@dataclass(frozen=True)
class Offer:
    """A model that can be had in a queue.

    Attributes:
        context_tokens: how many tokens a prompt and its answer may have together, at any of the workers.
        workers: their names.
        prompt_token_s, token_s: as in `WorkerFigures`, the mean of the workers that know it.
    """

    model: str
    queue: str
    context_tokens: int
    workers: tuple[str, ...]
    prompt_token_s: float | None = None
    token_s: float | None = None

    @property
    def step(self) -> Step:
        return Step(model=self.model, queue=self.queue, prompt_token_s=self.prompt_token_s, token_s=self.token_s)


def offers_of(workers: Sequence[LiveWorker]) -> list[Offer]:
    """One for each queue, sorted by model; of the workers that have loaded their model and do not drain.

    A queue serves one model. If there are records of two, the worker that was started first has been killed, and its
    record has not expired yet.
    """
    ready = [worker for worker in workers if worker.model is not None and not worker.leaving]
    models: dict[str, str] = {}
    for worker in sorted(ready, key=lambda worker: worker.started_at):
        models.update(dict.fromkeys(worker.queues, worker.model or ""))
    return [
        _offer(model, queue, [worker for worker in ready if worker.model == model and queue in worker.queues])
        for queue, model in sorted(models.items(), key=lambda served: (served[1], served[0]))
    ]


def offered(model: str, offers: Sequence[Offer], *, usual_queue: str) -> Offer:
    """The offer of this model: that of the usual queue if there is one, else of the queue with the most workers.

    Raises:
        NobodyServes: there is none.
    """
    found = [offer for offer in offers if offer.model == model]
    if not found:
        raise NobodyServes(f"no live worker serves model {model!r}; {_who_serves_what(offers)}")
    return min(found, key=lambda offer: (offer.queue != usual_queue, -len(offer.workers), offer.queue))


def all_offered(offers: Sequence[Offer], *, usual_queue: str) -> list[Offer]:
    """One for each model.

    Raises:
        NobodyServes: there is no live worker.
    """
    if not offers:
        raise NobodyServes("no live worker serves any model")
    return [offered(model, offers, usual_queue=usual_queue) for model in sorted({offer.model for offer in offers})]


def _offer(model: str, queue: str, workers: Sequence[LiveWorker]) -> Offer:
    figures = [worker.now for worker in workers if worker.now is not None]
    prompt = [now.prompt_token_s for now in figures if now.prompt_token_s is not None]
    generated = [now.token_s for now in figures if now.token_s is not None]
    return Offer(
        model,
        queue,
        min(worker.context_tokens or 0 for worker in workers),
        tuple(worker.name for worker in workers),
        mean(prompt) if prompt else None,
        mean(generated) if generated else None,
    )


def _who_serves_what(offers: Sequence[Offer]) -> str:
    if not offers:
        return "nor any other"
    return "; ".join(f"{offer.model!r} in queue {offer.queue!r}: {', '.join(offer.workers)}" for offer in offers)
