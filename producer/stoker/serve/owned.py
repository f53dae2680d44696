"""Whose the files and batches of the store are: a caller sees only those of its own token's name. Pure."""

from collections.abc import Iterable
from typing import Literal, Protocol, TypeVar

from stoker.openai.failures import Failure


class Owned(Protocol):
    """`owner` is the name of the token that made it, `created_at` in Unix seconds."""

    @property
    def id(self) -> str: ...
    @property
    def owner(self) -> str: ...
    @property
    def created_at(self) -> int: ...


OwnedT = TypeVar("OwnedT", bound=Owned)


def require_owned(found: OwnedT | None, owner: str, kind: Literal["file", "batch"], wanted_id: str) -> OwnedT:
    """
    Raises:
        Failure: there is none, or it is another owner's, which looks the same.
    """
    if found is None or found.owner != owner:
        raise Failure(404, f"no {kind} {wanted_id[:64]!r}", code=f"{kind}_not_found", param=f"{kind}_id")
    return found


def newest_first(found: Iterable[OwnedT | None], owner: str) -> list[OwnedT]:
    """Those of this owner."""
    mine = [item for item in found if item is not None and item.owner == owner]
    return sorted(mine, key=lambda item: (item.created_at, item.id), reverse=True)
