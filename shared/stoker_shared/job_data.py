"""A job's `data` as RQ stores it. Owns its size limit and its compression; no I/O."""

import zlib
from typing import Final

from stoker_shared.wire import MAX_REQUEST_BYTES

MAX_DATA_BYTES: Final = MAX_REQUEST_BYTES + 4096
"""The request plus RQ's frame around it, uncompressed."""


def unpacked(data: bytes) -> bytes:
    """The data uncompressed, cut off one byte over the limit. RQ compresses it; clients in other languages need not."""
    try:
        return zlib.decompressobj().decompress(data, MAX_DATA_BYTES + 1)
    except zlib.error:
        return bytes(data)
