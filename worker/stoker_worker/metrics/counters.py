"""Counts what the stages report (`MetricsPort`), with prometheus_client. Any thread.

Tokens, sources and times are those of the results as they were posted, so the metrics are the sums of what producers
got. Steps are counted apart: a step waits for no other stage. Names follow Prometheus' rules; where vLLM has a metric
of the same meaning, the name after `stoker_` is vLLM's. docs/metrics.md has them all as a table.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from stoker_worker.ports import CompletedGeneration, SequenceProgress
from stoker_worker.ports.metrics import End, MetricsPort

_SHORT: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LONG: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0)
"""A backlog of a night waits for hours."""
_SOURCES: Final = ("memory", "disk", "none")
_OUTCOMES: Final = ("finished", "replayed", "agent_job", "escalated", "failed", "withdrawn", "given_back", "dropped")

_REMEMBERED_S: Final = 600.0
"""After so many seconds of steps, the costs seen before have half the weight."""

# Else each counter has a second series with the time of its first sample.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics(MetricsPort):
    """Counts from the start of the process; nothing is kept on disk.

    Attributes:
        registry: all counters and histograms.
        costs: seconds for a token.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.costs = Costs()
        self._tokens: dict[int, int] = {}
        self._declare_counters()
        self._declare_times()

    def _declare_counters(self) -> None:
        counter = self._counter
        self.jobs_ended = counter(
            "jobs_ended",
            "Jobs that this worker ended. Replayed: answered from the agent's history. Agent_job: about an agent's "
            "memory. Escalated: its answer was rejected, and it went on to another model. Failed: RQ may retry it. "
            "Given_back: by a stop. Dropped: its result came too late, or Redis had lost the job.",
            "outcome",
            _OUTCOMES,
        )
        self._reasons = counter(
            "request_success",
            "Results posted, replayed ones included.",
            "finished_reason",
            ("stop", "length", "tool_calls"),
        )
        self._errors = counter("job_errors", "Failures of jobs, by the name of the error.", "error")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of the results posted, cached ones included.")
        self.cached_tokens = counter(
            "prefix_cache_hits", "Prompt tokens of the results posted that were restored, not prefilled."
        )
        self._generated = counter("generation_tokens", "Generated tokens of the results posted.")
        self._reasoning = counter("reasoning_tokens", "Generated tokens in which the model thinks.")
        self._sources = counter(
            "cache_sources", "Results posted, by where their cached prefix came from.", "source", _SOURCES
        )
        self._misses = counter(
            "cache_misses", "Results posted that reused less than the agent's history allowed.", "reason"
        )
        self._unsaved = counter("results_unsaved", "Results posted whose turn could not be saved.")
        self._recovered = counter("jobs_recovered", "Jobs of dead workers that this worker put back into the queue.")
        self.agents_moved_in = counter(
            "agents_moved_in", "Jobs of this worker whose agent's newest version another worker had made."
        )
        self._step_sequences = counter(
            "step_sequences", "Sequences in the batch, summed over steps: with the number of steps, the mean occupancy."
        )
        self.step_tokens = counter(
            "step_tokens", "Tokens as they are generated, also those of jobs that are canceled or lost later."
        )

    def _declare_times(self) -> None:
        times = self._histogram
        self._result_times = {
            "queued_s": times("request_queue_time", "From enqueueing to the claim.", _LONG),
            "first_token_s": times("time_to_first_token", "From enqueueing to the first token.", _LONG),
            "prefill_s": times("request_prefill_time", "From entering the batch to the first token.", _LONG),
            "decode_s": times("request_decode_time", "From the first token to the last one.", _LONG),
            "total_s": times("e2e_request_latency", "From enqueueing to the result.", _LONG),
        }
        self._saves = times("save_time", "Saves of an agent's version to disk.", _SHORT)
        self._restores = times("restore_time", "Lookups of a prompt's cached prefix.", _SHORT, "source", _SOURCES)
        self._steps = times("step_time", "Steps of the engine.", _SHORT)

    def _counter(self, name: str, text: str, label: str = "", values: Sequence[str] = ()) -> Counter:
        """
        Args:
            values: known values of the label: each of them is shown from the start, with 0.
        """
        counter = Counter(f"stoker_{name}", text, [label] if label else (), registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float], label: str = "", values: Sequence[str] = ()
    ) -> Histogram:
        """Of seconds. `values`: as for a counter."""
        labels = [label] if label else ()
        histogram = Histogram(f"stoker_{name}_seconds", text, labels, buckets=buckets, registry=self.registry)
        for value in values:
            histogram.labels(value)
        return histogram

    def answered(self, result: Mapping[str, Any], *, save_s: float = 0.0, replayed: bool = False) -> None:
        usage, cache, timing = result.get("usage", {}), result.get("cache", {}), result.get("timing", {})
        self.jobs_ended.labels("replayed" if replayed else "finished").inc()
        self._reasons.labels(str(result.get("finish_reason"))).inc()
        prompt, cached = usage.get("prompt_tokens", 0), usage.get("cached_tokens", 0)
        self.prompt_tokens.inc(prompt)
        self.cached_tokens.inc(cached)
        self._generated.inc(usage.get("completion_tokens", 0))
        self._reasoning.inc(usage.get("reasoning_tokens", 0))
        for field, histogram in self._result_times.items():
            histogram.observe(timing.get(field, 0.0))
        self._sources.labels(str(cache.get("source"))).inc()
        if (reason := cache.get("miss_reason")) is not None:
            self._misses.labels(reason).inc()
        if cache.get("save_error") is not None and not cache.get("saved"):
            self._unsaved.inc()
        if not replayed:
            if cache.get("saved"):
                self._saves.observe(save_s)
            self.costs.prefilled(prompt - cached)

    def failed(self, error: Exception) -> None:
        self.jobs_ended.labels("failed").inc()
        self._errors.labels(type(error).__name__).inc()

    def ended(self, how: End, n_jobs: int = 1) -> None:
        self.jobs_ended.labels(how).inc(n_jobs)

    def escalated(self, n_prefilled: int) -> None:
        self.jobs_ended.labels("escalated").inc()
        self.costs.prefilled(n_prefilled)

    def recovered(self, n_jobs: int) -> None:
        self._recovered.inc(n_jobs)

    def moved_in(self, n_agents: int) -> None:
        self.agents_moved_in.inc(n_agents)

    def restored(self, seconds: float, source: str) -> None:
        self._restores.labels(source).observe(seconds)

    def stepped(
        self, seconds: float, progress: Mapping[int, SequenceProgress], ended: Sequence[CompletedGeneration]
    ) -> None:
        before, self._tokens = self._tokens, {uid: now.tokens for uid, now in progress.items()}
        tokens = sum(n_tokens - before.get(uid, 0) for uid, n_tokens in self._tokens.items())
        tokens += sum(len(done.generated_ids) - before.get(done.uid, 0) for done in ended)
        drew = [uid for uid, n_tokens in self._tokens.items() if n_tokens] + [done.uid for done in ended]
        has_prefill = any(now.stage == "prefill" for now in progress.values()) or not all(map(before.get, drew))
        in_batch = len(ended) + sum(now.stage in ("prefill", "decode") for now in progress.values())
        self._steps.observe(seconds)
        self._step_sequences.inc(in_batch)
        self.step_tokens.inc(tokens)
        self.costs.stepped(seconds, tokens, has_prefill=has_prefill)

    def ended_jobs(self) -> dict[str, int]:
        """Jobs that have ended, by outcome."""
        return {outcome: int(total(self.jobs_ended, outcome)) for outcome in _OUTCOMES}


