"""Damage on disk: a bad block costs time, never a wrong answer; a bad row is never a silently new conversation."""

import logging
import shutil
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.worker.memory.agents import (
    Agent,
    call_of_session,
    ids,
    make_model,
    make_transcript,
    make_turn,
    open_store,
    problems_of,
    reopen,
    rows,
    run_job,
    walk,
)
from tests.worker.memory.flips import Flip, spoil

from stoker_shared.errors import AgentTranscriptUnreadable
from stoker_worker.memory import transcripts
from stoker_worker.memory.admin.salvage import salvage
from stoker_worker.memory.agent_changes import exists, forget_agent
from stoker_worker.memory.blocks import BlockChain
from stoker_worker.memory.cache_index import HAS_CACHE
from stoker_worker.memory.database import NAME, key_of
from stoker_worker.memory.store_parts import opened
from stoker_worker.ports import AgentVersion

LONG = ids(900)
NEXT = (*LONG[:700], 1, 2, 3)
"""The next prompt of an agent that stands at LONG[:700]: two blocks and a tail of 188 tokens."""


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    """An agent at version 3, with LONG[:700] cached, and a neighbour with a conversation of the same shape."""
    store = open_store(tmp_path)
    neighbour, agent = Agent(store, "neighbour"), Agent(store)
    for length in (300, 690, 700):
        neighbour.say(ids(length, seed=9))
        agent.say(LONG[:length])
    return agent


def blocks_of(agent: Agent) -> tuple[Path, ...]:
    """The agent's two blocks, in order."""
    return BlockChain(agent.model.fingerprint, None, LONG[:512]).paths(agent.store.parts.blocks.path_of)


def tail_of(agent: Agent, name: str = "agent") -> Path:
    return agent.store.parts.pieces.paths(name, 3)[0]


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "first byte": lambda path: flip(path, 0),
    "header": lambda path: flip(path, 120),
    "data": lambda path: flip(path, -40),
    "last byte": lambda path: flip(path, -1),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("block", [0, 1])
def test_a_damaged_block_is_a_miss_from_there_and_is_written_anew(
    agent: Agent, caplog: pytest.LogCaptureFixture, damage: str, block: int
) -> None:
    path = blocks_of(agent)[block]
    DAMAGES[damage](path)
    restored = agent.restore(NEXT)
    assert (restored.prefix.n_tokens if restored.prefix else 0) == 256 * block
    assert restored.miss_reason == "block_corrupt"
    assert agent.store.misses == {"block_corrupt": 1}
    said = [record for record in caplog.records if record.name.startswith("stoker_worker.memory")]
    assert [(x.levelno, "block_corrupt" in x.getMessage()) for x in said] == [(logging.WARNING, True)]
    assert not path.exists()
    agent.say(NEXT)
    assert path.exists()
    assert agent.cached((*NEXT, 4)) == len(NEXT)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_tail_costs_only_the_tail(agent: Agent, damage: str) -> None:
    tail = tail_of(agent)
    DAMAGES[damage](tail)
    restored = agent.restore(NEXT)
    assert restored.prefix is not None
    assert (restored.prefix.n_tokens, restored.miss_reason) == (512, "tail_corrupt")
    agent.say(NEXT)
    assert agent.cached((*NEXT, 4)) == len(NEXT)


def test_a_missing_piece_is_a_named_miss(agent: Agent, tmp_path: Path) -> None:
    tail = tail_of(agent)
    for path, left, reason in (
        (tail, 512, "tail_missing"),
        (blocks_of(agent)[1], 256, "block_missing"),
        (blocks_of(agent)[0], 0, "block_missing"),
    ):
        path.unlink()
        assert agent.cached(NEXT) == left
        assert agent.restore(NEXT).miss_reason == reason
    shutil.rmtree(tmp_path / "blocks")
    assert agent.cached(NEXT) == 0
    agent.say(NEXT)
    assert agent.cached((*NEXT, 4)) == len(NEXT)


