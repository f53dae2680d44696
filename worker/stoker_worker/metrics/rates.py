"""Rates from the counts: those of the heartbeat, which `stoker status` shows, and the log's line once a minute.

One thread: the heartbeat's. Neither needs a metrics port.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from stoker_worker.events import FIELDS
from stoker_worker.metrics.counters import Metrics, total
from stoker_worker.metrics.health import Looking

_log = logging.getLogger(__name__)

TOKENS_WINDOW_S: Final = 10.0
JOBS_WINDOW_S: Final = 300.0
"""Long enough for jobs of a minute each to have a rate."""

DATA_LOSS_SHOWN_S: Final = 86_400.0
"""An operator who comes in the next morning sees it too."""

_LINE_EVERY_S: Final = 60.0


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
        metrics, state, ended = self._metrics, self._looking.state(), self._metrics.ended_jobs()
        n_ended = _done(ended) + ended["failed"] + ended["withdrawn"]
        self._add(_Sample(self._clock(), total(metrics.step_tokens), n_ended), is_idle=state.in_flight == 0)
        self.tokens_per_s = self._rate(TOKENS_WINDOW_S, lambda sample: sample.tokens)
        prompt, shared_store = total(metrics.prompt_tokens), self._looking.shared_store
        return {
            "at": time.time(),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "jobs_per_min": round(60 * self._rate(JOBS_WINDOW_S, lambda sample: sample.ended), 2),
            "in_flight": state.in_flight,
            "in_batch": state.in_batch,
            "hit_share": round(total(metrics.cached_tokens) / prompt, 4) if prompt else None,
            "done": _done(ended),
            "failed": ended["failed"],
            "moved_in": int(total(metrics.agents_moved_in)),
            **metrics.costs.figures(),
            "shared_store": {"away_s": round(shared_store().away_s, 1)} if shared_store else None,
            "suspended": state.is_suspended,
            "data_loss": asdict(state.data_loss) if state.data_loss.ago_s < DATA_LOSS_SHOWN_S else None,
        }

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


class RatesLine:
    """The log's line of rates: one for each minute in which there was work."""

    def __init__(self, metrics: Metrics, looking: Looking, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._looking = looking
        self._clock = clock
        self._at = clock()
        self._before: dict[str, float] = {}

    def look(self) -> None:
        """Write the line if a minute has passed."""
        seconds = self._clock() - self._at
        if seconds < _LINE_EVERY_S:
            return
        now = self._counts()
        new = {name: n - self._before.get(name, 0) for name, n in now.items()}
        self._at, self._before = self._clock(), now
        state = self._looking.state()
        if not (state.in_flight or any(new.values())):
            return
        prompt = new["prompt"]
        fields = {
            "tokens_per_s": round(new["generated"] / seconds, 1),
            "prompt_tokens_per_s": round(prompt / seconds, 1),
            "cached_share": round(new["cached"] / prompt, 2) if prompt else None,
            "finished": int(new["finished"]),
            "failed": int(new["failed"]),
            "in_flight": state.in_flight,
        }
        text = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
        _log.info("rates %s", text, extra={FIELDS: {"event": "rates", **fields}})

    def _counts(self) -> dict[str, float]:
        metrics, ended = self._metrics, self._metrics.ended_jobs()
        return {
            "generated": total(metrics.step_tokens),
            "prompt": total(metrics.prompt_tokens),
            "cached": total(metrics.cached_tokens),
            "finished": _done(ended),
            "failed": ended["failed"],
        }


def _done(ended: dict[str, int]) -> int:
    return ended["finished"] + ended["replayed"] + ended["agent_job"]
