"""The answers to deliveries, in the database: a delivery that comes again is answered from here. Any thread.

An answer is kept while its job can live in Redis, and then forgotten. Runs inside `Database.snapshot` or a change of
`Database.commit`; owns the table `deliveries`.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from stoker_worker.memory.checksum import Damaged, row_checksum
from stoker_worker.memory.connection import Connection
from stoker_worker.memory.turn_record import answer_until
from stoker_worker.ports import Delivery

FORGETTER: Final = 0
"""In place of an agent's number: the delivery forgot its agent, which has none any more."""

UNTIL_ENDED_S: Final = 366 * 86_400.0
"""How long an answer is kept whose job never ends: a worker may stay away for months, and find the job then."""

_MOST_FORGOTTEN: Final = 256
"""In one transaction, so that no turn waits long for it."""


def delivery_key(agent_id: str, delivery: Delivery) -> bytes:
    """SHA-256 of a delivery to an agent."""
    parts = [agent_id, delivery.job_id, delivery.created_at, delivery.repeats_left, delivery.request]
    return hashlib.sha256(json.dumps(parts).encode()).digest()


def read_answer(connection: Connection, agent: int, key: bytes) -> Mapping[str, Any] | None:
    """The result (as JSON) that the delivery was given.

    Raises:
        Damaged: it was given one, which is damaged or gone.
    """
    row = connection.execute(
        "SELECT result, expires, checksum FROM deliveries WHERE agent = ? AND key = ?", (agent, key)
    ).fetchone()
    if row is not None:
        result, _, written = row
        with suppress(ValueError):
            if row_checksum((agent, key, result)) == written:
                answer: Mapping[str, Any] = json.loads(result)
                return answer
        raise Damaged("the answer to this delivery is damaged")
    made = connection.execute("SELECT about FROM turns WHERE agent = ? AND delivery = ?", (agent, key)).fetchone()
    if made is not None and answer_until(made[0]) > time.time():
        raise Damaged("this delivery has made a turn, and its answer is missing or forgotten")
    return None


def remember(connection: Connection, agent: int, key: bytes, result: Mapping[str, Any], until: float) -> None:
    """Keep an answer until then (Unix time)."""
    text = json.dumps(result)
    connection.execute(
        "INSERT OR REPLACE INTO deliveries (agent, key, result, expires, checksum) VALUES (?, ?, ?, ?, ?)",
        (agent, key, text, until, row_checksum((agent, key, text))),
    )


def take_back(connection: Connection, agent: int, key: bytes) -> None:
    """What the delivery changed was undone."""
    connection.execute("DELETE FROM deliveries WHERE agent = ? AND key = ?", (agent, key))


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
