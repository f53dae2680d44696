"""The database's file: made whole, checked, brought to a new format, by one process or by several at once."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stoker_shared.errors import StoreUnusable
from stoker_worker.memory import schema
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.database import Cursor, Database, SharedNote, Witness, connect, read_note
from stoker_worker.memory.database_file import create_database, open_database, seal_tables
from stoker_worker.memory.files import Disk


def add(database: Database, name: str) -> None:
    database.commit(lambda connection: connection.execute("INSERT INTO models VALUES (?, '')", (name,)).fetchall())


def names(database: Database) -> list[str]:
    with database.snapshot() as connection:
        return [row[0] for row in connection.execute("SELECT fingerprint FROM models ORDER BY 1")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_database(tmp_path, Disk())
    return tmp_path


def test_a_database_that_is_there_is_never_made_anew(folder: Path) -> None:
    with closing(open_database(folder)) as database:
        add(database, "a")
    create_database(folder, Disk())
    with closing(open_database(folder)) as database:
        assert names(database) == ["a"]


def test_what_a_crash_left_of_making_it_is_no_obstacle(tmp_path: Path) -> None:
    for end in ("", "-journal", "-wal", "-shm"):
        (tmp_path / f"agents.db.draft{end}").write_bytes(b"half" * 3000)
    create_database(tmp_path, Disk())
    with closing(open_database(tmp_path)) as database:
        add(database, "a")
    assert {path.name for path in tmp_path.iterdir()} == {"agents.db", "agents.commits"}


def test_processes_that_make_it_at_once_share_one(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from stoker_worker.memory.database_file import create_database, open_database\n"
        "from stoker_worker.memory.files import Disk\n"
        "folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "create_database(folder, Disk())\n"
        "database = open_database(folder)\n"
        "add = lambda connection: connection.execute('INSERT INTO models VALUES (?, 1)', (name,)).fetchall()\n"
        "database.commit(add)\n"
    )
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for number in range(6)
    ]
    for maker in makers:
        maker.stdout.readline()
    for maker in makers:
        maker.stdin.write(b"go\n")
        maker.stdin.flush()
    assert [maker.communicate() and maker.returncode for maker in makers] == [0] * 6
    with closing(open_database(tmp_path)) as database:
        assert names(database) == [str(number) for number in range(6)]


def test_a_file_that_vanished_is_an_error_and_leaves_no_empty_file(folder: Path) -> None:
    (folder / "agents.db").unlink()
    with pytest.raises(OSError, match="unable to open"):
        Database(folder)
    assert list(folder.iterdir()) == []


def test_a_commit_of_another_process_while_it_is_opened_is_no_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_database(folder)) as database:
        read = Witness.read

        def after_a_commit(witness: Witness) -> int | None:
            add(database, "a")
            return read(witness)

        monkeypatch.setattr(Witness, "read", after_a_commit)
        with closing(open_database(folder)) as other:
            assert names(other) == ["a"]


@pytest.mark.parametrize(
    "sql",
    [
        "PRAGMA application_id=1",
        "DROP INDEX deliveries_by_expiry",
        "CREATE TABLE more (x)",
        "UPDATE store SET tables = x'00'",
        "DELETE FROM store",
    ],
)
def test_a_database_with_other_tables_is_refused(folder: Path, sql: str) -> None:
    connection = connect(folder / "agents.db")
    connection.execute(sql)
    connection.close()
    with pytest.raises(StoreUnusable, match="memory restore BACKUP"):
        open_database(folder)


def test_a_log_is_kept_whatever_the_journal_mode_was_set_to(folder: Path) -> None:
    connection = connect(folder / "agents.db")
    connection.execute("PRAGMA journal_mode=DELETE").fetchall()
    connection.close()
    with pytest.raises(StoreUnusable, match="journal_mode is 'delete'"):
        open_database(folder)


STEPS = {
    8: "ALTER TABLE models ADD COLUMN size INTEGER NOT NULL DEFAULT 7;\nCREATE INDEX by_size ON models (size);\n",
    9: "UPDATE models SET size = size + 1;\nALTER TABLE models RENAME COLUMN size TO bytes;\n",
}


@pytest.fixture
def next_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database of format 8 with one row, opened by a stoker that writes format 10."""
    with closing(open_database(folder)) as database:
        add(database, "a")
    monkeypatch.setattr(schema, "FORMAT", 10)
    monkeypatch.setattr(schema, "MIGRATIONS", STEPS)
    return folder


