"""The task functions that jobs name. They exist so that a stock RQ worker fails with a clear message."""

from typing import Any, NoReturn

from stoker_shared.errors import WrongWorker


def generate(request: dict[str, Any]) -> NoReturn:
    """Takes the place of the generation, which only ``stoker-worker`` can do.

    Raises:
        WrongWorker: always. ``stoker-worker`` never calls this: it dispatches on the path.
    """
    raise WrongWorker("generation jobs need `stoker-worker run`; a stock `rq worker` has no model to run them on")


def agent(request: dict[str, Any]) -> NoReturn:
    """Takes the place of work on an agent's memory, which only ``stoker-worker`` can do.

    Raises:
        WrongWorker: always, as :func:`generate`.
    """
    raise WrongWorker("jobs about an agent's memory need `stoker-worker run`; a stock `rq worker` has no such memory")
