"""Runs jobs' callbacks from the modules the operator allowed. Owns the `callbacks` thread and the calls that wait.

A callback runs after its job's end was written, so that it cannot delay or change a result. RQ limits its time with a
signal, which works on the main thread only. Here each callback has a thread of its own, and is left behind when it
exceeds its limit, because Python cannot end a thread.
"""

import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from queue import SimpleQueue
from typing import Any, Final

from redis import Redis
from rq.defaults import CALLBACK_TIMEOUT

from stoker_shared.errors import QueueError
from stoker_worker.queue.json_job import JsonJob

log = logging.getLogger(__name__)

_MAX_WAITING: Final = 1000  # each holds its job's request


class CallbacksNotLoadable(QueueError):
    """A module of `--allow-callbacks` cannot be imported; the message has its name and the reason."""


@dataclass(frozen=True)
class _Call:
    path: str
    job_id: str
    limit_s: float
    run: Callable[[], Any]


class Callbacks:
    """The functions that jobs may name, and the thread that calls them, one after the other.

    ``path in callbacks`` is true if a job may name that function.
    """

    def __init__(self, connection: Redis, modules: Iterable[str]) -> None:
        """
        Args:
            modules: every public function defined in one of them may be called, but none that they import.

        Raises:
            CallbacksNotLoadable: a module cannot be imported.
        """
        self._connection = connection
        self._functions = {path: function for module in modules for path, function in _functions_of(module)}
        self._waiting: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="callbacks", daemon=True)
        if self._functions:
            self._thread.start()

    def __contains__(self, path: object) -> bool:
        return path in self._functions

    def succeeded(self, job: JsonJob, result: Any) -> None:
        self._put(job, job._success_callback_name, job.success_callback_timeout, (result,))

    def failed(self, job: JsonJob, error: Exception) -> None:
        outcome = (type(error), error, error.__traceback__)
        self._put(job, job._failure_callback_name, job.failure_callback_timeout, outcome)

    def stopped(self, job: JsonJob) -> None:
        self._put(job, job._stopped_callback_name, job.stopped_callback_timeout, ())

    def finish(self, within_s: float) -> None:
        """Run the calls that wait, for at most `within_s` seconds, then stop the thread."""
        if not self._thread.is_alive():
            return
        self._waiting.put(None)
        self._thread.join(within_s)
        if self._thread.is_alive():
            log.warning("left with %d callbacks not run", max(0, self._waiting.qsize() - 1))

    def _put(self, job: JsonJob, path: str | None, limit_s: float, outcome: tuple[Any, ...]) -> None:
        function = self._functions.get(path or "")
        if path is None or function is None:
            return
        if self._waiting.qsize() >= _MAX_WAITING:
            log.error("callback %s of job %s is not run: %d callbacks are waiting", path, job.id, _MAX_WAITING)
            return
        limit_s = limit_s if limit_s > 0 else CALLBACK_TIMEOUT
        self._waiting.put(_Call(path, job.id, limit_s, lambda: function(job, self._connection, *outcome)))

    def _serve(self) -> None:
        while (call := self._waiting.get()) is not None:
            thread = threading.Thread(target=_run, args=(call,), name="callback", daemon=True)
            thread.start()
            thread.join(call.limit_s)
            if thread.is_alive():
                log.error("callback %s of job %s is left behind after %g s", call.path, call.job_id, call.limit_s)


def _run(call: _Call) -> None:
    start = time.monotonic()
    try:
        call.run()
    except BaseException:  # anything can be raised by the job's own code
        log.exception("callback %s of job %s raised", call.path, call.job_id)
    else:
        log.debug("callback %s of job %s took %.3f s", call.path, call.job_id, time.monotonic() - start)


def _functions_of(module: str) -> Iterable[tuple[str, Callable[..., Any]]]:
    try:
        found = import_module(module)
    except Exception as error:
        raise CallbacksNotLoadable(f"{module}: {type(error).__name__}: {error}") from error
    for name, value in vars(found).items():
        # A module that imports `subprocess.run` does not allow it.
        is_own = inspect.isfunction(value) and value.__module__ == module and not name.startswith("_")
        if is_own and not inspect.iscoroutinefunction(value):
            yield f"{module}.{name}", value
