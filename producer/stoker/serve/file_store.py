"""The files of the batch store: uploads, and the answers of batches. Blocking; no Redis, no HTTP.

``files/ID/`` has ``content`` and ``file.json``. A file appears whole or not at all, and never changes.
"""

import hashlib
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final
from uuid import uuid4

from stoker.serve.owned_folders import OwnedFolders

_ID: Final = re.compile("file-[0-9a-f]{32}")
_CONTENT: Final = "content"


@dataclass(frozen=True)
class StoredFile:
    """
    Attributes:
        owner: the name of the token that made it; others do not see it.
        created_at: Unix seconds.
    """

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int

    def as_object(self) -> dict[str, Any]:
        """In OpenAI's form."""
        about = {name: value for name, value in asdict(self).items() if name != "owner"}
        return {**about, "object": "file", "status": "processed"}


class FileStore(OwnedFolders[StoredFile]):
    """Any thread, any number of processes."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            OSError: the folder cannot be made.
        """
        super().__init__(folder / "files", "file", StoredFile, _ID)

    def add(
        self, owner: str, filename: str, purpose: str, write: Callable[[BinaryIO], None], *, key: str | None = None
    ) -> StoredFile:
        """Make a file; `write` gives it its content.

        Args:
            key: makes the id; a file that was made with the same key is returned as it is.

        Raises:
            OSError: it could not be written; there is no such file then.
        """
        file_id = f"file-{hashlib.sha256(key.encode()).hexdigest()[:32] if key else uuid4().hex}"
        if key and (found := self.read(file_id)):
            return found
        with self.new(file_id) as draft:
            with (draft / _CONTENT).open("xb") as content:
                write(content)
            n_bytes = (draft / _CONTENT).stat().st_size
            stored = StoredFile(file_id, owner, filename, purpose, n_bytes, int(time.time()))
            self.write_page(draft, stored)
        return stored

    def content(self, file: StoredFile) -> Path:
        return self.folder / file.id / _CONTENT

    def remove(self, file: StoredFile) -> None:
        shutil.rmtree(self.folder / file.id)
