"""`verify_store`: one line for everything that is not as it was written, and none for anything else."""

import errno
import os
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.worker.memory.agents import MODEL, SNAPSHOT_SPECS, Agent, FastDisk, ids, make_model, open_store

from stoker_worker.memory.admin.verify import verify_store
from stoker_worker.memory.agent_changes import forget_agent
from stoker_worker.memory.blocks import BlockChain
from stoker_worker.memory.database import Connection, agent_checksum, row_checksum
from stoker_worker.memory.store_parts import StoreParts, open_parts
from stoker_worker.memory.transcripts import COLUMNS

LONG = ids(1000)
PAGE = 4096


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[StoreParts]:
    """Agents `a` and `b`, three turns each, who share two blocks."""
    with closing(open_store(tmp_path / "store")) as store:
        for agent in (Agent(store, "a"), Agent(store, "b")):
            for length in (300, 600, 610):
                agent.say(LONG[:length], (7,))
    with closing(open_parts(tmp_path / "store", FastDisk())) as parts:
        yield parts


def change(parts: StoreParts, sql: str) -> None:
    parts.database.commit(lambda connection: connection.execute(sql).fetchall())


@pytest.mark.parametrize(
    ("sql", "found"),
    [
        ("UPDATE turns SET about = '?' WHERE agent = 1 AND version = 2", ["agent 'a': version 2 is unusable: "]),
        (
            "UPDATE turns SET new_messages = CAST(x'ff80' AS TEXT) WHERE agent = 1 AND version = 3",
            ["agent 'a': version 3 is unusable: its checksum does not match"],
        ),
        (
            "DELETE FROM turns WHERE agent = 1 AND version = 2",
            ["agent 'a': version 3 does not follow the one before it"],
        ),
        ("DELETE FROM turns WHERE agent = 1 AND version = 3", ["agent 'a': version 3 is missing"]),
        (
            "UPDATE agents SET agent_id = CAST(x'ff80' AS TEXT) WHERE number = 2",
            ["agent '\ufffd\ufffd': its row is not the agent's"],
        ),
        ("UPDATE agents SET key = x'00' WHERE number = 2", ["agent 'b': its indexes do not agree on the agent"]),
        ("UPDATE agents SET version = 2 WHERE number = 2", ["agent 'b': the checksum of its row does not match"]),
        (
            "DELETE FROM agents WHERE number = 2",
            [
                "agents.db: agent number 2 has versions and no row",
                "agents.db: agent number 2 has answers and no row",
                "agents.db: its cache files take ",
            ],
        ),
        (
            "UPDATE deliveries SET result = '{}' WHERE agent = 2",
            ["agent number 2: the answer to this delivery is damaged"] * 3,
        ),
        ("UPDATE agents SET last_block = x'00' WHERE number = 1", ["agents.db: agent 'a' uses a block that "]),
        ("UPDATE store SET cache_bytes = 7", ["agents.db: its cache files take "]),
    ],
)
def test_a_damaged_row_is_a_line(parts: StoreParts, sql: str, found: list[str]) -> None:
    assert list(verify_store(parts)) == []
    change(parts, sql)
    lines = list(verify_store(parts))
    assert len(lines) == len(found), lines
    for line, expected in zip(lines, found, strict=True):
        assert expected in line


@pytest.mark.parametrize(
    ("sql", "found"),
    [
        ("UPDATE turns SET about = '{}'", "agent 'a': version 3 is unusable: its content is not a version"),
        ("UPDATE turns SET keep_tokens = 9999", "agent 'a': version 3 keeps more than its parent has"),
        ("UPDATE turns SET new_messages = '['", "agent 'a': version 3 is unusable: its content is not a version"),
    ],
)
def test_a_version_that_says_nothing_is_a_line_even_if_its_checksum_is_right(
    parts: StoreParts, sql: str, found: str
) -> None:
    def rewrite(connection: Connection) -> None:
        connection.execute(f"{sql} WHERE agent = 1 AND version = 3")
        row = connection.execute(f"SELECT {COLUMNS} FROM turns WHERE agent = 1 AND version = 3").fetchone()
        head = row_checksum(("a", *row[:-1]))
        connection.execute("UPDATE turns SET checksum = ? WHERE agent = 1 AND version = 3", (head,))
        checksum = agent_checksum(1, "a", 3, head, 0)
        connection.execute("UPDATE agents SET head = ?, checksum = ? WHERE number = 1", (head, checksum))

    parts.database.commit(rewrite)
    assert list(verify_store(parts)) == [found]


