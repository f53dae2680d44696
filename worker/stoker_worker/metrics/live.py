"""The worker's rates over the last seconds and minutes, as its heartbeat publishes them. One thread: the heartbeat's.

`stoker status` reads them: there need be no metrics port for it.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from stoker_worker.metrics import declared as of
from stoker_worker.metrics.counting import Metrics
from stoker_worker.metrics.looking import Looking

TOKENS_WINDOW_S: Final = 10.0
JOBS_WINDOW_S: Final = 300.0
"""Long enough for jobs of a minute each to have a rate."""

DATA_LOSS_SHOWN_S: Final = 86_400.0
"""An operator who comes in the next morning sees it too."""

_ENDED: Final = ("finished", "replayed", "agent_job", "failed", "withdrawn")


@dataclass(frozen=True)
class _Sample:
    at: float
    tokens: float
    ended: float


class LiveFigures:
    """Rates from samples, one for each heartbeat."""

    def __init__(self, metrics: Metrics, looking: Looking, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._looking = looking
        self._clock = clock
        self._samples: deque[_Sample] = deque()
        self.tokens_per_s = 0.0

    def now(self) -> dict[str, Any]:
        """
        Returns:
            the value of `now` in `WORKER_KEY`, as wire.py describes it.
        """
        state, counters = self._looking.state(), self._metrics.jobs().counters
        ended = {outcome: int(counters.get((of.JOBS_ENDED, (outcome,)), 0)) for outcome in _ENDED}
        tokens = self._metrics.steps().counters[of.STEP_TOKENS, ()]
        self._add(_Sample(self._clock(), tokens, sum(ended.values())), is_idle=state.in_flight == 0)
        prompt, cached = counters[of.PROMPT_TOKENS, ()], counters[of.CACHED_TOKENS, ()]
        self.tokens_per_s = self._rate(TOKENS_WINDOW_S, lambda sample: sample.tokens)
        return {
            "at": time.time(),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "jobs_per_min": round(60 * self._rate(JOBS_WINDOW_S, lambda sample: sample.ended), 2),
            "in_flight": state.in_flight,
            "in_batch": state.in_batch,
            "hit_share": round(cached / prompt, 4) if prompt else None,
            "done": ended["finished"] + ended["replayed"] + ended["agent_job"],
            "failed": ended["failed"],
            "moved_in": int(counters[of.MOVED_IN, ()]),
            **self._metrics.costs(),
            "shared_store": self._shared_store(),
            "suspended": state.is_suspended,
            "data_loss": asdict(state.data_loss) if state.data_loss.ago_s < DATA_LOSS_SHOWN_S else None,
        }

    def _shared_store(self) -> dict[str, Any] | None:
        if self._looking.shared_store is None:
            return None
        shared = self._looking.shared_store()
        return {"away_s": round(shared.away_s, 1)}

    def _add(self, sample: _Sample, *, is_idle: bool) -> None:
        """Time without work counts in no rate: the next backlog is not judged by it."""
        if is_idle and self._samples and self._samples[-1].ended == sample.ended:
            self._samples.clear()
        self._samples.append(sample)
        while sample.at - self._samples[0].at > JOBS_WINDOW_S:
            self._samples.popleft()

    def _rate(self, window_s: float, of_sample: Callable[[_Sample], float]) -> float:
        """Per second, over the last `window_s` at most."""
        last = self._samples[-1]
        first = next(sample for sample in self._samples if last.at - sample.at <= window_s)
        seconds = last.at - first.at
        return (of_sample(last) - of_sample(first)) / seconds if seconds > 0 else 0.0
