"""A service of this worker: what it runs, where, and how long it may take to stop. Pure."""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stoker_shared.environment import ENV_PREFIX

RESTART_S: Final = 30
"""Between two starts of a worker that crashes: a wrong setting must not load the model all the time."""

_SAVING_S: Final = 30
"""After the grace: the jobs that were cut short are given back, and the embedded server writes its file."""

# A service starts with almost no variables. PATH finds redis-server, HF_* the models that are downloaded already.
_KEPT: Final = ("PATH", "PYTHONPATH")
_KEPT_PREFIXES: Final = (ENV_PREFIX, "HF_")


@dataclass(frozen=True)
class ServiceUnit:
    """
    Attributes:
        name: of the service and of its file.
        command: program and arguments.
        folder: where it runs: relative paths among the options mean what they meant to `install`.
        environment: all variables that it needs besides those that every process of the user has.
        stop_timeout_s: the service manager kills a worker that takes longer to stop.
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]
    stop_timeout_s: int


def worker_unit(
    name: str, options: Sequence[str], *, grace_s: float, environment: Mapping[str, str] = os.environ
) -> ServiceUnit:
    """The unit of `stoker-worker run` with these options, from this Python, folder and environment."""
    kept = {
        variable: value
        for variable, value in sorted(environment.items())
        if variable in _KEPT or variable.startswith(_KEPT_PREFIXES)
    }
    # -P: a folder named like one of the worker's packages must not be imported instead.
    command = (sys.executable, "-P", "-m", "stoker_worker", "run", *options)
    return ServiceUnit(name, command, Path.cwd(), kept, math.ceil(grace_s) + _SAVING_S)
