"""A test's control over a worker from inside its process, without product code: kill it at a place, shift its clock,
record what its engine generates, make it one of a later release. The fork server or `fresh_worker` installs the hooks
before the worker's `main`.
"""

import datetime
import functools
import importlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import rq.utils

from stoker_shared import request

_LOOK_S = 0.1
SCRIPTED_ENGINE = "stoker_worker.engine.scripted:ScriptedEngine"
MLX_ENGINE = "stoker_worker.engine.batch_engine:BlockPoolBatchEngine"


def install(hooks: Mapping[str, Any]) -> None:
    if "die" in hooks:
        die_at(**hooks["die"])
    if "seen" in hooks:
        write_down_generations(Path(hooks["seen"]), hooks.get("engine", SCRIPTED_ENGINE))
    if "clock" in hooks:
        shift_clock(Path(hooks["clock"]))
    if "reads" in hooks:
        read_requests_up_to(hooks["reads"])


def die_at(target: str, when: str, needles: list[str], nth: int = 1) -> None:
    """`kill -9` of this process around one call.

    Args:
        target: ``module:Class.method``.
        when: ``before`` or ``after`` the call.
        needles: the call is the one whose arguments (and, after it, result) have all of these in their repr.
        nth: which of those calls.
    """
    calls = 0

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def dying(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            result = method(*args, **kwargs) if when == "after" else None
            said = repr((args, kwargs, result))
            if all(needle in said for needle in needles):
                calls += 1
                if calls == nth:
                    os.kill(os.getpid(), signal.SIGKILL)
            return result if when == "after" else method(*args, **kwargs)

        return dying

    _replace(target, wrap)


def write_down_generations(path: Path, engine: str) -> None:
    """Write a line for each request that the engine gets: the request's `metadata`.

    A job of ``metadata={"flaky": "2"}`` fails the first two times.
    """

    def wrap(submit: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(submit)
        def noting(self: Any, work: Any) -> Any:
            note = dict(work.request.metadata)
            before = generations(path, note) if "flaky" in note else 0
            with path.open("a") as file:
                file.write(json.dumps(note) + "\n")
            if before < int(note.get("flaky", 0)):
                raise ValueError("flaky")
            return submit(self, work)

        return noting

    _replace(f"{engine}.submit", wrap)


def generations(path: Path, note: Mapping[str, str]) -> int:
    """How many times the engine got a request with this metadata."""
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(json.loads(line) == dict(note) for line in lines)


def shift_clock(path: Path) -> None:
    """Shift `time.time`, and RQ's own clock, by the seconds in the file; they jump when the file changes."""
    real_time = time.time
    offset_s = 0.0

    def look() -> None:
        nonlocal offset_s
        while True:
            offset_s = float(path.read_text() or 0)
            time.sleep(_LOOK_S)

    class Jumping(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime.datetime:  # type: ignore[override]
            return datetime.datetime.now(tz) + datetime.timedelta(seconds=offset_s)

    time.time = lambda: real_time() + offset_s
    names = {**vars(datetime), "datetime": Jumping}
    rq.utils.datetime = SimpleNamespace(**names)  # type: ignore[assignment, attr-defined]
    threading.Thread(target=look, daemon=True).start()


def read_requests_up_to(version: int) -> None:
    """As a release does that knows requests of this version."""
    vars(request)["REQUEST_VERSION"] = version


def _replace(target: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    module_name, _, path = target.partition(":")
    class_name, _, method_name = path.rpartition(".")
    owner: Any = importlib.import_module(module_name)
    owner = getattr(owner, class_name) if class_name else owner
    setattr(owner, method_name, wrap(getattr(owner, method_name)))
