"""Small files with a checksum: one line ``<name> 1 <xxh3_128 of the rest>``, then JSON. Pure.

`record` and `tombstones` own the content.
"""

from typing import Final

from xxhash import xxh3_128_hexdigest

_FORMAT: Final = "1"


class Damaged(ValueError):
    """A file is not as it was written, or not where it belongs; the message gives the reason. Stays in this package."""


def checksum(body: bytes) -> str:
    """xxh3_128 as 32 hex digits."""
    return xxh3_128_hexdigest(body)


def seal(name: str, body: bytes) -> bytes:
    """The file's bytes: the line with the checksum, then `body`."""
    return f"{name} {_FORMAT} {checksum(body)}\n".encode() + body


def unseal(name: str, data: bytes) -> bytes:
    """The body of a file that `seal` made.

    Raises:
        Damaged: it is another kind of file, of another format, cut short or changed.
    """
    first_line, _, body = data.partition(b"\n")
    expected = f"{name} {_FORMAT} {checksum(body)}".encode()
    if first_line == expected:
        return body
    if first_line.startswith(f"{name} ".encode()) and first_line.split(b" ")[1:2] != [_FORMAT.encode()]:
        raise Damaged("it is of a format that this version does not read")
    raise Damaged("its checksum does not match")
