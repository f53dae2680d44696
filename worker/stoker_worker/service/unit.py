"""A service of this worker: what it runs, where, and how long it may take to stop. Pure."""

import math
import os
import pwd
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stoker_shared.environment import ENV_PREFIX
from stoker_shared.text import mask_url

RESTART_S: Final = 30
"""Between two starts of a worker that crashes: a wrong setting must not load the model all the time."""

_SAVING_S: Final = 30
"""After the grace: the jobs that were cut short are given back, and the embedded server writes its file."""

# A service starts with almost no variables. PATH finds redis-server, HF_* the models that are downloaded already.
_KEPT: Final = ("PATH", "PYTHONPATH")
_KEPT_PREFIXES: Final = (ENV_PREFIX, "HF_")
_REDIS_URL: Final = f"{ENV_PREFIX}REDIS_URL"


@dataclass(frozen=True)
class ServiceUnit:
    """
    Attributes:
        name: of the service and of its file.
        command: program and arguments.
        folder: where it runs: relative paths among the options mean what they meant to `install`.
        environment: all variables that it needs besides those that every process of the user has.
        stop_timeout_s: the service manager kills a worker that takes longer to stop.
        account: whom a system-wide service runs as; ``None``: it is the user's own service.
        redis_url: to be written into the file that `command` names; empty: there is no password to hide.
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]
    stop_timeout_s: int
    account: pwd.struct_passwd | None = None
    redis_url: str = ""


def worker_unit(
    name: str,
    options: Sequence[str],
    redis_url_file: Path,
    *,
    grace_s: float,
    environment: Mapping[str, str] = os.environ,
    account: pwd.struct_passwd | None = None,
) -> ServiceUnit:
    """The unit of `stoker-worker run` with these options, from this Python, folder and environment.

    Args:
        redis_url_file: for a Redis URL with a password, which everybody could read in the arguments of a process.
    """
    kept = {
        variable: value
        for variable, value in sorted(environment.items())
        if variable in _KEPT or variable.startswith(_KEPT_PREFIXES)
    }
    others, urls = _split_redis(options)
    redis_url = urls[-1] if urls else kept.get(_REDIS_URL, "")
    if urls or _has_password(redis_url):
        kept.pop(_REDIS_URL, None)
    if not _has_password(redis_url):
        redis_url, others = "", list(options)
    else:
        others += ["--redis", redis_url_file.as_uri()]
    if account is not None:  # the system's manager shows a service's variables to every user
        kept.pop("HF_TOKEN", None)
        kept["HOME"] = account.pw_dir
    # -P: a folder named like one of the worker's packages must not be imported instead.
    command = (sys.executable, "-P", "-m", "stoker_worker", "run", *others)
    return ServiceUnit(name, command, Path.cwd(), kept, math.ceil(grace_s) + _SAVING_S, account, redis_url)


def _split_redis(options: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options without ``--redis``, and its values."""
    others, urls, words = list[str](), list[str](), iter(options)
    for word in words:
        if word == "--redis":
            urls.append(next(words))
        elif word.startswith("--redis="):
            urls.append(word.removeprefix("--redis="))
        else:
            others.append(word)
    return others, urls


def _has_password(url: str) -> bool:
    return "://" in url and mask_url(url) != url
