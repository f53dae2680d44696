"""Job ids as text. In Redis an id may be any bytes; bytes that are no UTF-8 survive the way there and back. Pure."""


def text(job_id: bytes) -> str:
    """The id as text. Bytes that are no UTF-8 come back unchanged from `raw`."""
    return job_id.decode(errors="surrogateescape")


def raw(job_id: str) -> bytes:
    """The bytes of an id, or of a whole key that contains one."""
    return job_id.encode(errors="surrogateescape")
