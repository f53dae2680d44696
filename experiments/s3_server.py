"""`localbucket` with listings that walk the folder of their prefix, not the whole bucket: real servers have an index.

``python experiments/s3_server.py FOLDER --port PORT``; its buckets are the folders in FOLDER.
"""

import os
import threading
from collections.abc import Iterator
from typing import Any

import localbucket

_asked = threading.local()


class _Os:
    """`os` for that module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def walk(self, top: Any, **options: Any) -> Iterator[Any]:
        return os.walk(os.path.join(top, getattr(_asked, "folder", "")), **options)


_plain = localbucket.S3Handler._list_entries


def _list_entries(self: Any, bucket: Any, prefix: str, *rest: Any) -> Any:
    _asked.folder = prefix.rpartition("/")[0]
    try:
        return _plain(self, bucket, prefix, *rest)
    finally:
        _asked.folder = ""


if __name__ == "__main__":
    localbucket.os = _Os()
    localbucket.S3Handler._list_entries = _list_entries
    localbucket.main()
