"""The database: transactions that threads share, reads beside them, failures of one and of all."""

import errno
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.worker.memory.watched_sqlite import Step, WatchedSqlite

from stoker_worker.memory.database import Connection, Damaged, Database, DatabaseFailed, connect
from stoker_worker.memory.database_file import create_database, open_database
from stoker_worker.memory.files import Disk


class Disturbed:
    """Counts SQLite's steps, and fails those that a test names."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.fails: Callable[[Step], int] = lambda step: 0
        """The errno of a step that fails, else 0."""

    def __call__(self, step: Step) -> None:
        self.counts[f"{step.kind} {step.path.name}"] += 1
        if number := self.fails(step):
            raise OSError(number, "refused")


@pytest.fixture
def steps() -> Disturbed:
    return Disturbed()


@pytest.fixture
def database(tmp_path: Path, steps: Disturbed) -> Iterator[Database]:
    create_database(tmp_path, Disk())
    opened = open_database(tmp_path, WatchedSqlite(steps))
    yield opened
    opened.close()


def add(name: str) -> Callable[[Connection], int]:
    """A change: a model of this name; returns how many there are."""

    def change(connection: Connection) -> int:
        connection.execute("INSERT INTO models (fingerprint, cache) VALUES (?, '')", (name,))
        return int(connection.execute("SELECT count(*) FROM models").fetchone()[0])

    return change


def names(database: Database) -> list[str]:
    with database.snapshot() as connection:
        return [row[0] for row in connection.execute("SELECT fingerprint FROM models ORDER BY 1")]


def commits(database: Database) -> int:
    with database.snapshot() as connection:
        return int(connection.execute("SELECT commits FROM store").fetchone()[0])


@contextmanager
def together(database: Database, changes: list[Callable[[Connection], Any]]) -> Iterator[list[Future[Any]]]:
    """Inside, these changes wait behind another one's transaction; on leaving, all have ended."""
    in_transaction, go_on = threading.Event(), threading.Event()

    def first(connection: Connection) -> None:
        in_transaction.set()
        assert go_on.wait(30)

    with ThreadPoolExecutor(len(changes) + 1) as threads:
        leader = threads.submit(database.commit, first)
        assert in_transaction.wait(30)
        futures = []
        for change in changes:
            futures.append(threads.submit(database.commit, change))
            while len(database._waiting) < len(futures):
                time.sleep(0.001)
        try:
            yield futures
        finally:
            go_on.set()
    leader.result()


def test_changes_that_come_together_share_one_sync(database: Database, steps: Disturbed) -> None:
    database.commit(add("before"))
    with together(database, [add(str(number)) for number in range(8)]) as futures:
        steps.counts.clear()
    assert [future.result() for future in futures] == list(range(2, 10))
    assert steps.counts["sync agents.db-wal"] == 2  # the first one's own, and theirs
    assert steps.counts["sync agents.db"] == 0
    assert commits(database) == 3
    assert names(database) == [*map(str, range(8)), "before"]


def failing(connection: Connection) -> None:
    add("never")(connection)
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("change", "error", "why"), [(failing, KeyError, "mine"), (add("a"), Damaged, "the store is damaged")]
)
def test_a_change_that_raises_or_breaks_a_rule_of_the_database_fails_alone_and_is_undone(
    database: Database, change: Callable[[Connection], Any], error: type[Exception], why: str
) -> None:
    with together(database, [add("a"), change, add("b")]) as (a, failed, b):
        pass
    assert (a.result(), b.result()) == (1, 2)
    with pytest.raises(error, match=why):
        failed.result()
    assert names(database) == ["a", "b"]
    assert commits(database) == 3  # the one before them, and one for each