def test_an_answer_that_is_no_json_is_a_line_even_if_its_checksum_is_right(parts: StoreParts) -> None:
    def rewrite(connection: Connection) -> None:
        agent, key = connection.execute("SELECT agent, key FROM deliveries LIMIT 1").fetchone()
        written = (row_checksum((agent, key, "{")), agent, key)
        connection.execute("UPDATE deliveries SET result = '{', checksum = ? WHERE agent = ? AND key = ?", written)

    parts.database.commit(rewrite)
    assert list(verify_store(parts)) == ["agent number 1: the answer to this delivery is damaged"]


def test_a_damaged_page_is_a_line_and_the_rest_is_still_read(parts: StoreParts) -> None:
    tail = parts.pieces.paths("a", 3)[0]
    tail.write_bytes(b"?")
    with parts.database.snapshot() as connection:
        sql = "SELECT rootpage FROM sqlite_schema WHERE name = 'deliveries'"
        page = connection.execute(sql).fetchone()[0]
    parts.close()
    data = bytearray(parts.database.path.read_bytes())
    data[(page - 1) * 4096 : page * 4096] = bytes(4096)
    parts.database.path.write_bytes(data)
    with closing(open_parts(parts.path, FastDisk())) as again:
        lines = list(verify_store(again))
    assert lines.pop() == f"{tail}: it is damaged"
    assert lines
    assert all(line.startswith(f"{parts.database.path}: ") for line in lines)


