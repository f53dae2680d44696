"""The names of the `STOKER_*` variables, so that a misspelt one is refused, not ignored. Reads no values.

`stoker` and `stoker-worker` run in the same shell, so each accepts the names of both. Only the commands check: a
library must not depend on the environment of its process.
"""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final

ENV_PREFIX: Final = "STOKER_"
REDIS_URL_VARIABLE: Final = "STOKER_REDIS_URL"
"""Read by both commands; the others only by `stoker-worker`."""

VARIABLES: Final = frozenset(
    {
        "STOKER_ADAPTER",
        "STOKER_AGENT_TTL",
        "STOKER_ALLOW_CALLBACKS",
        "STOKER_BURST",
        "STOKER_CHAT_TEMPLATE",
        "STOKER_CONFIG",
        "STOKER_DEFAULTS",
        "STOKER_DRAFT_NGRAM",
        "STOKER_DTYPE",
        "STOKER_ENGINE",
        "STOKER_GRACE_S",
        "STOKER_HEARTBEAT_S",
        "STOKER_IGNORE_SHUTDOWN_COMMAND",
        "STOKER_KEEP_VERSIONS",
        "STOKER_KV_BITS",
        "STOKER_KV_MAX_BYTES",
        "STOKER_LEASE_TTL_S",
        "STOKER_LOG_FORMAT",
        "STOKER_MAX_BATCH",
        "STOKER_MAX_IDLE_S",
        "STOKER_MAX_JOBS",
        "STOKER_MAX_STEP_S",
        "STOKER_MEMORY_MAX_BYTES",
        "STOKER_METRICS_PORT",
        "STOKER_MODEL",
        "STOKER_NAME",
        "STOKER_NEW_STORE",
        "STOKER_PATIENCE_S",
        "STOKER_POLL_S",
        "STOKER_PREFILL_STEP_TOKENS",
        "STOKER_QUEUES",
        "STOKER_QUIET",
        "STOKER_RECOVER_S",
        "STOKER_REDIS_PORT",
        "STOKER_REDIS_URL",
        "STOKER_SCRIPTED_STEPS_PER_S",
        "STOKER_SHARED_STORE",
        "STOKER_SHARED_STORE_MAX_BPS",
        "STOKER_SHARE_PREFIXES",
        "STOKER_SKIP_PROOF",
        "STOKER_STANDBY",
        "STOKER_STORE",
        "STOKER_STORE_DTYPE",
        "STOKER_STORE_MAX_BYTES",
        "STOKER_STUCK_AFTER_S",
        "STOKER_TRUST_REMOTE_CODE",
        "STOKER_VERBOSE",
        "STOKER_WIRED_MEMORY",
    }
)
"""Each has the name of a field of the worker's settings."""


def require_known_variables(environment: Mapping[str, str] = os.environ) -> None:
    """
    Raises:
        ValueError: a name begins with ``STOKER_`` and is not in `VARIABLES`; the message has it and the nearest name.
    """
    unknown = sorted(name for name in environment if name.startswith(ENV_PREFIX) and name not in VARIABLES)
    if unknown:
        raise ValueError(f"unknown setting in the environment: {', '.join(map(_with_the_nearest, unknown))}")


def _with_the_nearest(name: str) -> str:
    nearest = get_close_matches(name, VARIABLES, n=1, cutoff=0.8)
    return f"{name} (did you mean {nearest[0]}?)" if nearest else name
