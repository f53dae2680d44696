"""The settings of one `stoker serve`, and the bearer tokens that may call. Imports no web framework.

A line of a token file is a name, white space and a token. Limits and files belong to the name, which several tokens may
share.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from stoker.api.fields import BodyOptions
from stoker_shared.wire import DEFAULT_QUEUE, MAX_REQUEST_BYTES

MIN_TOKEN_CHARACTERS: Final = 16
ANYBODY: Final = "anybody"
"""The name of all callers where no tokens are required."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Tokens:
    """Compares a token with those of all `pairs` (name, token), in a time that does not depend on which of them it
    resembles."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._digests = [(name, _digest(token)) for name, token in pairs]

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Raises `OSError`: the file cannot be read. Raises `ValueError`: a line is not a name and a token, its name is
        `ANYBODY`, or its token is an earlier line's; the message has the line's number, not the token."""
        pairs, known = [], set[str]()
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:  # its message has bytes of the file
            raise ValueError(f"{path} is not UTF-8") from None
        for number, line in enumerate(lines, start=1):
            parts = line.split()
            if not parts or parts[0].startswith("#"):
                continue
            is_pair = len(parts) == 2 and _NAME.fullmatch(parts[0]) is not None and parts[1].isascii()
            if not is_pair or len(parts[1]) < MIN_TOKEN_CHARACTERS:
                raise ValueError(
                    f"{path}, line {number}: expected a name (letters, digits, - _ .) and a token of at least "
                    f"{MIN_TOKEN_CHARACTERS} ASCII characters"
                )
            if parts[0] == ANYBODY:
                raise ValueError(f"{path}, line {number}: {ANYBODY!r} is the name of callers without a token")
            if parts[1] in known:
                raise ValueError(f"{path}, line {number}: an earlier line has the same token")
            known.add(parts[1])
            pairs.append((parts[0], parts[1]))
        if not pairs:
            raise ValueError(f"{path} has no token")
        return cls(pairs)

    def name_of(self, token: str) -> str | None:
        """The name of this token; ``None`` if it is not one of them."""
        given, found = _digest(token), None
        for name, digest in self._digests:
            if hmac.compare_digest(given, digest):
                found = name
        return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


@dataclass(frozen=True)
class ServeSettings:
    """
    Attributes:
        queue, batch_queue: RQ queues of calls, and of the lines of batches.
        body_options: which models a body may name, and the other options of all bodies.
        tokens: who may call; ``None`` for everyone who reaches the port.
        batch_store: folder of files, batches and responses.
        allowed_origins: web sites whose pages may call.
        max_body_bytes, max_file_bytes: largest request body, and largest upload.
        max_waiting: most calls in flight for each name of tokens.
        timeout_s: how long a call may take, in seconds.
        queue_without_worker: accept calls while no worker is alive, instead of refusing them.
        worker_wait_s: how long a call waits for a worker to appear before it is refused.
    """

    batch_store: Path
    queue: str = DEFAULT_QUEUE
    batch_queue: str = DEFAULT_QUEUE
    body_options: BodyOptions = field(default_factory=BodyOptions)
    tokens: Tokens | None = None
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = MAX_REQUEST_BYTES
    max_file_bytes: int = 512 * 2**20
    max_waiting: int = 1000
    timeout_s: int = 600
    queue_without_worker: bool = False
    worker_wait_s: float = 3.0