def rows(folder: Path) -> list[object]:
    with closing(open_database(folder)) as database, database.snapshot() as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (10,)
        return connection.execute("SELECT fingerprint, bytes FROM models ORDER BY 1").fetchall()


def test_an_older_format_is_brought_to_this_one_step_by_step(next_version: Path) -> None:
    assert rows(next_version) == [("a", 8)]
    assert rows(next_version) == [("a", 8)]  # once


def test_several_that_open_an_older_format_at_once_take_each_step_once(next_version: Path) -> None:
    barrier = threading.Barrier(4)

    def open_late() -> list[object]:
        barrier.wait()
        return rows(next_version)

    with ThreadPoolExecutor(4) as threads:
        found = [future.result() for future in [threads.submit(open_late) for _ in range(4)]]
    assert found == [[("a", 8)]] * 4


def test_a_step_that_fails_leaves_the_format_before_it(next_version: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", {**STEPS, 9: "UPDATE models SET size = 0;\nNO SQL;\n"})
        with pytest.raises((StoreUnusable, Damaged)):
            open_database(next_version)
    connection = connect(next_version / "agents.db")
    assert connection.execute("SELECT user_version, size FROM pragma_user_version, models").fetchall() == [(9, 7)]
    connection.close()
    assert rows(next_version) == [("a", 8)]


def test_the_format_after_the_last_step_is_this_one() -> None:
    assert sorted(schema.MIGRATIONS) == list(range(5, schema.FORMAT))


def make_format_5(folder: Path) -> None:
    with closing(connect(folder / "agents.db")) as connection:
        for statement in (
            "ALTER TABLE store DROP COLUMN shared", "ALTER TABLE store DROP COLUMN clock_s",
            "DROP INDEX agents_by_clock", "ALTER TABLE agents DROP COLUMN used_clock_s", "PRAGMA user_version=5",
        ):  # fmt: skip
            connection.execute(statement).fetchall()
        seal_tables(connection)


def test_a_store_of_format_5_is_brought_to_this_format(folder: Path) -> None:
    make_format_5(folder)
    with closing(open_database(folder)) as database, database.snapshot() as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (schema.FORMAT,)
        assert read_note(connection) is None


@pytest.mark.parametrize("note", [SharedNote("s3://a/b", "id"), None])
def test_a_store_whose_shared_store_lacked_something_has_to_be_shared_again(
    folder: Path, note: SharedNote | None
) -> None:
    with closing(connect(folder / "agents.db")) as connection:
        connection.execute("CREATE TABLE unshared (key BLOB PRIMARY KEY, agent_id TEXT NOT NULL, forgotten INTEGER)")
        if note is None:
            connection.execute("INSERT INTO unshared VALUES (x'00', 'agent', NULL)")
        connection.execute("UPDATE store SET shared = 's3://a/b id'")
        connection.execute("PRAGMA user_version=7").fetchall()
        seal_tables(connection)
    with closing(open_database(folder)) as database, database.snapshot() as connection:
        assert read_note(connection) == note
        assert not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'unshared'").fetchall()


class KilledAt:
    """A connection whose process is killed before its statement of this number."""

    def __init__(self, number: int, path: Path) -> None:
        self._left = number
        self._connection = connect(path)

    def execute(self, sql: str, parameters: Any = (), /) -> Cursor:
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._connection.execute(sql, parameters)

    def close(self) -> None:
        self._connection.close()


def opens(folder: Path, number: int) -> bool:
    """Whether another process opens the store, which is killed at that statement."""
    pid = os.fork()
    if not pid:
        try:
            open_database(folder, partial(KilledAt, number)).close()
        finally:
            os._exit(0)
    return not os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_a_worker_that_is_killed_at_any_step_of_a_migration_leaves_a_store_that_opens(folder: Path) -> None:
    with closing(open_database(folder)) as database:
        add(database, "a")
    make_format_5(folder)
    for number in range(100):
        copy = folder.with_name(f"killed at {number}")
        shutil.copytree(folder, copy)
        was_whole = opens(copy, number)
        with closing(open_database(copy)) as database, database.snapshot() as connection:
            assert connection.execute("PRAGMA user_version").fetchone() == (schema.FORMAT,)
            assert read_note(connection) is None
            assert names(database) == ["a"]
        if was_whole:
            break
    assert number > 19
