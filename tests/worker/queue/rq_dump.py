"""Every key of RQ's as plain values that are equal in two runs of one story: ids, times and names are masked."""

import base64
import json
import math
import re
import zlib
from datetime import UTC, datetime
from typing import Any

from redis import Redis

EXECUTION_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+(Z|\+00:00)")
OLD_S = 86_400 * 30
SCORED_BY_TIME = ("rq:deferred:", "rq:ready:", "rq:scheduled:", "rq:finished:", "rq:failed:", "rq:canceled:", "rq:wip:")
PER_PROCESS = ("pid", "hostname", "ip_address", "version", "python_version", "total_working_time", "birth", "death")


def dump(connection: Redis, names: dict[str, str]) -> dict[str, Any]:
    """
    Args:
        names: the texts to mask, by their replacement: worker names above all.
    """
    found = {}
    for key in sorted(connection.scan_iter("rq:*")):
        name = _masked(key.decode(), names)
        found[name] = {"expires_within_s": _minutes(connection.ttl(key)), "value": _value(connection, key, names)}
    return found


def differences(ours: Any, theirs: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """The differences of two dumps: path, our value, their value; ``None`` for a missing one."""
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return [] if ours == theirs else [(path, ours, theirs)]
    found = []
    for key in sorted({*ours, *theirs}, key=str):
        found += differences(ours.get(key), theirs.get(key), f"{path} {key}".strip())
    return found


def _value(connection: Any, key: bytes, names: dict[str, str]) -> Any:
    kind = connection.type(key)
    if kind == b"string":
        return _masked(connection.get(key).decode(), names)
    if kind == b"list":
        return [_masked(entry.decode(), names) for entry in connection.lrange(key, 0, -1)]
    if kind == b"set":
        return {_masked(entry.decode(), names): True for entry in connection.smembers(key)}
    if kind == b"zset":
        by_time = key.decode().startswith(SCORED_BY_TIME)
        entries = connection.zrange(key, 0, -1, withscores=True)
        return {_masked(entry.decode(), names): _score(score) if by_time else score for entry, score in entries}
    if kind == b"hash":
        return {
            field.decode(): _field(field.decode(), value, names) for field, value in connection.hgetall(key).items()
        }
    # A separate list: the number of results and their order.
    entries = connection.xrange(key)
    return {
        f"entry {n}": {f.decode(): _entry_field(f.decode(), v, names) for f, v in e.items()}
        for n, (_, e) in enumerate(entries)
    }


def _field(name: str, value: bytes, names: dict[str, str]) -> Any:
    if name in PER_PROCESS:
        return f"<{name}>"
    if name == "result" and value:
        return _text("return_value", value, names)
    if name in ("data", "exc_info") and value:
        return _text(name, _unzipped(value), names)
    return _masked(value.decode(errors="replace"), names)


def _entry_field(name: str, value: bytes, names: dict[str, str]) -> Any:
    if name in ("return_value", "exc_string"):
        return _text(name, _unzipped(base64.b64decode(value)), names)
    if name.endswith("_at"):
        return "<time>"
    return _masked(value.decode(), names)


def _text(name: str, value: bytes, names: dict[str, str]) -> Any:
    text = value.decode()
    if name == "data":
        return json.loads(text)
    if name == "return_value":
        return json.loads(text).get("text", "<not a result>")
    return text.strip().splitlines()[-1] if text else ""  # the last line of a traceback names the error


def _unzipped(value: bytes) -> bytes:
    try:
        return zlib.decompress(value)
    except zlib.error:
        return value


def _masked(text: str, names: dict[str, str]) -> str:
    for name, mask in names.items():
        text = text.replace(name, mask)
    return TIME.sub("<time>", EXECUTION_ID.sub("<execution>", text))


def _score(score: float) -> Any:
    """A time as minutes from now, so that two runs of a few seconds agree; anything else unchanged."""
    now = datetime.now(UTC).timestamp()
    return _minutes(score - now) if now - OLD_S < score < math.inf else score


def _minutes(seconds: float) -> Any:
    """Rounded up to whole minutes, which restores a round number that was set a few seconds ago."""
    return seconds if seconds < 0 and seconds in (-1, -2) else f"{max(0, math.ceil(seconds / 60))} min"
