"""The database's file: made whole and checked, by one process or by several at once."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from tests.worker.memory.test_database import add, names

from stoker_shared.errors import StoreUnusable
from stoker_worker.memory.database import Database, Witness, connect
from stoker_worker.memory.database_file import create_database, open_database
from stoker_worker.memory.files import Disk


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_database(tmp_path, Disk())
    return tmp_path


def test_a_database_that_is_there_is_never_made_anew(folder: Path) -> None:
    with closing(open_database(folder)) as database:
        database.commit(add("a"))
    create_database(folder, Disk())
    with closing(open_database(folder)) as database:
        assert names(database) == ["a"]


def test_what_a_crash_left_of_making_it_is_no_obstacle(tmp_path: Path) -> None:
    for end in ("", "-journal", "-wal", "-shm"):
        (tmp_path / f"agents.db.draft{end}").write_bytes(b"half" * 3000)
    create_database(tmp_path, Disk())
    with closing(open_database(tmp_path)) as database:
        database.commit(add("a"))
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
            database.commit(add("a"))
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
