"""Reads a whole store and names what is wrong with it. Changes nothing; any thread, also beside a worker.

A missing cache file is no problem: it may go at any time. One that is there must be intact and belong to its place.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from stoker_worker.memory.agent_folder import AgentFolder, agent_id_in
from stoker_worker.memory.block_chain import block_address
from stoker_worker.memory.cache_file import is_intact, read_metadata
from stoker_worker.memory.record import AgentState
from stoker_worker.ports.cache_spec import BLOCK_TOKENS


def verify_blocks(blocks: Path) -> Iterator[str]:
    """One line for each file that is not the block of its address."""
    for path in sorted(x for x in blocks.rglob("*") if x.is_file()):
        problem = _problem_of(path, partial(_misplaced, path))
        if problem is not None:
            yield f"{path}: it {problem}"


def verify_agents(agents: Path) -> Iterator[str]:
    """One line for each agent whose transcript cannot be read, and for each tail or snapshot that is not its own."""
    for path in sorted(agents.glob("*/*")):
        agent_id = agent_id_in(path)
        if agent_id is None:
            if any(path.glob("*.json")):
                yield f"{path}: no record can be read"
            continue
        folder = AgentFolder(agents, agent_id)
        state = folder.read_settled()
        if state.problem is not None:
            yield f"{path}: {state.problem}"
        for piece, problem in verify_pieces(folder, state):
            if folder.read_head() == state.head:  # else a worker has replaced it meanwhile
                yield f"{piece}: it {problem}"


def verify_pieces(folder: AgentFolder, state: AgentState) -> Iterator[tuple[Path, str]]:
    """Each tail and snapshot of an agent that is wrong, and how."""
    own = folder.piece_paths(state.version.number) if state.version.transcript is not None else []
    for path in sorted(folder.path.glob("*.safetensors")):
        # A crash may have left files of another version: they are never read.
        problem = _problem_of(path, partial(_not_of_record, own.index(path), state) if path in own else lambda _: None)
        if problem is not None:
            yield path, problem


def _problem_of(path: Path, check: Callable[[dict[str, Any]], str | None]) -> str | None:
    """What is wrong with a cache file; nothing with one that a worker removed meanwhile."""
    try:
        with open(path, "rb", buffering=0) as file:
            return check(read_metadata(file)) if is_intact(file) else "is damaged"
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return "is no piece of cache of ours"  # whole, but of another writer


def _misplaced(path: Path, metadata: dict[str, Any]) -> str | None:
    token_ids = np.array(metadata["token_ids"].split(","), dtype=np.uint32)
    if len(token_ids) != BLOCK_TOKENS or block_address(metadata["parent"], token_ids.tolist()) != path.stem:
        return "is not the block of its name"
    return None if path.parent.parent.name == metadata["model"][:16] else "is another model's"


def _not_of_record(place: int, state: AgentState, metadata: dict[str, Any]) -> str | None:
    """`place` as in `AgentFolder.piece_paths`."""
    cache, transcript = state.cache, state.version.transcript
    if cache is None or transcript is None or place > len(cache.snapshots):
        return "is of no version"
    chain = cache.chain(transcript.token_ids)
    chain = chain.up_to(cache.snapshots[place - 1]) if place else chain
    expected = {
        "kind": "snapshot" if place else "tail",
        "model": cache.model,
        "parent": chain.last,
        "token_ids": ",".join(map(str, chain.rest)),
    }
    if place:
        expected["after_tokens"] = str(len(chain.token_ids))
    is_own = {field: metadata.get(field) for field in expected} == expected
    return None if is_own else "is another agent's or version's"