def total(counter: Counter, label: str = "") -> float:
    """
    Args:
        label: one value of the counter's label, if it has one.
    """
    one = counter.labels(label) if label else counter
    return sum(sample.value for family in one.collect() for sample in family.samples)


class Costs:
    """The seconds that the model needs for a token of a prompt and for one that it generates. Any thread.

    A step without prefill costs its seconds for the tokens that it generates. The others cost more, and the difference
    is the prefill's. So a worker whose batch is full has cheap tokens: the figures are those of the load that it has.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._decode_s = self._mixed_s = 0.0
        self._decode_tokens = self._mixed_tokens = self._prefilled = 0.0

    def stepped(self, seconds: float, tokens: int, *, has_prefill: bool) -> None:
        """
        Args:
            tokens: generated in this step.
        """
        with self._lock:
            if has_prefill:
                self._mixed_s += seconds
                self._mixed_tokens += tokens
            else:
                self._decode_s += seconds
                self._decode_tokens += tokens
            if self._decode_s + self._mixed_s > _REMEMBERED_S:
                self._decode_s, self._decode_tokens = self._decode_s / 2, self._decode_tokens / 2
                self._mixed_s, self._mixed_tokens = self._mixed_s / 2, self._mixed_tokens / 2
                self._prefilled /= 2

    def prefilled(self, tokens: int) -> None:
        """A sequence ended whose prompt had so many tokens that were not in a cache."""
        with self._lock:
            self._prefilled += tokens

    def figures(self) -> dict[str, float | None]:
        """Seconds for a token of a prompt and for a generated one, under the names of `WORKER_KEY`; ``None``: not known
        yet."""
        with self._lock:
            token_s = self._decode_s / self._decode_tokens if self._decode_tokens else None
            if token_s is None or not self._prefilled:
                return {"prompt_token_s": None, "token_s": token_s}
            prefill_s = max(0.0, self._mixed_s - self._mixed_tokens * token_s)
            return {"prompt_token_s": prefill_s / self._prefilled, "token_s": token_s}
