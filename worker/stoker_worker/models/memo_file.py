"""A small JSON file that remembers slow results between starts. It only saves time: a missing, damaged or unwritable
one counts as empty. No MLX; engine thread."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker_shared.durable_file import replace_file


def read_memo(path: Path | None) -> dict[str, Any]:
    """The remembered entries; empty if there is no readable file."""
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
