"""The folders of the batch store, one for each file or batch: whose it is, and what its page has. Blocking; no Redis.

A caller sees only those of its own token's name. A folder appears whole or not at all; its page never changes.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from stoker.openai.answers import Failure
from stoker_shared.durable_file import draft_of, replace_file


class Owned(Protocol):
    """A dataclass of JSON values. `owner` is the name of the token that made it, `created_at` in Unix seconds."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def id(self) -> str: ...
    @property
    def owner(self) -> str: ...
    @property
    def created_at(self) -> int: ...


OwnedT = TypeVar("OwnedT", bound=Owned)


class OwnedFolders(Generic[OwnedT]):
    """Any thread, any number of processes."""

    def __init__(self, folder: Path, kind: Literal["file", "batch"], of_page: type[OwnedT], id_form: re.Pattern[str]):
        """
        Args:
            of_page: made of the page's fields.
            id_form: nothing else is a folder's name, so no id leads out of `folder`.

        Raises:
            OSError: the folder cannot be made.
        """
        self.folder = folder
        self._kind: Literal["file", "batch"] = kind
        self._of_page = of_page
        self._id_form = id_form
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextmanager
    def new(self, item_id: str) -> Iterator[Path]:
        """A folder in which to put everything, `write_page` included. It appears when the block ends well.

        Raises:
            OSError: it could not be written; there is no such folder then.
        """
        with draft_of(self.folder / item_id) as draft:
            draft.mkdir(mode=0o700)
            yield draft

    def write_page(self, draft: Path, item: OwnedT) -> None:
        """Raises `OSError`."""
        replace_file(draft / self._page, json.dumps(asdict(item)).encode())

    def read(self, item_id: str) -> OwnedT | None:
        """Whoever it belongs to."""
        try:
            return self._of_page(**json.loads((self.folder / item_id / self._page).read_bytes()))
        except FileNotFoundError:
            return None

    def get(self, owner: str, item_id: str) -> OwnedT:
        """
        Raises:
            Failure: there is none, or it is another owner's, which looks the same.
        """
        found = self.read(item_id) if self._id_form.fullmatch(item_id) else None
        if found is None or found.owner != owner:
            kind = self._kind
            raise Failure(404, f"no {kind} {item_id[:64]!r}", code=f"{kind}_not_found", param=f"{kind}_id")
        return found

    def ids(self) -> list[str]:
        return [path.name for path in self.folder.iterdir() if self._id_form.fullmatch(path.name)]

    def all_of(self, owner: str) -> list[OwnedT]:
        """The newest first."""
        found = (self.read(item_id) for item_id in self.ids())
        mine = [item for item in found if item is not None and item.owner == owner]
        return sorted(mine, key=lambda item: (item.created_at, item.id), reverse=True)

    @property
    def _page(self) -> str:
        return f"{self._kind}.json"
