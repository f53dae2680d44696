"""What a job needs of the worker that runs it: the model that it names, and the version of its request. Pure.

Owns the form of `FIELD_NEEDS`, with which a worker leaves a job to others before it has read the request.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from stoker_shared.wire import AGENT_REQUEST_VERSION, AGENT_TASK_PATH, REQUEST_VERSION, TASK_PATH

READS: Final = {"generate": REQUEST_VERSION, "agent": AGENT_REQUEST_VERSION}
"""The newest `v` that this code reads, by task."""

_TASKS: Final = {TASK_PATH: "generate", AGENT_TASK_PATH: "agent"}
_READ_BY_ALL: Final = {"generate": 3, "agent": 1}  # by every worker that knows `FIELD_NEEDS`; never grows
_NO_TASK: Final = "-"
_MOST: Final = 10**9  # a larger version is no version


class Needs(NamedTuple):
    """
    Attributes:
        model: the model that the job names, or that its route has next; ``None``: any.
        task, version: the kind of request, such as ``generate``, and its `v`; empty and 0 if every worker reads it.
    """

    model: str | None = None
    task: str = ""
    version: int = 0

    @classmethod
    def of(cls, task_path: str, request: Mapping[str, Any], n_tried: int = 0) -> "Needs":
        """Of a request as it goes on the wire. A request that is not valid is refused at its turn: it needs nothing.

        Args:
            n_tried: how many models of its route have been asked.
        """
        task, version = _TASKS.get(task_path), request.get("v")
        if task is None:
            return NOTHING
        named = _model_of(request, n_tried)
        if type(version) is int and _READ_BY_ALL[task] < version < _MOST:
            return cls(named, task, version)
        return cls(named)

    @classmethod
    def noted(cls, note: str) -> "Needs":
        """From `note`; `NOTHING` if it is of another form."""
        task, _, rest = note.partition(" ")
        version, _, model = rest.partition(" ")
        if task == _NO_TASK:
            return cls(model or None)
        is_number = version.isascii() and version.isdigit() and len(version) < len(str(_MOST))
        return cls(model or None, task, int(version)) if task and is_number else NOTHING

    @property
    def note(self) -> str:
        """The end of `FIELD_NEEDS`."""
        return f"{self.task or _NO_TASK} {self.version} {self.model or ''}"


def _model_of(request: Mapping[str, Any], n_tried: int) -> str | None:
    route, names = request.get("route"), request
    if isinstance(route, list) and route:
        names = route[min(n_tried, len(route) - 1)]
    model = names.get("model") if isinstance(names, Mapping) else None
    return model if isinstance(model, str) and model else None


NOTHING: Final = Needs()
"""Every worker can serve the job."""
