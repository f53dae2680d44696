"""The task functions that jobs name. They exist so that a stock RQ worker fails with a clear message."""

from typing import Any, NoReturn

from stoker_shared.errors import WrongWorker


def generate(request: dict[str, Any]) -> NoReturn:
    """Raises `WrongWorker` always. ``stoker-worker`` never calls it, but dispatches on its path."""
    raise WrongWorker("generation jobs need `stoker-worker run`; a stock `rq worker` has no model to run them on")


def agent(request: dict[str, Any]) -> NoReturn:
    """Raises `WrongWorker` always, as `generate`."""
    raise WrongWorker("jobs about an agent's memory need `stoker-worker run`; a stock `rq worker` has no such memory")
