"""What RQ stores compressed: a job's `data`, results, reasons. Owns the size limits and the unpacking; no I/O."""

import zlib
from typing import Final

from stoker_shared.wire import MAX_REQUEST_BYTES

MAX_DATA_BYTES: Final = MAX_REQUEST_BYTES + 4096
"""The request plus RQ's frame around it, uncompressed."""


def unpacked(data: bytes, at_most: int = MAX_DATA_BYTES) -> bytes:
    """The data uncompressed, cut off one byte over the limit: a kilobyte may unpack to a megabyte.

    RQ compresses it; clients in other languages need not. What is no whole zlib stream is returned as it is.
    """
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(data, at_most + 1)
    except zlib.error:
        return bytes(data[: at_most + 1])
    is_whole = unpacking.eof or len(text) > at_most
    return text if is_whole else bytes(data[: at_most + 1])
