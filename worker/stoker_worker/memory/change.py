"""A change of the store's database, which may share its transaction with others. Any thread.

`database` gathers the changes that wait, and begins and ends the transactions.
"""

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stoker_worker.memory.connection import Connection

T = TypeVar("T")


@dataclass
class Change(Generic[T]):
    """A change, before or after its transaction."""

    run: Callable[[Connection], T]
    is_done: bool = False
    result: T | None = None
    error: BaseException | None = None

    def outcome(self) -> T:
        """After it: what it returned. Raises what it raised, or why the transaction failed: nothing has changed."""
        if self.error is not None:
            raise self.error
        result: Any = self.result
        return result  # type: ignore[no-any-return]

    def try_alone(self, connection: Connection) -> None:
        """Raises what the change raises: the transaction is to be undone."""
        self.error = None
        self.result = self.run(connection)

    def try_in(self, connection: Connection) -> None:
        """Undo what a change that fails has done, and nothing else. Raises `sqlite3.Error`: the transaction is over."""
        self.error = None
        connection.execute("SAVEPOINT change")
        try:
            self.result = self.run(connection)
        except sqlite3.Error:  # SQLite may have rolled back the whole transaction
            raise
        except BaseException as error:  # of another thread, perhaps
            self.error = error
            connection.execute("ROLLBACK TO change")
        connection.execute("RELEASE change")
