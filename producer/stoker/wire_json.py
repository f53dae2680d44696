"""RQ's JSON serializer with shorter output. Readable by RQ's own `JSONSerializer`; never pickle."""

import json
from typing import Any


class WireJson:
    """Text stays UTF-8: escaped to ASCII, a request within the size limit could outgrow what the worker reads."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()

    @staticmethod
    def loads(data: bytes) -> Any:
        return json.loads(data)
