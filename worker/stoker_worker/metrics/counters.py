"""Counts what the stages report (`MetricsPort`), with prometheus_client. Any thread.

Tokens, sources and times are taken from the posted results, so the metrics are sums of what producers got; steps are
counted apart. Names follow Prometheus' rules; where vLLM has a metric of the same meaning, the name after `stoker_` is
vLLM's. docs/metrics.md has a table of them.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from stoker_shared.errors import AgentVersionNotSaved
from stoker_worker.events import FIELDS
from stoker_worker.ports import CompletedGeneration, SequenceProgress, SharedUse, WorkerState
from stoker_worker.ports.metrics import End, MetricsPort

_log = logging.getLogger(__name__)

_SHORT: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LONG: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0)
"""Buckets in seconds; the longest are for a backlog of a night."""
_SOURCES: Final = ("memory", "disk", "none")
_OUTCOMES: Final = ("finished", "replayed", "agent_job", "escalated", "failed", "withdrawn", "given_back", "dropped")

_REMEMBERED_S: Final = 600.0
"""After so many seconds of steps, the costs seen so far weigh half."""

_TOKENS_WINDOW_S: Final = 10.0
_JOBS_WINDOW_S: Final = 300.0
"""Long enough for jobs of a minute each to have a rate."""
_DATA_LOSS_SHOWN_S: Final = 86_400.0
"""A day, so that an operator sees it the next morning too."""
_LINE_EVERY_S: Final = 60.0

# Without this, each counter has a second series with the time of its first sample.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics(MetricsPort):
    """Counts from the start of the process; nothing is kept on disk. `registry` has all counters and histograms."""

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
            "Given_back: it runs again, after a stop, or because the shared store was away or another worker made the "
            "version. Dropped: its result came too late, or Redis had lost the job.",
            "outcome",
            _OUTCOMES,
        )
        self._reasons = counter(
            "request_success",
            "Results posted, replayed ones included.",
            "finished_reason",
            ("stop", "length", "tool_calls"),
        )
        self._errors = counter(
            "job_errors",
            "Failures of jobs, by the name of the error.",
            "error",
            (AgentVersionNotSaved.__name__,),
        )
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
        """`values`: known values of the label, each shown from the start, with 0."""
        counter = Counter(f"stoker_{name}", text, [label] if label else (), registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float], label: str = "", values: Sequence[str] = ()
    ) -> Histogram:
        """A histogram of seconds. `values`: as for a counter."""
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
            if timing.get("prefill_s"):  # a prompt that is only counted is not prefilled
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
    """The sum of a counter's samples; with `label`, only of that value of its label."""
    one = counter.labels(label) if label else counter
    return sum(sample.value for family in one.collect() for sample in family.samples)


class Costs:
    """The seconds that the model needs for a token of a prompt and for a generated one under the present load: in a
    full batch, tokens are cheap. Steps without prefill give the cost of a generated token; the steps with prefill take
    longer, and the difference is the prefill's cost. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._decode_s = self._mixed_s = 0.0
        self._decode_tokens = self._mixed_tokens = self._prefilled = 0.0

    def stepped(self, seconds: float, tokens: int, *, has_prefill: bool) -> None:
        """`tokens`: generated in this step."""
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
        """Count the tokens of an ended sequence's prompt that were not in a cache."""
        with self._lock:
            self._prefilled += tokens

    def figures(self) -> dict[str, float | None]:
        """Both costs in seconds, under their names in `WORKER_KEY`; ``None``: not known yet."""
        with self._lock:
            token_s = self._decode_s / self._decode_tokens if self._decode_tokens else None
            if token_s is None or not self._prefilled:
                return {"prompt_token_s": None, "token_s": token_s}
            prefill_s = max(0.0, self._mixed_s - self._mixed_tokens * token_s)
            return {"prompt_token_s": prefill_s / self._prefilled, "token_s": token_s}


@dataclass(frozen=True)
class _Sample:
    at: float
    tokens: float
    ended: float


