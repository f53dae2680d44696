"""Makes an agent that continues from another one. Finisher threads, and commands of the shell.

The new agent gets the transcript as one version of its own, copies of the tail and the snapshots, and the same blocks.
"""

from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from stoker_shared.agents import AgentForked
from stoker_shared.errors import AgentExists
from stoker_worker.memory import agent_table
from stoker_worker.memory.agent_changes import (
    BY_COMMAND,
    Asked,
    check_vacant,
    naming,
    readable,
    version_of,
    write_with_cache,
)
from stoker_worker.memory.connection import Connection
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.memory.turn_parts import chain_of, make_record
from stoker_worker.ports import AgentVersion

_READ_BYTES: Final = 1 << 20


def fork_agent(parts: StoreParts, source: str, target: str, asked: Asked = BY_COMMAND) -> AgentForked:
    """Make agent `target` with the transcript and the cache of `source`'s newest version. Of the deliveries it gets the
    fork's alone: the others were answered for the other agent.

    Raises:
        AgentNotFound: there is no `source`.
        AgentExists: there is a `target`.
        AgentTranscriptUnreadable: the transcript of `source` is damaged or lacks its last turn.
        AgentVersionConflict: see `Asked`.
        VersionTaken, SharedStoreAway: as `StoreParts.commit_next`.
        OSError: it could not be written; there is no `target`.
    """
    with ExitStack() as files:
        base = AgentVersion(target, parts.replica.forgotten(target).number, None)
        version, pieces = _open_version(parts, source, base, asked, files)
        cache, transcript = version.cache, version.transcript
        assert transcript is not None  # it is readable
        record = make_record(base, transcript, cache, made_by="fork", delivery=asked.delivery)
        chain = chain_of(cache, transcript.token_ids) if cache else None
        forked = AgentForked(
            job_id=asked.job_id,
            agent_id=source,
            target=target,
            version=record.version,
            from_version=version.number,
            tokens=len(transcript.token_ids),
        )
        chunks = {path: iter(partial(file.read, _READ_BYTES), b"") for path, file in pieces.items()}
        piece_bytes = parts.pieces.write(chunks)
    with parts.database.snapshot() as connection:
        next_version = version_of(connection, record, forked)

    def change(connection: Connection) -> None:
        check_vacant(connection, target)
        number = write_with_cache(connection, None, record, chain, piece_bytes=piece_bytes)
        asked.remember(connection, number, target, forked, version=forked.version)

    try:
        with naming(target):
            parts.commit_next(lambda: next_version, change)
    except AgentExists:
        raise  # its files have the same names
    except Exception:
        parts.pieces.remove(pieces)
        raise
    return forked


def _open_version(
    parts: StoreParts, source: str, base: AgentVersion, asked: Asked, files: ExitStack
) -> tuple[AgentVersion, dict[Path, BinaryIO]]:
    """The newest version of `source`, and its tail and snapshots by the paths that the version after `base` will have
    them at; open, so that they outlast a turn of `source`."""
    target, number = base.agent_id, base.number + 1
    while True:
        with naming(source), parts.database.snapshot() as connection:
            version = readable(connection, source).version
            asked.check(source, version.number)
            check_vacant(connection, target)
        opened: dict[Path, BinaryIO] = {}
        theirs = parts.pieces.paths(source, version.number)
        for ours, path in zip(parts.pieces.paths(target, number), theirs, strict=True):
            with suppress(FileNotFoundError):
                opened[ours] = files.enter_context(path.open("rb"))
        with naming(source), parts.database.snapshot() as connection:
            row = agent_table.find_agent(connection, source)
        if row is not None and row.head == version.head:  # no turn has removed some of them before they were open
            return version, opened
