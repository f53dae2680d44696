"""The answers to deliveries, in the database: a delivery that comes again is answered from here. Any thread.

An answer is kept while its job can live in Redis, and then forgotten. With a shared store, the answer may be in the
version there that the delivery made; its row is then without it. Runs inside `Database.snapshot` or a change of
`Database.commit`; owns the table `deliveries`, whose column `result` is the version's number, a space, and the result
as JSON.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from stoker_worker.memory.checksum import Damaged, row_checksum
from stoker_worker.memory.database import Connection
from stoker_worker.memory.turn_record import answer_until
from stoker_worker.ports import Delivery

FORGETTER: Final = 0
"""In place of an agent's number: the delivery forgot its agent, which has none any more."""

UNTIL_ENDED_S: Final = 366 * 86_400.0
"""How long an answer is kept whose job never ends: a worker may stay away for months, and find the job then."""

KEEP_ENDED_S: Final = 2 * 86_400.0
"""The same, for a job that has ended on another machine: its answer may be asked for as long as a result lives."""

_MOST_FORGOTTEN: Final = 256
"""In one transaction, so that no turn waits long for it."""


class Ended(NamedTuple):
    """The end of a delivery: the version that it made, and until when (Unix time) the delivery may come again."""

    version: int
    until: float


def delivery_key(agent_id: str, delivery: Delivery) -> bytes:
    """SHA-256 of a delivery to an agent."""
    parts = [agent_id, delivery.job_id, delivery.created_at, delivery.repeats_left, delivery.request]
    return hashlib.sha256(json.dumps(parts).encode()).digest()


class AnswerIn(NamedTuple):
    """The answer is in this version in the shared store."""

    version: int


def read_answer(connection: Connection, agent: int, key: bytes) -> Mapping[str, Any] | AnswerIn | None:
    """The result (as JSON) that the delivery was given, or where it is.

    Raises:
        Damaged: it was given one, which is damaged or gone.
    """
    row = connection.execute(
        "SELECT result, expires, checksum FROM deliveries WHERE agent = ? AND key = ?", (agent, key)
    ).fetchone()
    if row is not None:
        result, _, written = row
        with suppress(ValueError, TypeError):
            if row_checksum((agent, key, result)) == written:
                version, text = result.split(" ", 1)
                answer: Mapping[str, Any] | AnswerIn = json.loads(text) if text else AnswerIn(int(version))
                return answer
        raise Damaged("the answer to this delivery is damaged")
    made = connection.execute("SELECT about FROM turns WHERE agent = ? AND delivery = ?", (agent, key)).fetchone()
    if made is not None and answer_until(made[0]) > time.time():
        raise Damaged("this delivery has made a turn, and its answer is missing or forgotten")
    return None


def remember(
    connection: Connection, agent: int, key: bytes, result: Mapping[str, Any], until: float, *, version: int
) -> None:
    """Keep the answer of the delivery that made this version, until then (Unix time)."""
    text = f"{version} {json.dumps(result)}"
    connection.execute(
        "INSERT OR REPLACE INTO deliveries (agent, key, result, expires, checksum) VALUES (?, ?, ?, ?, ?)",
        (agent, key, text, until, row_checksum((agent, key, text))),
    )


def note_ended(connection: Connection, agent: int, key: bytes, ended: Ended) -> None:
    """A delivery has ended in this version, on whatever machine. An answer that is here stays."""
    text = f"{ended.version} "
    connection.execute(
        "INSERT INTO deliveries (agent, key, result, expires, checksum) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (agent, key) DO UPDATE SET expires = min(expires, excluded.expires)",
        (agent, key, text, ended.until, row_checksum((agent, key, text))),
    )


def job_has_ended(connection: Connection, agent: int, version: int) -> None:
    """Of the job that made this version, on whatever machine, because a newer one is there: jobs of an agent run one
    after the other. Its answer is kept for as long as a result lives."""
    made_it = "SELECT delivery FROM turns WHERE agent = ?1 AND version = ?2"
    sql = f"UPDATE deliveries SET expires = min(expires, ?3) WHERE agent = ?1 AND key = ({made_it})"
    connection.execute(sql, (agent, version, time.time() + KEEP_ENDED_S))


def ended_for(connection: Connection, agent: int) -> dict[bytes, Ended]:
    """The ends of the deliveries to the agent that may come again, by their keys."""
    sql = "SELECT key, result, expires FROM deliveries WHERE agent = ? AND expires > ?"
    rows = ((key, _parts(result)[0], until) for key, result, until in connection.execute(sql, (agent, time.time())))
    return {key: Ended(version, until) for key, version, until in rows}


def read_text(connection: Connection, agent: int, key: bytes) -> str | None:
    """The answer as JSON; ``None``: it is not here."""
    sql = "SELECT result FROM deliveries WHERE agent = ? AND key = ?"
    found = connection.execute(sql, (agent, key)).fetchone()
    return _parts(found[0])[1] or None if found else None


def _parts(result: str) -> tuple[int, str]:
    """The version, which is 0 in a damaged row, and the answer as JSON."""
    version, _, text = result.partition(" ")
    return int(version) if version.isdecimal() else 0, text


def keep_until(connection: Connection, agent_id: str, key: bytes, until: float) -> None:
    """Keep the answer until then (Unix time). A job that is enqueued again after its end lives longer than it did."""
    connection.execute(
        "UPDATE deliveries SET expires = ?"
        " WHERE agent IN (?, (SELECT number FROM agents WHERE agent_id = ?)) AND key = ?",
        (until, FORGETTER, agent_id, key),
    )


def forget_expired(connection: Connection, now: float) -> bool:
    """Delete some of the answers whose time is over, the oldest first; returns whether there may be more."""
    found = connection.execute(
        "DELETE FROM deliveries WHERE expires < ?1 AND expires <= coalesce("
        "(SELECT expires FROM deliveries ORDER BY expires LIMIT 1 OFFSET ?2), ?1) RETURNING agent",
        (now, _MOST_FORGOTTEN - 1),
    ).fetchall()
    return len(found) >= _MOST_FORGOTTEN
