"""Counters and histograms as plain numbers, and their snapshots. No I/O, no Prometheus.

Everything that one event changes is changed at once, so a snapshot never has a result without its tokens:
prometheus_client's own counters have a lock each.
"""

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from stoker_worker.metrics.declared import Metric

Labels = tuple[str, ...]
"""Values, in the order of `Metric.labels`."""


@dataclass
class Histogram:
    """Observations of one metric.

    Attributes:
        counts: one per bucket, not cumulative, and one more for those above the last bound.
    """

    counts: list[int]
    total: float = 0.0

    @classmethod
    def of(cls, metric: Metric) -> "Histogram":
        return cls([0] * (len(metric.buckets) + 1))

    def observe(self, metric: Metric, value: float) -> None:
        self.counts[bisect_left(metric.buckets, value)] += 1
        self.total += value

    def copy(self) -> "Histogram":
        return Histogram(list(self.counts), self.total)


@dataclass(frozen=True)
class Snapshot:
    counters: dict[tuple[Metric, Labels], float] = field(default_factory=dict)
    histograms: dict[tuple[Metric, Labels], Histogram] = field(default_factory=dict)


class Tally:
    """Counts since the start. Any thread; the lock is held for microseconds."""

    def __init__(self, *from_the_start: Metric) -> None:
        """
        Args:
            from_the_start: they are there with 0 before anything is counted, as far as their labels are known.
        """
        self._lock = threading.Lock()
        self._counters: defaultdict[tuple[Metric, Labels], float] = defaultdict(float)
        self._histograms: dict[tuple[Metric, Labels], Histogram] = {}
        for metric in from_the_start:
            for labels in [(value,) for value in metric.values] if metric.labels else [()]:
                if metric.kind == "histogram":
                    self._histograms[metric, labels] = Histogram.of(metric)
                else:
                    self._counters[metric, labels] = 0.0

    @contextmanager
    def one_event(self) -> Iterator[None]:
        """All `add` and `observe` inside are one change. They are only called inside."""
        with self._lock:
            yield

    def add(self, metric: Metric, *labels: str, n: float = 1) -> None:
        self._counters[metric, labels] += n

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        key = (metric, labels)
        if key not in self._histograms:
            self._histograms[key] = Histogram.of(metric)
        self._histograms[key].observe(metric, value)

    def snapshot(self) -> Snapshot:
        with self._lock:
            return Snapshot(dict(self._counters), {key: found.copy() for key, found in self._histograms.items()})
