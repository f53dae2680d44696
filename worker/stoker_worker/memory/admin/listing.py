"""Lists the agents of a store from their rows: no conversation is read, and no cache file touched. Any thread.

Made for a hundred thousand agents in a second, the start of the process included: SQLite sorts, cuts out the page and
writes the JSON but for what the checksum covers, and this module loads neither numpy nor pydantic's models.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from stoker_worker.memory.checksum import agent_checksum, key_of
from stoker_worker.memory.connection import Connection

Sort = Literal["used", "size", "turns", "name"]

_quoted: Final = json.encoder.encode_basestring_ascii
_COUNTS: Final = {
    **{name: name for name in ("turns", "tokens", "cached_tokens", "transcript_bytes", "piece_bytes")},
    "block_bytes": "chain_bytes",
    "size_bytes": "transcript_bytes + piece_bytes + ifnull(chain_bytes, 0)",
}
_USED: Final = "strftime('\"%Y-%m-%dT%H:%M:%S+00:00\"', CAST(last_used AS INTEGER), 'unixepoch')"
_FORM: Final = ", ".join(f'"{name}": %d' for name in _COUNTS)
_REST: Final = f"printf('{_FORM}, \"last_used\": ', {', '.join(_COUNTS.values())}) || ifnull({_USED}, 'null')"
"""What no checksum covers: in a damaged row, a value of any type is printed as a number."""
_OK: Final = '"ok", "problem": null'
_UNSAVED: Final = '"unsaved", "problem": "its last turn was not saved"'
_DAMAGED: Final = '"unreadable", "problem": "its row is damaged"'
_ORDERS: Final[dict[Sort, str]] = {
    "used": "last_used DESC, number DESC",
    "size": f"{_COUNTS['size_bytes']} DESC, number",
    "turns": "turns DESC, number",
    "name": "agent_id",
}


@dataclass(frozen=True)
class Page:
    """Which agents to list, and in which order.

    Attributes:
        sort: the most recently used, the largest, those with the most turns, or the first in alphabetical order first.
        match: a pattern of the ids, with ``*``, ``?`` and ``[...]``.
        limit: most agents; ``None``: all.
        offset: agents of this order that come before the page.
    """

    sort: Sort = "used"
    match: str | None = None
    limit: int | None = None
    offset: int = 0


def list_agents(connection: Connection, page: Page) -> Iterator[str]:
    """A JSON object for each agent of the page: as much of `AgentSummary` as its row holds, and ``size_bytes``, of its
    transcript, pieces and blocks. The ``state`` is ``unreadable`` only if that row is damaged. Raises `sqlite3.Error`.
    """
    where, parameters = _where(page)
    # An index of the order is the shortest way to a page, and the longest to everything.
    order = _ORDERS[page.sort] if page.limit is not None else f"+{_ORDERS[page.sort]}"
    sql = (
        f"SELECT number, agent_id, key, version, head, unsaved, checksum, {_REST}"
        f" FROM agents LEFT JOIN blocks ON address = last_block {where} ORDER BY {order} LIMIT ? OFFSET ?"
    )
    limit = -1 if page.limit is None else page.limit
    for row in connection.execute(sql, (*parameters, limit, page.offset)):
        number, agent_id, key, version, head, unsaved, checksum, rest = row
        state = _UNSAVED if unsaved else _OK
        # As `agent_row.row_of` checks it.
        if key != key_of(str(agent_id)) or checksum != agent_checksum(number, agent_id, version, head, unsaved):
            agent_id, version, state = str(agent_id), version if isinstance(version, int) else 0, _DAMAGED
        yield f'{{"agent_id": {_quoted(agent_id)}, "version": {version}, {rest}, "state": {state}}}'


def count_agents(connection: Connection, page: Page) -> int:
    """The agents on this page and all others. Raises `sqlite3.Error`."""
    where, parameters = _where(page)
    return int(connection.execute(f"SELECT count(*) FROM agents {where}", parameters).fetchone()[0])


def _where(page: Page) -> tuple[str, tuple[str, ...]]:
    return ("", ()) if page.match is None else ("WHERE agent_id GLOB ?", (page.match,))
