"""Agents and their answers in the database: what damage and crashes may never make of them."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise

import pytest

from stoker_worker.memory import agent_table, deliveries
from stoker_worker.memory.agent_table import AgentRow
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.database import Connection
from stoker_worker.memory.database_file import make_tables
from stoker_worker.memory.turn_saver import make_record
from stoker_worker.ports import Delivery, Transcript

DELIVERY = Delivery("job", "2026", 1, "digest")
KEY = deliveries.delivery_key("a", DELIVERY)


@pytest.fixture
def connection() -> Iterator[Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as opened:
        make_tables(opened)
        yield opened


def say(connection: Connection, name: str, n_tokens: int, *, keep_versions: int = 16) -> AgentRow:
    """A version of the agent with tokens 0, 1, 2, …"""
    state = agent_table.read_agent(connection, name)
    new = Transcript(tuple(range(n_tokens)), "t", None, "x" * n_tokens, "eos")
    record = make_record(state.version, new, None, made_by="turn", delivery=DELIVERY)
    return agent_table.write_version(connection, state.row, record, keep_versions=keep_versions)


def tokens(connection: Connection, name: str) -> int:
    state = agent_table.read_agent(connection, name)
    assert state.problem is None
    return len(state.version.transcript.token_ids)


def hide(connection: Connection, index: str, name: str) -> None:
    """As a damaged page does: the index lacks the agent, the other one and the table have it."""
    column = "key" if index == "agents_by_key" else "agent_id"
    for sql in (
        "CREATE TABLE others (number INTEGER PRIMARY KEY, agent_id TEXT, key BLOB)",
        f"INSERT INTO others SELECT number, agent_id, key FROM agents WHERE agent_id != '{name}'",
        "PRAGMA writable_schema=ON",
        f"CREATE UNIQUE INDEX stolen ON others ({column})",
    ):
        connection.execute(sql)
    root = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'stolen'").fetchone()[0]
    connection.execute("DELETE FROM sqlite_schema WHERE name = 'stolen'")
    connection.execute("UPDATE sqlite_schema SET rootpage = ? WHERE name = ?", (root, index))
    version = connection.execute("PRAGMA schema_version").fetchone()[0]
    connection.execute(f"PRAGMA schema_version={version + 1}")
    connection.execute("PRAGMA writable_schema=RESET").fetchall()


@pytest.mark.parametrize("index", ["sqlite_autoindex_agents_1", "agents_by_key"])
def test_an_agent_that_one_index_lacks_is_no_unknown_agent(connection: Connection, index: str) -> None:
    for name in "abc":
        say(connection, name, 10)
    hide(connection, index, "a")
    with pytest.raises(Damaged, match="indexes do not agree"):
        agent_table.read_agent(connection, "a")
    assert tokens(connection, "b") == 10
    assert agent_table.find_agent(connection, "d") is None


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE agents SET version = 1",
        "UPDATE agents SET version = 3",
        "UPDATE agents SET head = x'00'",
        "UPDATE agents SET head = (SELECT checksum FROM turns WHERE version = 1)",
        "UPDATE agents SET unsaved = 1",
        "UPDATE agents SET checksum = zeroblob(16)",
        "DELETE FROM turns WHERE version = 2",
        "DELETE FROM turns WHERE version = 1",
        "UPDATE turns SET new_tokens = x'00000000' WHERE version = 1",
        "UPDATE turns SET parent = NULL WHERE version = 2",
        "UPDATE turns SET version = 9 WHERE version = 2",
    ],
)
def test_a_changed_row_is_never_another_conversation(connection: Connection, sql: str) -> None:
    say(connection, "a", 10)
    say(connection, "a", 20)
    connection.execute(sql)
    state = agent_table.read_agent(connection, "a")
    assert state.problem is not None
    assert state.version.transcript is None
    assert state.version.number >= 1  # so that what replaces it does not hide a version


def test_rows_of_another_agent_are_no_conversation_of_this_one(connection: Connection) -> None:
    ours, theirs = say(connection, "a", 10), say(connection, "b", 20)
    connection.execute("DELETE FROM turns WHERE agent = ?", (ours.number,))
    connection.execute("UPDATE turns SET agent = ? WHERE agent = ?", (ours.number, theirs.number))
    assert agent_table.read_agent(connection, "a").problem is not None
    assert agent_table.read_agent(connection, "b").problem is not None


def test_the_newest_version_is_read_from_a_bounded_number_of_rows(connection: Connection) -> None:
    for length in range(1, 60):
        row = say(connection, "a", length, keep_versions=4)
        assert len(agent_table.read_chain(connection, row, row.version, row.head)) <= 16
        assert tokens(connection, "a") == length
    versions = [row[0] for row in connection.execute("SELECT version FROM turns ORDER BY version")]
    assert versions == list(range(versions[0], 60))
    assert versions[0] > 59 - 4 - 2 * 16
    for version in range(60 - 4, 60):  # those that are kept can be returned to
        assert len(agent_table.read_version(connection, row, version)[0].token_ids) == version


def test_an_agents_number_is_never_that_of_another_with_rows(connection: Connection) -> None:
    for name in "abc":
        say(connection, name, 10)
    deliveries.remember(connection, 3, KEY, {"text": "c's"}, time.time() + 60, version=1)
    forgotten = agent_table.find_agent(connection, "c")
    assert forgotten is not None
    agent_table.delete_agent(connection, forgotten)
    row = say(connection, "d", 5)
    assert tokens(connection, "d") == 5
    assert connection.execute("SELECT count(*) FROM deliveries WHERE agent = ?", (row.number,)).fetchone() == (0,)


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM deliveries",
        "UPDATE deliveries SET result = '{}'",
        "UPDATE deliveries SET key = x'00'",
        "UPDATE deliveries SET checksum = zeroblob(16)",
    ],
)
def test_an_answer_that_is_damaged_or_missing_is_never_no_answer(connection: Connection, sql: str) -> None:
    row = say(connection, "a", 10)
    deliveries.remember(connection, row.number, KEY, {"text": "hi"}, time.time() + 60, version=1)
    assert deliveries.read_answer(connection, row.number, KEY) == {"text": "hi"}
    connection.execute(sql)
    with pytest.raises(Damaged, match=r"answer to this delivery|its answer"):
        deliveries.read_answer(connection, row.number, KEY)


def test_an_answer_is_that_of_its_agent_and_its_delivery(connection: Connection) -> None:
    deliveries.remember(connection, 1, KEY, {"text": "hi"}, time.time() + 60, version=1)
    others = [
        Delivery("other", "2026", 1, "digest"),
        Delivery("job", "2027", 1, "digest"),
        Delivery("job", "2026", 0, "digest"),
        Delivery("job", "2026", None, "digest"),
        Delivery("job", "2026", 1, "other"),
    ]
    for delivery in others:
        assert deliveries.read_answer(connection, 1, deliveries.delivery_key("a", delivery)) is None
    assert deliveries.read_answer(connection, 1, deliveries.delivery_key("b", DELIVERY)) is None
    assert deliveries.read_answer(connection, 2, KEY) is None


def test_answers_are_forgotten_oldest_first_and_none_before_its_time(connection: Connection) -> None:
    for number in range(1000):
        deliveries.remember(connection, 1, number.to_bytes(32, "big"), {}, until=float(number), version=1)
    rounds, left = 0, [1000]
    while deliveries.forget_expired(connection, 900.0):
        rounds += 1
        oldest, n_left = connection.execute("SELECT min(expires), count(*) FROM deliveries").fetchone()
        left.append(n_left)
        assert oldest == 1000 - n_left
    assert all(before - after <= 300 for before, after in pairwise(left))
    assert rounds > 2
    assert connection.execute("SELECT min(expires), count(*) FROM deliveries").fetchone() == (900.0, 100)