@pytest.mark.parametrize(
    ("whose", "left", "reason"),
    [
        ("another block", 256, "block_foreign"),
        ("another agent's tail", 512, "tail_foreign"),
        ("another model's block", 0, "block_foreign"),
    ],
)
def test_another_piece_in_the_place_of_one_is_foreign_and_never_loaded(
    agent: Agent, tmp_path: Path, whose: str, left: int, reason: str
) -> None:
    first, second = blocks_of(agent)
    Agent(agent.store, "agent of b", model=make_model("b")).say(LONG[:256])
    (of_b,) = (tmp_path / "blocks" / make_model("b").fingerprint[:16]).rglob("*.safetensors")
    pieces = {0: (of_b, first), 256: (first, second), 512: (tail_of(agent, "neighbour"), tail_of(agent))}
    shutil.copy(*pieces[left])
    restored = agent.restore(NEXT)
    assert (restored.prefix.n_tokens if restored.prefix else 0, restored.miss_reason) == (left, reason)
    assert not pieces[left][1].exists()


def test_a_turn_that_goes_on_from_a_damaged_row_of_a_block_is_saved_without_its_cache(
    agent: Agent, tmp_path: Path
) -> None:
    address = bytes.fromhex(blocks_of(agent)[1].stem)
    ((parent,),) = rows(agent.store, "SELECT parent FROM blocks WHERE address = ?", address)
    agent.store.close()
    at = (tmp_path / NAME).read_bytes().index(address + parent)
    Flip(NAME, at - 5, 8).apply(tmp_path)  # the type of `unused_since`: 0 instead of NULL
    agent.store = open_store(tmp_path)
    for length in (800, 900):
        result = agent.store.save(agent.turn(LONG[:length]))
        assert "its cache is not saved: the database of the store is damaged" in result["cache"]["save_error"]
        assert agent.tokens() == LONG[:length]
    assert Agent(agent.store, "neighbour").say((*ids(700, seed=9), *LONG)) == 4
    assert agent.cached((*LONG, 1)) == 512


