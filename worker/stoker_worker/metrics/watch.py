"""The metrics of one worker, put together: its counts, its rates and, if there is a port, the HTTP server.

Each part of the worker is named in `looking` as soon as it is made: the server starts first, so that a worker that
stands by or loads its model has a health check too.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from stoker_worker.metrics.counting import Metrics
from stoker_worker.metrics.live import LiveFigures
from stoker_worker.metrics.looking import Looking
from stoker_worker.metrics.rates_line import RatesLine


class Watch:
    """
    Attributes:
        metrics: for the stages.
        looking: what is shown of the parts of the worker.
        live: the rates; `figures` is for the heartbeat.
    """

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.looking = Looking()
        self.live = LiveFigures(self.metrics, self.looking)
        self._rates = RatesLine(self.metrics, self.looking)

    def figures(self) -> dict[str, Any]:
        """What the heartbeat publishes; it also is the clock of the log's line of rates."""
        self._rates.look()
        return self.live.now()

    @contextmanager
    def served(self, port: int, *, stuck_after_s: float) -> Iterator[None]:
        """As long as the context lasts. Without it prometheus_client is not loaded.

        Raises:
            OSError: it cannot listen on the port.
        """
        from stoker_worker.metrics.http_server import MetricsServer, Pages

        pages = Pages(self.metrics, self.live, self.looking, stuck_after_s=stuck_after_s)
        with closing(MetricsServer(port, pages.answer)):
            yield