class Rates:
    """Rates for `stoker status` at each heartbeat, and a log line for each minute with work. Heartbeat thread."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._samples: deque[_Sample] = deque()
        self._line_at = clock()
        self._shown = _Sample(self._line_at, 0.0, 0.0), 0.0
        self._at_line: dict[str, float] = {}

    def now(self, state: WorkerState, shared_store: SharedUse | None = None) -> dict[str, Any]:
        """The value of `now` in `WORKER_KEY`, as wire.py describes it."""
        metrics, ended, at = self._metrics, self._metrics.ended_jobs(), self._clock()
        n_ended = _done(ended) + ended["failed"] + ended["withdrawn"]
        self._add(_Sample(at, total(metrics.step_tokens), n_ended), is_idle=state.in_flight == 0)
        tokens_per_s = self._rate(_TOKENS_WINDOW_S, lambda sample: sample.tokens)
        self._shown = self._samples[-1], tokens_per_s
        if at - self._line_at >= _LINE_EVERY_S:
            self._write_line(at, state.in_flight)
        prompt = total(metrics.prompt_tokens)
        return {
            "at": time.time(),
            "tokens_per_s": round(tokens_per_s, 1),
            "jobs_per_min": round(60 * self._rate(_JOBS_WINDOW_S, lambda sample: sample.ended), 2),
            "in_flight": state.in_flight,
            "in_batch": state.in_batch,
            "hit_share": round(total(metrics.cached_tokens) / prompt, 4) if prompt else None,
            "done": _done(ended),
            "failed": ended["failed"],
            "moved_in": int(total(metrics.agents_moved_in)),
            **metrics.costs.figures(),
            "shared_store": {"away_s": round(shared_store.away_s, 1)} if shared_store else None,
            "suspended": state.is_suspended,
            "data_loss": asdict(state.data_loss) if state.data_loss.ago_s < _DATA_LOSS_SHOWN_S else None,
        }

    def tokens_per_s(self) -> float:
        """Over the last `_TOKENS_WINDOW_S` before the last heartbeat; while Redis is away, since that. Any thread."""
        last, rate = self._shown
        seconds = self._clock() - last.at
        return rate if seconds <= _TOKENS_WINDOW_S else (total(self._metrics.step_tokens) - last.tokens) / seconds

    def _add(self, sample: _Sample, *, is_idle: bool) -> None:
        """Add a sample, but forget the others if there was no work: idle time must not lower the next rates."""
        if is_idle and self._samples and self._samples[-1].ended == sample.ended:
            self._samples.clear()
        self._samples.append(sample)
        while sample.at - self._samples[0].at > _JOBS_WINDOW_S:
            self._samples.popleft()

    def _rate(self, window_s: float, of_sample: Callable[[_Sample], float]) -> float:
        """Per second, over the last `window_s` at most."""
        last = self._samples[-1]
        first = next(sample for sample in self._samples if last.at - sample.at <= window_s)
        seconds = last.at - first.at
        return (of_sample(last) - of_sample(first)) / seconds if seconds > 0 else 0.0

    def _write_line(self, at: float, in_flight: int) -> None:
        metrics, ended = self._metrics, self._metrics.ended_jobs()
        counts = {
            "generated": total(metrics.step_tokens),
            "prompt": total(metrics.prompt_tokens),
            "cached": total(metrics.cached_tokens),
            "finished": _done(ended),
            "failed": ended["failed"],
        }
        new = {name: n - self._at_line.get(name, 0) for name, n in counts.items()}
        seconds = at - self._line_at
        self._line_at, self._at_line = at, counts
        if not (in_flight or any(new.values())):
            return
        fields = {
            "tokens_per_s": round(new["generated"] / seconds, 1),
            "prompt_tokens_per_s": round(new["prompt"] / seconds, 1),
            "cached_share": round(new["cached"] / new["prompt"], 2) if new["prompt"] else None,
            "finished": int(new["finished"]),
            "failed": int(new["failed"]),
            "in_flight": in_flight,
        }
        text = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
        _log.info("rates %s", text, extra={FIELDS: {"event": "rates", **fields}})


def _done(ended: dict[str, int]) -> int:
    return ended["finished"] + ended["replayed"] + ended["agent_job"]
