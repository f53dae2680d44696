"""Job ids as they stand in Redis: bytes, of which RQ's own tools read some. Pure, any thread."""

import re
from typing import Final

_OF_RQ: Final = re.compile(r"[A-Za-z0-9_-]+")


def is_rqs(job_id: str) -> bool:
    """Whether RQ can fetch a job of this id, and find its executions among others."""
    return _OF_RQ.fullmatch(job_id) is not None


def text(job_id: bytes) -> str:
    """Any bytes can be pushed onto a list; what is no text comes back from `raw` unchanged."""
    return job_id.decode(errors="surrogateescape")


def raw(job_id: str) -> bytes:
    """Also of a whole key with the id in it."""
    return job_id.encode(errors="surrogateescape")
