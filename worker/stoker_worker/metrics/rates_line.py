"""The log's line of rates: one each minute in which there was work. Heartbeat thread."""

import logging
import time
from collections.abc import Callable
from typing import Final

from stoker_worker.events.job_log import FIELDS
from stoker_worker.metrics import declared as of
from stoker_worker.metrics.counting import Metrics
from stoker_worker.metrics.looking import Looking

_PERIOD_S: Final = 60.0
_log = logging.getLogger(__name__)


class RatesLine:
    """Compares the counts of now with those of a minute ago."""

    def __init__(self, metrics: Metrics, looking: Looking, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._looking = looking
        self._clock = clock
        self._at = clock()
        self._before: dict[str, float] = {}

    def look(self) -> None:
        """Write the line if a minute has passed."""
        seconds = self._clock() - self._at
        if seconds < _PERIOD_S:
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
        jobs, steps = self._metrics.jobs().counters, self._metrics.steps().counters
        ended = {how: jobs.get((of.JOBS_ENDED, (how,)), 0) for how in ("finished", "replayed", "agent_job", "failed")}
        return {
            "generated": steps.get((of.STEP_TOKENS, ()), 0),
            "prompt": jobs.get((of.PROMPT_TOKENS, ()), 0),
            "cached": jobs.get((of.CACHED_TOKENS, ()), 0),
            "finished": ended["finished"] + ended["replayed"] + ended["agent_job"],
            "failed": ended["failed"],
        }
