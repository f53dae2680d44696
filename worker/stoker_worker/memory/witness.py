"""How many transactions a store's database had when it was last written, in a file beside it. Any thread.

A damaged byte in SQLite's write-ahead log ends the log early, and SQLite takes what came after it for unfinished. A
database with fewer transactions than its witness has lost some. The file is not synced: it may be older than the
database, and is never newer.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from stoker_worker.memory.checksum import checksum

NAME: Final = "agents.commits"


class Witness:
    """``STORE/agents.commits``: a number and its checksum."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME

    def write(self, commits: int) -> None:
        """Only after the transaction of that number is durable. Never raises."""
        with suppress(OSError):
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(file, _content(commits), 0)
            finally:
                os.close(file)

    def read(self) -> int | None:
        """``None``: there is no witness, or it is damaged itself."""
        try:
            written = self.path.read_bytes()
            commits = int(written.split()[0])
        except (OSError, ValueError, IndexError):
            return None
        return commits if written == _content(commits) else None


def _content(commits: int) -> bytes:
    number = f"{commits:020d}"
    return f"{number} {checksum(number.encode()).hex()}\n".encode()
