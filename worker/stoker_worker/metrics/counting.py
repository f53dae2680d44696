"""Counts what the stages report (`MetricsPort`). Any thread.

Tokens, sources and times are those of the results as they were posted, so the metrics are the sums of what producers
got. Steps are counted apart: a step waits for no other stage.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from stoker_worker.metrics import declared as of
from stoker_worker.metrics.costs import Costs
from stoker_worker.metrics.tally import Snapshot, Tally
from stoker_worker.ports import CompletedGeneration, SequenceProgress
from stoker_worker.ports.metrics import End, MetricsPort

_TIMES = {
    "queued_s": of.QUEUE_TIME,
    "first_token_s": of.FIRST_TOKEN,
    "prefill_s": of.PREFILL_TIME,
    "decode_s": of.DECODE_TIME,
    "total_s": of.LATENCY,
}
_TOKENS = {
    "prompt_tokens": of.PROMPT_TOKENS,
    "cached_tokens": of.CACHED_TOKENS,
    "completion_tokens": of.GENERATION_TOKENS,
    "reasoning_tokens": of.REASONING_TOKENS,
}
_OTHERS = (
    *(of.JOBS_ENDED, of.REQUEST_SUCCESS, of.CACHE_SOURCES, of.UNSAVED, of.RECOVERED, of.MOVED_IN),
    *(of.SAVE_TIME, of.RESTORE_TIME),
)


class Metrics(MetricsPort):
    """Implements `MetricsPort`. It counts from the start of the process; nothing is kept on disk."""

    def __init__(self) -> None:
        self._jobs = Tally(*_TIMES.values(), *_TOKENS.values(), *_OTHERS)
        self._steps = Tally(of.STEP_TIME, of.STEP_SEQUENCES, of.STEP_TOKENS)
        self._tokens: dict[int, int] = {}
        self._costs = Costs()

    def jobs(self) -> Snapshot:
        return self._jobs.snapshot()

    def steps(self) -> Snapshot:
        return self._steps.snapshot()

    def costs(self) -> dict[str, float | None]:
        """Seconds for a token of a prompt and for a generated one, under the names of `WORKER_KEY`."""
        with self._steps.one_event():
            return {"prompt_token_s": self._costs.prompt_token_s(), "token_s": self._costs.token_s()}

    def answered(self, result: Mapping[str, Any], *, save_s: float = 0.0, replayed: bool = False) -> None:
        usage, cache, timing = result.get("usage", {}), result.get("cache", {}), result.get("timing", {})
        count = self._jobs
        with count.one_event():
            count.add(of.JOBS_ENDED, "replayed" if replayed else "finished")
            count.add(of.REQUEST_SUCCESS, str(result.get("finish_reason")))
            for field, metric in _TOKENS.items():
                count.add(metric, n=usage.get(field, 0))
            for field, metric in _TIMES.items():
                count.observe(metric, timing.get(field, 0.0))
            count.add(of.CACHE_SOURCES, str(cache.get("source")))
            if (reason := cache.get("miss_reason")) is not None:
                count.add(of.CACHE_MISSES, reason)
            if cache.get("save_error") is not None and not cache.get("saved"):
                count.add(of.UNSAVED)
            if cache.get("saved") and not replayed:
                count.observe(of.SAVE_TIME, save_s)
        if not replayed:
            with self._steps.one_event():
                self._costs.prefilled(usage.get("prompt_tokens", 0) - usage.get("cached_tokens", 0))

    def failed(self, error: Exception) -> None:
        with self._jobs.one_event():
            self._jobs.add(of.JOBS_ENDED, "failed")
            self._jobs.add(of.JOB_ERRORS, type(error).__name__)

    def ended(self, how: End, n_jobs: int = 1) -> None:
        with self._jobs.one_event():
            self._jobs.add(of.JOBS_ENDED, how, n=n_jobs)

    def escalated(self, n_prefilled: int) -> None:
        with self._jobs.one_event():
            self._jobs.add(of.JOBS_ENDED, "escalated")
        with self._steps.one_event():
            self._costs.prefilled(n_prefilled)

    def recovered(self, n_jobs: int) -> None:
        with self._jobs.one_event():
            self._jobs.add(of.RECOVERED, n=n_jobs)

    def moved_in(self, n_agents: int) -> None:
        with self._jobs.one_event():
            self._jobs.add(of.MOVED_IN, n=n_agents)

    def restored(self, seconds: float, source: str) -> None:
        with self._jobs.one_event():
            self._jobs.observe(of.RESTORE_TIME, seconds, source)

    def stepped(
        self, seconds: float, progress: Mapping[int, SequenceProgress], ended: Sequence[CompletedGeneration]
    ) -> None:
        before, self._tokens = self._tokens, {uid: now.tokens for uid, now in progress.items()}
        tokens = sum(n_tokens - before.get(uid, 0) for uid, n_tokens in self._tokens.items())
        tokens += sum(len(done.generated_ids) - before.get(done.uid, 0) for done in ended)
        drew = [uid for uid, n_tokens in self._tokens.items() if n_tokens] + [done.uid for done in ended]
        has_prefill = any(now.stage == "prefill" for now in progress.values()) or not all(map(before.get, drew))
        in_batch = len(ended) + sum(now.stage in ("prefill", "decode") for now in progress.values())
        with self._steps.one_event():
            self._steps.observe(of.STEP_TIME, seconds)
            self._steps.add(of.STEP_SEQUENCES, n=in_batch)
            self._steps.add(of.STEP_TOKENS, n=tokens)
            self._costs.stepped(seconds, tokens, has_prefill=has_prefill)
