"""The files of the batch store: uploads, and the answers of batches. Blocking; no Redis, no HTTP.

``files/ID/`` has ``content`` and ``file.json``. A file appears whole or not at all, and never changes.
"""

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final
from uuid import uuid4

from stoker.serve.owned import newest_first, require_owned
from stoker_shared.durable_file import draft_of, replace_file

_ID: Final = re.compile("file-[0-9a-f]{32}")
_CONTENT: Final = "content"
_ABOUT: Final = "file.json"


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


class FileStore:
    """Any thread, any number of processes."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            OSError: the folder cannot be made.
        """
        self._folder = folder / "files"
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

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
        if key and (found := self._read(file_id)):
            return found
        with draft_of(self._folder / file_id) as draft:
            draft.mkdir(mode=0o700)
            with (draft / _CONTENT).open("xb") as content:
                write(content)
            n_bytes = (draft / _CONTENT).stat().st_size
            stored = StoredFile(file_id, owner, filename, purpose, n_bytes, int(time.time()))
            replace_file(draft / _ABOUT, json.dumps(asdict(stored)).encode())
        return stored

    def get(self, owner: str, file_id: str) -> StoredFile:
        """
        Raises:
            Failure: this owner has no such file.
        """
        found = self._read(file_id) if _ID.fullmatch(file_id) else None
        return require_owned(found, owner, "file", file_id)

    def all_of(self, owner: str) -> list[StoredFile]:
        """The newest first."""
        names = (path.name for path in self._folder.iterdir() if _ID.fullmatch(path.name))
        return newest_first((self._read(name) for name in names), owner)

    def content(self, file: StoredFile) -> Path:
        return self._folder / file.id / _CONTENT

    def remove(self, file: StoredFile) -> None:
        shutil.rmtree(self._folder / file.id)

    def _read(self, file_id: str) -> StoredFile | None:
        try:
            return StoredFile(**json.loads((self._folder / file_id / _ABOUT).read_bytes()))
        except FileNotFoundError:
            return None
