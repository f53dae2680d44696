"""Seconds of the parts of a run, taken by wrapping what belongs to each. Experiments only; no MLX."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stopwatch:
    """One thread. A part within a part counts for itself alone; time outside all parts counts for none.

    Attributes:
        seconds: by part.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._stack: list[str] = []
        self._since = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._tick()
        self._stack.append(name)
        try:
            yield
        finally:
            self._tick()
            self._stack.pop()

    def timing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, as this part."""

        def timed(*args: Any, **options: Any) -> Any:
            with self.part(name):
                return call(*args, **options)

        return timed

    def _tick(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now
