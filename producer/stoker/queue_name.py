"""Names of queues. Owns what is one; no I/O."""

from stoker_shared.errors import InvalidRequest


def checked_queue_name(name: str) -> str:
    """
    Raises:
        InvalidRequest: no worker could listen to a queue of this name.
    """
    if not name or not name.isprintable() or "," in name or name != name.strip():
        raise InvalidRequest(
            "queue: a queue name is a non-empty printable string without commas and surrounding spaces"
        )
    return name