def test_a_change_that_hides_what_sqlite_raised_is_undone_as_a_whole(database: Database, steps: Disturbed) -> None:
    """As `translated` does inside a change; SQLite may have ended the transaction meanwhile."""

    def hiding(connection: Connection) -> None:
        add("never")(connection)
        connection.execute("ROLLBACK")  # as SQLite by itself when a page cannot be read
        raise DatabaseFailed("the first reason")

    with together(database, [add("a"), hiding, add("b")]) as (a, failed, b):
        pass
    assert a.exception() is b.exception() is None
    with pytest.raises(DatabaseFailed, match="the first reason"):
        failed.result()
    assert names(database) == ["a", "b"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("kind", ["write", "sync"])
def test_a_failed_transaction_changes_nothing_and_the_next_one_succeeds(
    database: Database, steps: Disturbed, kind: str, number: int
) -> None:
    database.commit(add("a"))
    steps.fails = lambda step: number if step.kind == kind else 0
    with pytest.raises(DatabaseFailed), together(database, [add("x"), add("y")]) as failed:
        pass  # the one before them fails as well
    assert all(isinstance(future.exception(), DatabaseFailed) for future in failed)
    assert names(database) == ["a"]
    steps.fails = lambda step: 0
    assert database.commit(add("b")) == 2
    assert names(database) == ["a", "b"]


def test_a_group_that_fails_as_a_whole_is_tried_one_by_one(database: Database, steps: Disturbed) -> None:
    database.commit(add("a"))
    with together(database, [add("b"), add("c")]) as futures:
        syncs = iter([0, errno.EIO])  # the transaction before them, and theirs
        steps.fails = lambda step: next(syncs, 0) if step.kind == "sync" else 0
    assert [future.result() for future in futures] == [2, 3]
    assert names(database) == ["a", "b", "c"]


@pytest.mark.parametrize("n_failures", [1, 1000])
def test_a_transaction_that_failed_at_its_sync_stays_away_after_a_crash(
    tmp_path: Path, database: Database, steps: Disturbed, n_failures: int
) -> None:
    """All of it is in the log, and the log is what a crash leaves."""
    database.commit(add("a"))
    failures = iter([errno.EIO] * n_failures)
    steps.fails = lambda step: next(failures, 0) if step.kind == "sync" else 0
    with pytest.raises(DatabaseFailed):
        database.commit(add("never"))
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    for path in tmp_path.glob("agents.*"):
        if not path.name.endswith("-shm"):
            (crashed / path.name).write_bytes(path.read_bytes())
    reopened = open_database(crashed)
    assert names(reopened) == ["a"]
    reopened.close()


def test_an_interrupt_in_a_change_ends_no_other(database: Database) -> None:
    def interrupted(connection: Connection) -> None:
        add("never")(connection)
        raise KeyboardInterrupt

    with together(database, [interrupted, add("a"), add("b")]) as (first, a, b):
        pass
    assert isinstance(first.exception(), KeyboardInterrupt)
    assert {a.result(), b.result()} == {1, 2}
    assert names(database) == ["a", "b"]


def test_a_snapshot_is_one_state_whatever_is_committed_meanwhile(database: Database) -> None:
    database.commit(add("a"))
    with database.snapshot() as connection:
        assert connection.execute("SELECT count(*) FROM models").fetchone()[0] == 1
        database.commit(add("b"))
        assert connection.execute("SELECT count(*) FROM models").fetchone()[0] == 1
    assert names(database) == ["a", "b"]


@pytest.mark.parametrize("connector", [connect, WatchedSqlite(Disturbed())])
def test_rows_that_nobody_fetched_do_not_keep_the_next_reader_in_their_state(
    tmp_path: Path, connector: Callable[[Path], Connection]
) -> None:
    create_database(tmp_path, Disk())
    with closing(open_database(tmp_path, connector)) as database:
        for name in "ab":
            database.commit(add(name))
        with database.snapshot() as connection:
            rows = iter(connection.execute("SELECT fingerprint FROM models ORDER BY 1"))
            assert next(rows) == ("a",)
        database.commit(add("c"))
        assert names(database) == ["a", "b", "c"]


def test_threads_that_come_and_go_leave_no_connections(tmp_path: Path) -> None:
    create_database(tmp_path, Disk())
    opened: list[Connection] = []

    def counted(path: Path) -> Connection:
        opened.append(connect(path))
        return opened[-1]

    database = open_database(tmp_path, counted)
    for _ in range(20):
        thread = threading.Thread(target=names, args=(database,))
        thread.start()
        thread.join()
    assert len(opened) == 2  # one writes, one reads
    database.close()
    for connection in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")


def test_a_read_that_failed_says_why_and_the_next_one_succeeds(database: Database) -> None:
    def read() -> None:
        with database.snapshot() as connection:
            connection.execute("ROLLBACK")  # as SQLite by itself after an I/O error
            error = sqlite3.OperationalError("refused")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_READ
            raise error

    with pytest.raises(DatabaseFailed, match="refused"):
        read()
    assert names(database) == []


def test_closing_waits_for_the_transaction_under_way_and_refuses_what_comes_later(database: Database) -> None:
    with database.snapshot() as connection:
        assert connection.execute("SELECT count(*) FROM models").fetchone()[0] == 0
        with together(database, [add("a")]) as (future,):
            closer = threading.Thread(target=database.close)
            closer.start()
        closer.join()
        assert future.exception() is None or isinstance(future.exception(), DatabaseFailed)
        assert connection.execute("SELECT count(*) FROM models").fetchone()[0] == 0  # this read goes on
    for late in (lambda: names(database), lambda: database.commit(add("z"))):
        with pytest.raises(DatabaseFailed, match="is closed"):
            late()


def test_two_that_write_wait_for_each_other_and_see_each_others_changes(tmp_path: Path) -> None:
    create_database(tmp_path, Disk())
    one, other = open_database(tmp_path), open_database(tmp_path)
    with ThreadPoolExecutor(1) as threads, together(one, [add("a")]):
        future = threads.submit(other.commit, add("b"))
    assert future.result() in (1, 2)
    assert names(one) == names(other) == ["a", "b"]
    one.close()
    other.close()


def test_every_connection_has_the_settings_that_durability_needs(tmp_path: Path) -> None:
    create_database(tmp_path, Disk())
    wanted = {"synchronous": 2, "fullfsync": 1, "checkpoint_fullfsync": 1, "cell_size_check": 1, "journal_mode": "wal"}
    wanted |= {"trusted_schema": 0, "wal_autocheckpoint": 4000, "journal_size_limit": 16 << 20, "busy_timeout": 30_000}
    with closing(connect(tmp_path / "agents.db")) as connection:
        assert {name: connection.execute(f"PRAGMA {name}").fetchone()[0] for name in wanted} == wanted
        assert connection.execute("PRAGMA mmap_size").fetchall() in ([(0,)], [])  # none where SQLite has none


def fill(database: Database, name: str) -> None:
    """A transaction of 1 MB."""
    row = (name, "x" * (1 << 20))
    database.commit(lambda connection: connection.execute("INSERT INTO models VALUES (?, ?)", row).fetchall())


def test_the_log_is_emptied_by_and_by_by_those_who_write(tmp_path: Path, database: Database) -> None:
    for number in range(40):
        fill(database, str(number))
    assert (tmp_path / "agents.db-wal").stat().st_size < 24 << 20


def test_a_log_that_is_shortened_beside_them_does_not_grow(tmp_path: Path, database: Database) -> None:
    for number in range(40):
        fill(database, str(number))
        database.shorten_log()
    assert (tmp_path / "agents.db-wal").stat().st_size < 6 << 20
