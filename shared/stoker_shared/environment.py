"""The sources of the commands' settings: `STOKER_*` variables, the worker's TOML file, the user's embedded server.

`stoker` and `stoker-worker` run in one shell, so each accepts the variables of both. Only the commands refuse unknown
ones; the library ignores them. This module knows no setting's meaning.
"""

import fcntl
import os
import tomllib
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from stoker_shared.durable_file import replace_file

ENV_PREFIX: Final = "STOKER_"
REDIS_URL_VARIABLE: Final = "STOKER_REDIS_URL"
"""Both commands and producers read it; the other variables are for `stoker-worker` alone."""

_NAMES: Final = """
    ADAPTER AGENT_TTL BURST CHAT_TEMPLATE CONFIG DEFAULTS DRAFT_NGRAM DTYPE ENGINE GRACE_S HEARTBEAT_S
    IGNORE_SHUTDOWN_COMMAND KEEP_VERSIONS KV_BITS KV_MAX_BYTES LEASE_TTL_S LOG_FORMAT MAX_BATCH MAX_IDLE_S MAX_JOBS
    MAX_STEP_S MEMORY_MAX_BYTES METRICS_PORT MODEL NAME NEW_STORE PATIENCE_S POLL_S PREFILL_STEP_TOKENS QUEUES QUIET
    RECOVER_S REDIS_URL SCRIPTED_STEPS_PER_S SESSION_TTL SHARED_STORE SHARED_STORE_MAX_BPS SHARE_PREFIXES
    SKIP_PROOF STANDBY STORE STORE_DTYPE STORE_MAX_BYTES STUCK_AFTER_S TRUST_REMOTE_CODE VERBOSE WIRED_MEMORY
"""
VARIABLES: Final = frozenset(f"{ENV_PREFIX}{name}" for name in _NAMES.split())
"""Each is named after a field of the worker's settings."""


def require_known_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Raises `ValueError`: a name begins with ``STOKER_`` and is not in `VARIABLES`. The message has it and the closest
    name."""
    unknown = sorted(name for name in environment if name.startswith(ENV_PREFIX) and name not in VARIABLES)
    if unknown:
        named = ", ".join(_with_the_nearest(name, VARIABLES, 0.8) for name in unknown)
        raise ValueError(f"unknown setting in the environment: {named}")


def _with_the_nearest(name: str, known: Collection[str], cutoff: float) -> str:
    nearest = get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"{name} (did you mean {nearest[0]}?)" if nearest else name


USUAL_PLACE: Final = "~/.config/stoker/worker.toml"
"""Read if it exists and no other file is named."""


def settings_file(named: object) -> Path | None:
    """The file to read. `named`: ``None`` for the usual place, an empty text for no file."""
    if named is None:
        usual = Path(USUAL_PLACE).expanduser()
        return usual if usual.exists() else None
    return None if str(named) in ("", ".") else Path(str(named)).expanduser()  # click makes a path of an empty text


def read_settings_file(path: Path, known: Collection[str]) -> dict[str, Any]:
    """The settings in the file by name, with values as an option or a variable would have them. `known` are the allowed
    names; ``-`` in the file counts as ``_``. Raises `ValueError`: it cannot be read, is not TOML, or has an unknown
    name."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # TOML's errors, and text that is not UTF-8
        raise ValueError(f"{path} is not TOML: {error}") from None
    values = {name.replace("-", "_"): _as_given(value) for name, value in content.items()}
    if unknown := sorted(values.keys() - set(known)):
        named = ", ".join(_with_the_nearest(name, known, 0.7) for name in unknown)
        raise ValueError(f"{path} has unknown settings: {named}")
    return values


def _as_given(value: object) -> object:
    """Options have no lists and no tables, but ``a,b`` and ``key=value,...``."""
    match value:
        case list():
            return ",".join(map(str, value))
        case Mapping():
            return ",".join(f"{key}={part}" for key, part in value.items())
    return value


DEFAULT_REDIS_URL: Final = "redis://127.0.0.1:6379"
SHOWN: Final = "~/.stoker/redis.url"
"""The file that names the user's embedded server, mode 0600, in the form that people read. Line 1 is the URL with its
password, line 2 the lock file that the server's process holds while it lives: by now, another program may use the
port."""


def publish(url: str, lock: Path) -> None:
    """Make this server the default of the user's commands, in place of any earlier one. Raises `OSError`."""
    file = Path(SHOWN).expanduser()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(file, f"{url}\n{lock}\n".encode())


def default_redis_url() -> str:
    """The server to use if none is named: this user's embedded one if it runs, else `DEFAULT_REDIS_URL`."""
    try:
        url, lock, *_ = Path(SHOWN).expanduser().read_text(encoding="utf-8").splitlines()
        return url if _is_held(Path(lock)) else DEFAULT_REDIS_URL
    except (OSError, ValueError, RuntimeError):  # no such file, another content, no home folder
        return DEFAULT_REDIS_URL


def _is_held(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
