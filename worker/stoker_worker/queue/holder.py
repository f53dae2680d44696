"""The holder of a lease as its key describes it. Pure, no I/O."""

import json
from typing import Any

from stoker_worker.process_identity import ProcessIdentity


def described(value: str) -> dict[str, Any]:
    """The holder's description in a lease key, with placeholders for what is missing or of another type."""
    unknown: dict[str, Any] = {
        "queues": [],
        "worker": "unknown",
        "store": "",
        "recovers": "",
        "host": "unknown",
        "boot": "",
        "pid": 0,
    }
    unknown |= {"started": "", "leaving": False, "pids": "", "model": "", "reads": {}, "shared": ""}
    unknown["loading"] = False
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = None
    fields = found if isinstance(found, dict) else {}
    known = {name: fields.get(name) for name in unknown if isinstance(fields.get(name), type(unknown[name]))}
    return {**unknown, **known, "queues": [name for name in known.get("queues") or [] if isinstance(name, str)]}


def identity_in(holder: dict[str, Any]) -> ProcessIdentity:
    """The process that `described` names."""
    return ProcessIdentity(host=holder["host"], boot=holder["boot"], pid=holder["pid"], started=holder["started"])
