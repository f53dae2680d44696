"""A process that has imported the worker and forks one for each order on its stdin, so that a start is fast.

It has no threads, so a fork of it is like a new process: numpy's OpenBLAS gets none, and MLX is not imported. Orders
and answers are JSON lines: ``{"run": …}`` answers the pid; ``{"poll": pid}`` answers the exit status as `subprocess`
gives it, or null.
"""

import json
import os
import sys
from importlib import import_module
from typing import Any, NoReturn

os.environ["OPENBLAS_NUM_THREADS"] = "1"

from tests.chaos.hooks import install

from stoker.cli import main as producer_main
from stoker_worker.cli.main import main as worker_main

USED_BY_RUN = ("cli.log_lines", "engine.provider", "engine.scripted", "memory.store", "metrics.watch",
               "pipeline.worker", "queue.rq_queue", "settings")  # fmt: skip
"""`run` imports these when it needs them, which takes half a second."""


def serve() -> None:
    for name in USED_BY_RUN:
        import_module(f"stoker_worker.{name}")
    for line in sys.stdin:
        order = json.loads(line)
        if "run" in order:
            pid = os.fork()
            if pid == 0:
                _become(order["run"])
            answer: int | None = pid
        else:
            pid, status = os.waitpid(order["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(answer), flush=True)


def _become(order: dict[str, Any]) -> NoReturn:
    """Ends as a new process does: threads and exit handlers have their turn."""
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number, descriptor in enumerate((nowhere, nowhere, log)):
        os.dup2(descriptor, number)
    os.environ.clear()
    os.environ.update(order["env"])
    install(order["hooks"])
    main = producer_main if order["program"] == "stoker" else worker_main
    main(order["arguments"])
    sys.exit()


if __name__ == "__main__":
    serve()
