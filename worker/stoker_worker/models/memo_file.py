"""A small JSON file that remembers, between starts, what took long to find out. No MLX; engine thread.

It only saves time: one that is missing, damaged or not writable is as good as an empty one.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker_shared.durable_file import replace_file


def read_memo(path: Path | None) -> dict[str, Any]:
    """The remembered entries; empty without a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_memo(path: Path | None, content: Mapping[str, Any]) -> None:
    """Replace the file as a whole; readable by the owner only."""
    if path is None:
        return
    with suppress(OSError):  # the next start finds it out again
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(content, indent=1, sort_keys=True).encode() + b"\n")
