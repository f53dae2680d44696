"""Walks a whole store and names what is wrong with it. Changes nothing; any thread, also beside a worker.

A piece of cache that is missing is no problem: it may go at any time. One that is there must be what it says, and what
its place says.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from stoker_worker.cache_spec import BLOCK_TOKENS
from stoker_worker.memory.agent_folder import AgentFolder
from stoker_worker.memory.agent_state import AgentState
from stoker_worker.memory.blocks import chain, chain_root
from stoker_worker.memory.cache_file import is_intact, read_metadata
from stoker_worker.memory.census import agent_id_in, read_settled


def verify_blocks(blocks: Path) -> Iterator[str]:
    """One line for each file that is not the block its address says."""
    for path in sorted(x for x in blocks.rglob("*") if x.is_file()):
        problem = _problem_of(path, partial(_misplaced, path))
        if problem is not None:
            yield f"{path}: it {problem}"


def verify_agents(agents: Path, folder_of: Callable[[str], AgentFolder]) -> Iterator[str]:
    """One line for each agent whose transcript cannot be read, and for each tail or snapshot that is not its own."""
    for path in sorted(agents.glob("*/*")):
        agent_id = agent_id_in(path)
        if agent_id is None:
            if any(path.glob("*.json")):
                yield f"{path}: no record can be read"
            continue
        folder = folder_of(agent_id)
        state = read_settled(folder)
        if state.problem is not None:
            yield f"{path}: {state.problem}"
        for piece, problem in verify_pieces(folder, state):
            if folder.read_head() == state.head:  # else a worker has replaced it meanwhile, as it should
                yield f"{piece}: it {problem}"


def verify_pieces(folder: AgentFolder, state: AgentState) -> Iterator[tuple[Path, str]]:
    """Each tail and snapshot of an agent with which something is wrong, and what."""
    own = folder.piece_paths(state.version.number) if state.version.transcript is not None else []
    for path in sorted(folder.path.glob("*.safetensors")):
        # Beside the newest version's there may be others, left by a turn that was cut short: nobody reads them.
        check = partial(_not_of_record, own.index(path), state) if path in own else _nothing
        problem = _problem_of(path, check)
        if problem is not None:
            yield path, problem


def _problem_of(path: Path, check: Callable[[dict[str, Any]], str | None]) -> str | None:
    """What is wrong with a piece of cache. One that a worker removed meanwhile is fine."""
    try:
        with open(path, "rb", buffering=0) as file:
            return check(read_metadata(file)) if is_intact(file) else "is damaged"
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return "is no piece of cache of ours"  # whole, but written by somebody else


def _nothing(metadata: dict[str, Any]) -> None:
    """Whatever it is, nothing is wrong with it."""


def _misplaced(path: Path, metadata: dict[str, Any]) -> str | None:
    token_ids = np.array(metadata["token_ids"].split(","), dtype=np.uint32)
    if chain(metadata["parent"], token_ids.tolist())[1:] != [path.stem]:
        return "is another block than its name says"
    return None if path.parent.parent.name == metadata["model"][:16] else "is another model's"


def _not_of_record(place: int, state: AgentState, metadata: dict[str, Any]) -> str | None:
    """`place` as in `AgentFolder.piece_paths`."""
    cache, transcript = state.cache, state.version.transcript
    if cache is None or transcript is None or place > len(cache.snapshots):
        return "is nobody's"
    n_tokens = cache.snapshots[place - 1] if place else cache.tokens
    token_ids = transcript.token_ids[:n_tokens]
    expected = {
        "kind": "snapshot" if place else "tail",
        "model": cache.model,
        "parent": chain(chain_root(cache.model, cache.salt), token_ids)[-1],
        "token_ids": ",".join(map(str, token_ids[n_tokens // BLOCK_TOKENS * BLOCK_TOKENS :])),
    }
    if place:
        expected["after_tokens"] = str(n_tokens)
    is_own = {field: metadata.get(field) for field in expected} == expected
    return None if is_own else "is another agent's or version's"
