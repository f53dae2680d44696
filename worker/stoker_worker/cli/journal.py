"""The priority of a log line in systemd's journal, which reads it from a prefix such as ``<3>``. No state."""

import logging
import os
import sys
from typing import Final

_PRIORITIES: Final = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6, logging.DEBUG: 7}


def is_journal() -> bool:
    """Whether stderr is the stream to the journal that systemd gave this process."""
    try:
        opened = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # closed, or no file
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{opened.st_dev}:{opened.st_ino}"


def prefixed(text: str, level: int) -> str:
    """The text with the priority before each of its lines: the journal makes an entry of each."""
    priority = next((_PRIORITIES[known] for known in sorted(_PRIORITIES, reverse=True) if level >= known), 7)
    return "\n".join(f"<{priority}>{line}" for line in text.split("\n"))