def test_a_page_that_comes_twice_is_a_line_and_not_read_for_ever(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        for n in range(40):
            Agent(store, f"{n:0200}").say(LONG[:10])
    path = store.parts.database.path
    data, start = bytearray(path.read_bytes()), (root_page(path, "agents") - 1) * PAGE
    first = start + int.from_bytes(data[start + 12 : start + 14], "big")
    data[start + 8 : start + 12] = data[first : first + 4]  # the last child of this inner page is its first one
    path.write_bytes(data)
    with closing(open_parts(tmp_path, FastDisk())) as parts:
        assert f"{path}: its rows are out of order" in verify_store(parts)


def test_an_agent_that_an_index_has_lost_is_a_line_and_its_files_are_none(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        Agent(store, "agent-b").say(LONG[:300])
    path = store.parts.database.path
    data, page = path.read_bytes(), root_page(path, "sqlite_autoindex_agents_1")
    index = data[(page - 1) * PAGE : page * PAGE].replace(b"agent-b", b"agent-c")
    path.write_bytes(data[: (page - 1) * PAGE] + index + data[page * PAGE :])
    with closing(open_parts(tmp_path, FastDisk())) as parts:
        lines = [line for line in verify_store(parts) if not line.startswith(str(path))]
        assert lines == ["agent 'agent-b': its indexes do not agree on the agent"]


def root_page(path: Path, name: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        sql = "SELECT rootpage FROM sqlite_schema WHERE name = ?"
        return int(connection.execute(sql, (name,)).fetchone()[0])


@pytest.mark.parametrize("data", [b"", b"?", b"\xff" * 5000])
def test_a_damaged_file_is_a_line(parts: StoreParts, data: bytes) -> None:
    block = next(parts.blocks.path.glob("*/*/*"))
    tail = parts.pieces.paths("a", 3)[0]
    old = tail.with_name(tail.name.replace("-3-", "-2-"))
    for path in (block, tail, old):
        path.write_bytes(data)
    assert sorted(verify_store(parts)) == sorted(f"{path}: it is damaged" for path in (block, tail, old))


def test_a_folder_that_cannot_be_read_is_a_line(parts: StoreParts, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, scandir = next(parts.blocks.path.glob("*/*/*")).parent, os.scandir

    def refusing(path: str) -> Any:
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert list(verify_store(parts)) == [f"{folder}: it cannot be read: Permission denied"]


@pytest.mark.parametrize("kind", ["full", *SNAPSHOT_SPECS])
def test_a_whole_file_at_another_place_is_a_line(tmp_path: Path, kind: str) -> None:
    model = MODEL if kind == "full" else make_model(spec=SNAPSHOT_SPECS[kind])
    with closing(open_store(tmp_path / "store")) as store:
        for name, prompt in (("a", LONG[:600]), ("b", LONG[:700]), ("c", LONG[300:900])):
            Agent(store, name, model=model).say(prompt, (7,))
        parts = store.parts
        for ours, theirs in zip(parts.pieces.paths("a", 1), parts.pieces.paths("b", 1), strict=True):
            if ours.exists():
                ours.write_bytes(theirs.read_bytes())
        pieces = [path for path in parts.pieces.paths("a", 1) if path.exists()]
        expected = [f"{path}: it is another agent's or version's" for path in pieces]
        checkpoints = sorted(parts.blocks.path.glob("*/*/*-checkpoint*"))
        assert len(checkpoints) == (kind != "full")
        blocks = sorted({*parts.blocks.path.glob("*/*/*")}.difference(checkpoints))
        for path in checkpoints:
            path.write_bytes(parts.pieces.paths("c", 1)[1].read_bytes())
            expected.append(f"{path}: it is not the checkpoint of its name")
        if blocks:
            blocks[1].write_bytes(blocks[0].read_bytes())
            stray = blocks[0].parent / "notes.txt"
            stray.write_text("mine")
            elsewhere = parts.blocks.path / "0123456789abcdef" / blocks[0].parent.name / blocks[0].name
            elsewhere.parent.mkdir(parents=True)
            elsewhere.write_bytes(blocks[0].read_bytes())
            expected += [
                f"{blocks[1]}: it is not the block of its name",
                f"{stray}: it has no name of a block",
                f"{elsewhere}: it is another model's",
            ]
        assert sorted(verify_store(parts)) == sorted(expected)


def test_a_block_that_the_index_has_otherwise_is_a_line(parts: StoreParts) -> None:
    address = BlockChain(MODEL.fingerprint, None, LONG[:512]).last
    change(parts, f"UPDATE blocks SET parent = x'00' WHERE address = x'{address}'")
    path = parts.blocks.path_of(MODEL.fingerprint, address)
    assert list(verify_store(parts)) == [f"{path}: it has another parent or model in the index"]


def test_what_a_crash_or_an_eviction_leaves_is_no_problem(parts: StoreParts) -> None:
    with closing(open_store(parts.path)) as store:
        Agent(store, "unsaved").say(LONG[:10])
        store.mark_unsaved("unsaved")
        store.mark_unsaved("never saved")
    parts.pieces.paths("a", 3)[0].rename(parts.pieces.paths("a", 4)[0])  # of a turn that was never committed
    nobody = parts.pieces.paths("nobody", 1)[0]
    nobody.parent.mkdir()
    parts.pieces.paths("b", 3)[0].rename(nobody)
    next(parts.blocks.path.glob("*/*/*")).unlink()
    (parts.temp / "1-0.tmp").write_bytes(b"half")
    assert list(verify_store(parts)) == []


def test_beside_a_worker_at_work_there_is_no_false_alarm(parts: StoreParts) -> None:
    """Files come and go: turns replace tails, an agent is forgotten and made anew, blocks are evicted."""
    is_over = threading.Event()

    def work() -> None:
        with closing(open_store(parts.path)) as store:
            store.budget.max_bytes = 1
            agents = [Agent(store, name) for name in ("a", "b", "c")]
            turn = 0
            while not is_over.is_set():
                turn += 1
                if turn % 10 == 0:
                    forget_agent(store.parts, agents[turn % 3].name)
                agents[turn % 3].say(LONG[: 300 + turn % 7 * 100], (turn,))

    with ThreadPoolExecutor(1) as threads:
        worker = threads.submit(work)
        try:
            for _ in range(15):
                assert list(verify_store(parts)) == []
        finally:
            is_over.set()
        worker.result()
