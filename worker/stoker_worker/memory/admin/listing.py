"""Lists the agents of a store from their rows: no conversation is read, and no cache file touched. Any thread.

Made for a hundred thousand agents: SQLite sorts and cuts out the page, and this module loads neither numpy nor
pydantic's models. A first read takes the numbers of all agents in their order, 8 bytes each. Their rows follow in short
reads, between which nothing of the store is held: the output may be a pager that a person has left open.
"""

from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Literal

from stoker_worker.memory.database import Connection, agent_checksum, key_of

Sort = Literal["used", "size", "turns", "name"]
Snapshot = Callable[[], AbstractContextManager[Connection]]

AT_ONCE: Final = 500
"""Rows of one read."""

_COUNTS: Final = {
    **{name: name for name in ("turns", "tokens", "cached_tokens", "transcript_bytes", "piece_bytes")},
    "block_bytes": "chain_bytes",
    "size_bytes": "transcript_bytes + piece_bytes + ifnull(chain_bytes, 0)",
}
"""The counts and their SQL. No checksum covers these columns: in a damaged row, they may be of any type."""
_NUMBERS: Final = ", ".join(f"ifnull(CAST({sql} AS INTEGER), 0)" for sql in _COUNTS.values())
_USED: Final = "strftime('%Y-%m-%dT%H:%M:%S+00:00', CAST(last_used AS INTEGER), 'unixepoch')"
_SIZED: Final = "agents LEFT JOIN blocks ON address = last_block"
_ROWS: Final = f"SELECT number, agent_id, key, version, head, unsaved, checksum, {_USED}, {_NUMBERS} FROM {_SIZED}"
_SESSIONS: Final = "agent_id < ' '"
"""As `transcripts.IS_OF_SESSION`."""
_AGENTS: Final = f"number NOT IN (SELECT number FROM agents WHERE {_SESSIONS})"
"""An index has the rest: no row is read for this."""
_ORDERS: Final[dict[Sort, str]] = {
    "used": "last_used DESC, number DESC",
    "size": f"{_COUNTS['size_bytes']} DESC, number",
    "turns": "turns DESC, number",
    "name": "agent_id",
}


@dataclass(frozen=True)
class Page:
    """The agents to list, and their order.

    Attributes:
        sort: the first are those used last, the largest, those with the most turns, or in alphabetical order.
        match: a pattern of the ids, with ``*``, ``?`` and ``[...]``.
        limit: most agents; ``None``: all.
        offset: agents before the page.
        of_sessions: the conversations that sessions keep caches of, instead of agents; `match` is of sessions then.
    """

    sort: Sort = "used"
    match: str | None = None
    limit: int | None = None
    offset: int = 0
    of_sessions: bool = False


def list_agents(snapshot: Snapshot, page: Page) -> Iterator[list[dict[str, Any]]]:
    """An entry for each agent of the page, a few hundred at a time: as much of `AgentSummary` as its row holds, and
    ``size_bytes``, of its transcript, pieces and blocks. A conversation has its ``session`` in place of ``agent_id``.
    The ``state`` is ``unreadable`` only if that row is damaged. An agent removed meanwhile is left out. Raises
    `OSError`, `Damaged`: the store cannot be read."""
    with snapshot() as connection:
        numbers = _numbers(connection, page)
    for first in range(0, len(numbers), AT_ONCE):
        some = numbers[first : first + AT_ONCE]
        sql = f"{_ROWS} WHERE number IN ({', '.join(map(str, some))})"
        with snapshot() as connection:
            found = {row[0]: row for row in connection.execute(sql)}
        yield [_entry(found[number]) for number in some if number in found]


def _numbers(connection: Connection, page: Page) -> "array[int]":
    where, parameters = _where(page)
    # An index of the order has all that is needed, unless a pattern has to be compared with every row.
    order = _ORDERS[page.sort] if page.limit is not None or page.match is None else f"+{_ORDERS[page.sort]}"
    sql = f"SELECT number FROM {_SIZED if page.sort == 'size' else 'agents'} {where} ORDER BY {order} LIMIT ? OFFSET ?"
    rows = connection.execute(sql, (*parameters, -1 if page.limit is None else page.limit, page.offset))
    return array("q", (number for (number,) in rows))


def _entry(row: tuple[Any, ...]) -> dict[str, Any]:
    number, agent_id, key, version, head, unsaved, checksum, used, *counts = row
    state, problem = ("unsaved", "its last turn was not saved") if unsaved else ("ok", None)
    # As `transcripts.row_of` checks it.
    if key != key_of(str(agent_id)) or checksum != agent_checksum(number, agent_id, version, head, unsaved):
        agent_id, version = str(agent_id), version if isinstance(version, int) else 0
        state, problem = "unreadable", "its row is damaged"
    name = {"session": agent_id.split("\n")[1]} if agent_id.startswith("\n") else {"agent_id": agent_id}
    numbers = dict(zip(_COUNTS, counts, strict=True))
    return {**name, "version": version, **numbers, "last_used": used, "state": state, "problem": problem}


def count_agents(connection: Connection, page: Page) -> int:
    """The agents on this page and all others. Raises `sqlite3.Error`."""
    where, parameters = _where(page)
    return int(connection.execute(f"SELECT count(*) FROM agents {where}", parameters).fetchone()[0])


def _where(page: Page) -> tuple[str, tuple[str, ...]]:
    where, pattern = (_SESSIONS, f"\n{page.match}\n*") if page.of_sessions else (_AGENTS, page.match)
    return (f"WHERE {where}", ()) if page.match is None else (f"WHERE {where} AND agent_id GLOB ?", (str(pattern),))
