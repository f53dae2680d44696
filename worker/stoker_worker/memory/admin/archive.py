"""Carries an agent in a file: exports its newest version, also while a worker runs it, and imports it. Any thread.

The file is a version as in a shared store, with the whole transcript. Caches stay behind, because they only save time;
so do older versions, and the answers to the agent's jobs, which are for this store's queue. An import trusts nothing in
the file: it drops the entry of a cache, and makes counts and times anew.
"""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from stoker_shared.durable_file import draft_of, write_new
from stoker_shared.errors import AgentMemoryError
from stoker_worker.memory import transcripts
from stoker_worker.memory.agent_changes import check_vacant, look, naming, readable, version_of
from stoker_worker.memory.database import Connection, Damaged
from stoker_worker.memory.locks import working_on
from stoker_worker.memory.replica.versions import SharedVersion
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.memory.transcripts import UNTIL_ENDED_S, TurnRecord, delta, replay

_MOST_BYTES: Final = 2**30
_MOST_VERSIONS: Final = 10**12


@dataclass(frozen=True)
class Exported:
    """The agent's version, and the new file's size."""

    version: int
    n_bytes: int


def export_agent(parts: StoreParts, agent_id: str, target: Path) -> Exported:
    """Write the agent's newest version to a new file, mode 0600.

    Raises:
        AgentNotFound: there is no such agent.
        AgentMemoryError: `target` exists.
        AgentTranscriptUnreadable: its transcript is damaged, or lacks its last turn.
        OSError: it could not be written; there is no file.
    """
    if target.exists():
        raise AgentMemoryError(f"{target} exists already")
    with naming(agent_id), parts.database.snapshot() as connection:
        state = readable(parts, connection, agent_id)
        transcript, row = state.version.transcript, state.row
        assert transcript is not None  # it is readable
        assert row is not None
        newest = transcripts.read_chain(connection, row, row.version, row.head)[-1]
    record = replace(newest, about=replace(newest.about, cache=None, since_full=0), **delta(None, transcript))
    content = SharedVersion(agent_id, record.version, record, record.delivery).encode()
    with draft_of(target) as draft:
        write_new(draft, content)
    return Exported(record.version, len(content))


@dataclass(frozen=True)
class Imported:
    agent_id: str
    version: int


def import_agent(parts: StoreParts, source: Path, *, new_id: str | None = None) -> Imported:
    """Import the agent in the file, under its own id or `new_id`. With a shared store it begins a history there.

    Raises:
        AgentMemoryError: the file is refused, or there is such an agent already.
        VersionTaken, SharedStoreAway: as `StoreParts.commit_next`.
        AgentBusy: a worker or another command works on an agent of this id.
        OSError: it could not be read or written; there is no such agent.
    """
    try:
        found = _read(source)
        agent_id = found.agent_id if new_id is None else new_id
        with working_on(parts.path, agent_id):
            look(parts, agent_id)
            number = parts.replica.forgotten(agent_id).number + (1 if parts.replica.is_shared else found.version)
            record = _made_anew(found, agent_id, number)

            def change(connection: Connection) -> None:
                check_vacant(connection, agent_id)
                transcripts.write_version(connection, None, record, keep_versions=number)

            with naming(agent_id):
                with parts.database.snapshot() as connection:
                    check_vacant(connection, agent_id)
                    version = version_of(connection, record)
                parts.commit_next(version, change)
    except (ValueError, TypeError, OverflowError) as why:  # of an id that is no text, too
        raise AgentMemoryError(f"{source} is refused: {why}") from why
    return Imported(agent_id, number)


def _read(source: Path) -> TurnRecord:
    """Raises `ValueError`, `OSError`."""
    with open(source, "rb") as file:
        content = file.read(_MOST_BYTES)
    try:
        fields = json.loads(content.partition(b"\n")[2])
        agent_id, version = fields["agent_id"], fields["version"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Damaged("it is no exported agent, or cut short") from None
    if not isinstance(agent_id, str) or not isinstance(version, int) or not 0 < version < _MOST_VERSIONS:
        raise Damaged("it is no exported agent")
    record = SharedVersion.decode(agent_id, version, content).record
    if record is None or not record.keeps_nothing:
        raise Damaged("it has no whole transcript")
    return record


def _made_anew(found: TurnRecord, agent_id: str, version: int) -> TurnRecord:
    """The version as this store keeps it. An agent with its own id keeps its delivery, too: if the job that made the
    version comes again, it is not run twice."""
    transcript, now = replay([found]), time.time()
    until = min(found.about.answer_until, now + UNTIL_ENDED_S)
    tokens = len(transcript.token_ids)
    about = replace(found.about, cache=None, answer_until=until, saved_at=now, tokens=tokens, since_full=0)
    delivery = found.delivery if agent_id == found.agent_id else None
    made_anew: dict[str, Any] = {**delta(None, transcript), "about": about}  # whatever the file has for that
    return replace(found, agent_id=agent_id, version=version, delivery=delivery, **made_anew)
