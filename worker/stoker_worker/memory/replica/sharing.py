"""Shares an existing store: puts its agents into a shared store that lacks them. A command, with the store's lock.

Goes through the agents in pages, so memory does not grow with the store. What is there already is compared and not put
again, so a second call continues after an interruption. If another agent of the same id is there, it is named, and both
stay as they are: then the store is not noted as shared, and no worker starts with it.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from stoker_shared.errors import VersionTaken
from stoker_worker.memory import transcripts
from stoker_worker.memory.admin.backup import check_pages
from stoker_worker.memory.agent_changes import version_of
from stoker_worker.memory.database import Connection, Damaged, write_note
from stoker_worker.memory.replica.bucket import MARKER, Bucket, identify
from stoker_worker.memory.replica.shared_replica import checksum_of
from stoker_worker.memory.replica.versions import Emptied, SharedVersion, Versions
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.memory.transcripts import IS_OF_SESSION, AgentRow

_PAGE: Final = 256
_THREADS: Final = 16
_MOST_NAMED: Final = 1000
_ANOTHER: Final = "there is another agent of this id there"


@dataclass
class Shared:
    """`agents`: how many are in both stores now. `put`: for how many of them something was put there. `n_refused`: how
    many are not shared. `refused`: why not, by agent, for the first ones of these."""

    agents: int = 0
    put: int = 0
    n_refused: int = 0
    refused: dict[str, str] = field(default_factory=dict)


def share(parts: StoreParts, bucket: Bucket, *, on_page: Callable[[Shared], object] = lambda done: None) -> Shared:
    """Make the shared store have all agents of this one, and note it if it has. `on_page`: called with what is done.

    Raises:
        StoreUnusable: it is no shared store, and cannot be one; or the database is damaged.
        BucketAway, OSError, Damaged: call again to continue.
    """
    with parts.database.snapshot() as connection:
        check_pages(connection, parts.database.path)  # a damaged index would hide agents
    note, done, last = identify(bucket, is_new=True), Shared(), b""
    bucket.landmark = MARKER
    versions = Versions(bucket)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="shared-store") as threads:
        while page := _page(parts, last):
            names = [agent_id for _, agent_id in page]
            for name, outcome in zip(names, threads.map(partial(_share_agent, parts, versions), names), strict=True):
                _count(done, name, outcome)
            last = page[-1][0]
            on_page(done)
    if not done.n_refused:
        parts.database.commit(partial(write_note, note=note))
    return done


def _page(parts: StoreParts, last: bytes) -> list[tuple[bytes, str]]:
    # In a damaged row, the id may be a blob, by which no agent is found.
    sql = "SELECT key, CAST(agent_id AS TEXT) FROM agents"
    sql += f" WHERE key > ? AND NOT {IS_OF_SESSION} ORDER BY key LIMIT ?"
    with parts.database.snapshot() as connection:
        return connection.execute(sql, (last, _PAGE)).fetchall()


def _count(done: Shared, agent_id: str, outcome: bool | str) -> None:
    if isinstance(outcome, str):
        done.n_refused += 1
        if len(done.refused) < _MOST_NAMED:
            done.refused[agent_id] = outcome
    else:
        done.agents += 1
        done.put += outcome


def _share_agent(parts: StoreParts, versions: Versions, agent_id: str) -> bool | str:
    """Put the versions after the newest one there; returns whether there were any, or why the agent is not shared.
    Raises `BucketAway`, `OSError`: not all of them are there."""
    try:
        before = set(versions.stored(agent_id))
        newest = max(before, default=0)
        there = versions.get(agent_id, newest) if newest else None
        with parts.database.snapshot() as connection:
            row = transcripts.find_agent(connection, agent_id)
            if agent_id in parts.unsaved or (row is not None and row.unsaved):  # only this store knows that
                raise Damaged("its last turn was not saved; rollback --to its newest version, or rm it, first")
            if row is None:
                raise Damaged("no agent has this id: it was just removed, or its row is damaged ('memory salvage')")
            if not row.version:
                return False
            here = _chain(connection, row)
            ours = checksum_of(connection, row, newest)
        if newest >= row.version:
            at_ours = there if newest == row.version else versions.get(agent_id, row.version)
            return False if at_ours is not None and at_ours.head == row.head else _ANOTHER
        begins_again = there is not None and there.record is None and _keeps_nothing(here, newest + 1)
        if there is not None and not begins_again and there.head != ours:
            return _ANOTHER
        missing = {version.number: version for version in here if version.number > newest}
        for version in missing.values():
            versions.create(version)
        if missing and versions.stored(agent_id).keys() - before - missing.keys():  # another worker's, just now
            return _ANOTHER
        return bool(missing)
    except VersionTaken:
        return _ANOTHER
    except Emptied:
        return "an agent of this id was forgotten there"
    except Damaged as damage:
        return str(damage)


def _keeps_nothing(chain: list[SharedVersion], number: int) -> bool:
    return any(x.number == number and x.record is not None and x.record.keeps_nothing for x in chain)


def _chain(connection: Connection, row: AgentRow) -> list[SharedVersion]:
    """The newest version and those that it needs, oldest first. Raises `Damaged`."""
    if row.problem is not None:
        raise Damaged(row.problem)
    records = transcripts.read_chain(connection, row, row.version, row.head)
    ended = transcripts.ends_for(connection, row.number)
    found = []
    for record in records:
        key = record.delivery
        answer = None if key is None else transcripts.answer_text(connection, row.number, key)
        made = vars(version_of(connection, record)) | {"result": answer}
        found.append(SharedVersion(**made, ended=ended if record is records[0] else {}))
    return found