def test_a_damaged_row_of_a_block_keeps_no_other_from_eviction(
    agent: Agent, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = blocks_of(agent)[0]
    address = bytes.fromhex(damaged.stem)
    ((parent,),) = rows(agent.store, "SELECT parent FROM blocks WHERE address = ?", address)
    agent.store.close()
    spoil(tmp_path, address + parent, parent)
    agent.store = open_store(tmp_path)
    agent.store.budget.max_bytes = 1
    for _ in range(2):
        agent.store.budget.make_room()
    assert rows(agent.store, "SELECT lower(hex(address)) FROM blocks") == [(damaged.stem,)]
    assert list(tmp_path.rglob("*.safetensors")) == []
    assert caplog.text.count("stays in the index") == 1
    assert agent.tokens() == LONG[:700]


@pytest.mark.parametrize("waiting", [frozenset[str](), frozenset({"agent", "neighbour"})])
def test_a_damaged_row_of_an_agent_keeps_no_other_from_eviction(
    agent: Agent, tmp_path: Path, waiting: frozenset[str]
) -> None:
    ((last_used,),) = rows(agent.store, "SELECT last_used FROM agents WHERE agent_id = 'neighbour'")
    agent.store.close()
    spoil(tmp_path, b"neighbour" + key_of("neighbour"), struct.pack(">d", last_used))
    agent.store = open_store(tmp_path)
    agent.store.pin(frozenset(), waiting)
    agent.store.order_by(lambda agent_id: (0, len(agent_id)))  # the neighbour's cache goes first
    agent.store.budget.max_bytes = 1
    agent.store.budget.make_room()
    assert rows(agent.store, f"SELECT agent_id FROM agents WHERE {HAS_CACHE}") == [("neighbour",)]
    assert agent.tokens() == LONG[:700]


# --- transcripts ---


def change(tmp_path: Path, sql: str, *parameters: Any) -> None:
    """Behind the store's back, and past every checksum. `:agent` is the agent's number."""
    with closing(sqlite3.connect(tmp_path / NAME)) as connection, connection:
        number = connection.execute("SELECT number FROM agents WHERE agent_id = 'agent'").fetchone()[0]
        assert connection.execute(sql.replace(":agent", str(number)), parameters).rowcount == 1


def unreadable(agent: Agent, tmp_path: Path) -> tuple[str, AgentVersion]:
    """Reopen the store and expect `append` to be refused: the message, and what `full` may go on from."""
    agent.store = reopen(agent.store, tmp_path)
    with pytest.raises(AgentTranscriptUnreadable) as caught:
        agent.open()
    assert isinstance(caught.value.usable, AgentVersion)
    return str(caught.value), caught.value.usable


def expect_full_goes_on(agent: Agent, tmp_path: Path, usable: AgentVersion) -> None:
    """A turn that brings its whole conversation is saved above every version there was, and all is well again."""
    restored = agent.restore(LONG[:720], usable)
    assert restored.prefix is not None  # the prompt's full blocks still serve
    assert (restored.prefix.n_tokens, restored.miss_reason) == (512, "transcript_unreadable")
    agent.say(LONG[:720], (5,), usable)
    agent.store = reopen(agent.store, tmp_path)
    version = agent.open()
    assert version.number == usable.number + 1
    assert version.transcript == make_transcript((*LONG[:720], 5))
    agent.say((*agent.tokens(), 1))
    agent.store = reopen(agent.store, tmp_path)
    assert agent.open().number == usable.number + 2


def expect_only_full_goes_on(agent: Agent, tmp_path: Path, why: str, *, number: int = 3) -> None:
    """`append` is refused for this reason; the agent's newest version has this number."""
    message, usable = unreadable(agent, tmp_path)
    assert why in message
    assert (usable.number, usable.transcript) == (number, None)
    expect_full_goes_on(agent, tmp_path, usable)


TURN_COLUMNS = {
    "parent": "x'00'",
    "delivery": "x'00'",
    "about": "replace(about, 'eos', 'stop')",
    "keep_tokens": "keep_tokens + 1",
    "keep_messages": "keep_messages + 1",
    "keep_text": "keep_text + 1",
    "new_tokens": "substr(new_tokens, 5)",
    "new_messages": "replace(new_messages, 'tokens', 'Tokens')",
    "new_text": "'?'",
    "checksum": "zeroblob(16)",
}


@pytest.mark.parametrize(("version", "column"), [(1 + n % 3, column) for n, column in enumerate(TURN_COLUMNS)])
def test_a_changed_version_is_never_a_shorter_conversation(
    agent: Agent, tmp_path: Path, version: int, column: str
) -> None:
    change(
        tmp_path, f"UPDATE turns SET {column} = {TURN_COLUMNS[column]} WHERE agent = :agent AND version = ?", version
    )
    expect_only_full_goes_on(agent, tmp_path, f"version {version} is")


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("how", ["removed", "another agent's", "another version's", "rewritten"])
def test_a_replaced_version_is_noticed(agent: Agent, tmp_path: Path, version: int, how: str) -> None:
    place = f"agent = :agent AND version = {version}"
    if how == "removed":
        change(tmp_path, f"DELETE FROM turns WHERE {place}")
    else:
        if how == "rewritten":  # whole, the same agent's and version's, but of another history
            with closing(open_store(tmp_path / "elsewhere")) as other:
                for length in (310, 680, 710):
                    Agent(other).say(LONG[:length])
        elsewhere = tmp_path / "elsewhere" if how == "rewritten" else tmp_path
        number = "agent_id = 'neighbour'" if how == "another agent's" else "agent_id = 'agent'"
        with closing(sqlite3.connect(elsewhere / NAME)) as connection:
            from_version = version % 3 + 1 if how == "another version's" else version
            columns = ", ".join(["parent", *TURN_COLUMNS][1:])
            row = connection.execute(
                f"SELECT {columns} FROM turns WHERE version = ? AND agent = (SELECT number FROM agents WHERE {number})",
                (from_version,),
            ).fetchone()
        change(tmp_path, f"UPDATE turns SET ({columns}) = ({', '.join('?' * len(row))}) WHERE {place}", *row)
    expect_only_full_goes_on(agent, tmp_path, f"version {version} is")


@pytest.mark.parametrize(
    "columns", ["version = 2", "head = x''", "unsaved = 1", "checksum = zeroblob(16)", "version = 'x'", "head = 0"]
)
def test_a_changed_row_of_the_agent_is_noticed(agent: Agent, tmp_path: Path, columns: str) -> None:
    change(tmp_path, f"UPDATE agents SET {columns} WHERE number = :agent")
    expect_only_full_goes_on(agent, tmp_path, "checksum of its row")


def test_an_old_row_of_the_agent_is_noticed(agent: Agent, tmp_path: Path) -> None:
    """A page that was never written, or came back from before: its rows are whole, and not the newest."""
    columns = "version, head, unsaved, checksum"
    with closing(sqlite3.connect(tmp_path / NAME)) as connection:
        row = connection.execute(f"SELECT {columns} FROM agents WHERE agent_id = 'agent'").fetchone()
    agent.say(LONG[:710])
    agent.say(LONG[:720])
    change(tmp_path, f"UPDATE agents SET ({columns}) = (?, ?, ?, ?) WHERE number = :agent", *row)
    expect_only_full_goes_on(agent, tmp_path, "its row lacks the newest version", number=5)


@pytest.mark.parametrize(("column", "then"), [("key", "a full turn"), ("key", "forget"), ("agent_id", "forget")])
def test_a_flipped_byte_in_what_the_indexes_of_a_row_have_does_not_stay(
    agent: Agent, tmp_path: Path, column: str, then: str
) -> None:
    agent.store.close()
    row, start = b"agent" + key_of("agent"), root_page(tmp_path, "agents")
    place = (tmp_path / NAME).read_bytes().index(row, start)
    assert place < start + 4096
    flip(tmp_path / NAME, place + (2 if column == "agent_id" else 20))
    agent.store = open_store(tmp_path)
    if column == "key":
        message, usable = unreadable(agent, tmp_path)
        assert "its row is not the agent's" in message
        assert (usable.number, usable.transcript) == (3, None)
    if then == "a full turn":
        expect_full_goes_on(agent, tmp_path, usable)
    else:
        assert run_job(agent.store, "forget").existed
        assert agent.open().number == 0
        agent.say(LONG[:10])
    walk(agent.store)
    assert problems_of(agent.store) == []


def root_page(tmp_path: Path, name: str) -> int:
    """Where the first page of a table or index begins in the database, which has no log then."""
    with closing(sqlite3.connect(tmp_path / NAME)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        (page,) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (name,)).fetchone()
    return (int(page) - 1) * 4096


def empty_the_page(tmp_path: Path, index: str) -> None:
    """As a damaged page hides its rows from SQLite, without an error."""
    start = root_page(tmp_path, index)
    with open(tmp_path / NAME, "r+b") as file:
        file.seek(start)
        file.write(b"\x0a\0\0\0\0\x10\0\0")


@pytest.mark.parametrize("index", ["sqlite_autoindex_agents_1", "agents_by_key"])
def test_an_agent_that_an_index_has_lost_is_never_begun_anew(
    agent: Agent, tmp_path: Path, index: str, caplog: pytest.LogCaptureFixture
) -> None:
    agent.store.close()
    empty_the_page(tmp_path, index)
    agent.store = open_store(tmp_path)
    for name in ("agent", "neighbour"):
        with pytest.raises(AgentTranscriptUnreadable, match="its indexes do not agree") as caught:
            agent.store.open_agent(name)
        full = Agent(agent.store, name)
        with pytest.raises(OSError) as failed:
            full.say(LONG[:50], agent=caught.value.usable)
        for message in map(str, (caught.value, failed.value)):  # a producer reads these
            assert "memory salvage" not in message
        assert f"agent {name!r}: its indexes do not agree on the agent; with the worker stopped" in caplog.text
        assert "memory salvage" in caplog.text
        agent.store.mark_unsaved(name)
    agent.store.close()
    assert salvage(tmp_path).whole == 2
    agent.store = open_store(tmp_path)
    message, usable = unreadable(agent, tmp_path)
    assert "its last turn was not saved" in message
    assert usable.transcript == make_transcript(LONG[:700])
    agent.say(NEXT, agent=usable)


def lose_the_ids(tmp_path: Path) -> set[str]:
    """What `salvage` loses if only the index by key still knows the agents."""
    for page in ("agents", "sqlite_autoindex_agents_1"):
        empty_the_page(tmp_path, page)
    lost = salvage(tmp_path).lost
    assert salvage(tmp_path).lost == lost  # they stay known
    return set(lost)


def test_an_agent_whose_id_was_lost_is_taken_over_by_a_full_turn_or_removed(agent: Agent, tmp_path: Path) -> None:
    names = {name: transcripts.lost_name(key_of(name)) for name in ("agent", "neighbour")}
    agent.store.close()
    assert lose_the_ids(tmp_path) == set(names.values())
    agent.store = open_store(tmp_path)
    for name in (*names.values(), *names):
        with pytest.raises(AgentTranscriptUnreadable, match="its id was lost"):
            agent.store.open_agent(name)
    agent.store.mark_unsaved("neighbour")  # a full turn that could not be saved
    with pytest.raises(AgentTranscriptUnreadable, match="version 1 is missing"):
        agent.store.open_agent("neighbour")
    with opened(tmp_path) as parts:
        assert forget_agent(parts, "neighbour").existed
        assert not exists(parts, names["neighbour"])
    message, usable = unreadable(agent, tmp_path)
    assert "its id was lost" in message
    expect_full_goes_on(agent, tmp_path, usable)
    assert agent.store.open_agent(names["agent"]).number == 0
    assert problems_of(agent.store) == []


def test_an_agent_whose_id_was_lost_is_removed_by_the_name_that_it_has(agent: Agent, tmp_path: Path) -> None:
    agent.store.close()
    for name in lose_the_ids(tmp_path):
        with opened(tmp_path) as parts:
            assert exists(parts, name)
            assert forget_agent(parts, name).existed
    agent.store = open_store(tmp_path)
    assert agent.open().number == 0
    agent.say(LONG[:10])
    assert agent.tokens() == LONG[:10]


def test_a_session_whose_name_was_lost_is_kept_again(agent: Agent, tmp_path: Path) -> None:
    call_of_session(agent.store, LONG[:600])
    agent.store.close()
    assert len(lose_the_ids(tmp_path)) == 3
    agent.store = open_store(tmp_path)
    call_of_session(agent.store, LONG[:600])
    assert call_of_session(agent.store, NEXT) == (600, None)


def test_versions_that_the_index_has_lost_are_noticed(agent: Agent, tmp_path: Path) -> None:
    agent.store.close()
    empty_the_page(tmp_path, "sqlite_autoindex_turns_1")
    agent.store = open_store(tmp_path)
    expect_only_full_goes_on(agent, tmp_path, "version 3 is missing")


def test_old_damage_below_a_full_replacement_is_forgotten(agent: Agent, tmp_path: Path) -> None:
    agent.say(ids(50, seed=5))
    agent.store.save(make_turn(agent, agent.open(), make_transcript((9, 9), text="raw"), None))
    change(tmp_path, "UPDATE turns SET new_tokens = x'' WHERE agent = :agent AND version = 2")
    agent.store = reopen(agent.store, tmp_path)
    assert agent.tokens() == (9, 9)


# --- turns that were not saved ---


def test_full_continues_after_an_unsaved_turn_on_a_damaged_agent(agent: Agent, tmp_path: Path) -> None:
    change(tmp_path, "UPDATE turns SET new_tokens = x'' WHERE agent = :agent AND version = 3")
    agent.store.mark_unsaved("agent")
    agent.store.mark_unsaved("agent")
    _, usable = unreadable(agent, tmp_path)
    assert (usable.number, usable.transcript) == (3, None)
    expect_full_goes_on(agent, tmp_path, usable)


def test_no_message_quotes_the_conversation(agent: Agent, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = make_transcript((1,), text="my secret prompt")
    agent.store.save(make_turn(agent, agent.open(), secret, None))
    change(tmp_path, "UPDATE turns SET new_tokens = x'' WHERE agent = :agent AND version = 4")
    message, _ = unreadable(agent, tmp_path)
    assert "secret" not in message + caplog.text
