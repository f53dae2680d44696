"""The checksums of rows and files. Pure."""

import hashlib
from collections.abc import Iterable

from xxhash import xxh3_128_digest


class Damaged(ValueError):
    """Something is not as it was written, or not where it belongs; the message gives the reason. Stays in this
    package."""


def checksum(body: bytes) -> bytes:
    """xxh3_128: 16 bytes, the most significant first."""
    return xxh3_128_digest(body)


def row_checksum(columns: Iterable[str | bytes | int | float | None]) -> bytes:
    """Of the columns in order: of each its type, its length and its bytes, so that no two rows give the same input."""
    parts: list[bytes] = []
    for value in columns:
        data = value if isinstance(value, bytes) else b"" if value is None else str(value).encode()
        parts += f"{type(value).__name__[0]}{len(data)}:".encode(), data
    return xxh3_128_digest(b"".join(parts))


def key_of(agent_id: str) -> bytes:
    """The second name of an agent."""
    return hashlib.sha256(agent_id.encode()).digest()


def agent_checksum(number: int, agent_id: str, version: int, head: bytes, unsaved: int) -> bytes:
    """Of an agent's row."""
    if not (type(agent_id) is str and type(version) is type(unsaved) is int and type(head) is bytes):
        return row_checksum((number, agent_id, version, head, unsaved))  # a damaged row
    # The same, twice as fast: a list of agents checks every row.
    at, to, is_unsaved = str(number), str(version), str(unsaved)
    before = f"i{len(at)}:{at}s{len(agent_id.encode())}:{agent_id}i{len(to)}:{to}b{len(head)}:"
    return xxh3_128_digest(before.encode() + head + f"i{len(is_unsaved)}:{is_unsaved}".encode())
