"""Walks a whole store and names what is wrong with it. Changes nothing; any thread, also beside a worker.

A piece of cache that is missing is no problem: it may go at any time. One that is there must be what it says.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stoker_worker.memory.agent_folder import AgentFolder
from stoker_worker.memory.blocks import chain
from stoker_worker.memory.cache_file import is_intact, read_metadata
from stoker_worker.memory.census import agent_id_in, read_settled


def verify_blocks(blocks: Path) -> Iterator[str]:
    """One line for each file that is not the block its address says."""
    for path in sorted(x for x in blocks.rglob("*") if x.is_file()):
        problem = _problem_of(path, path.stem)
        if problem is not None:
            yield f"{path}: {problem}"


def verify_agents(agents: Path, folder_of: Callable[[str], AgentFolder]) -> Iterator[str]:
    """One line for each agent whose transcript cannot be read, and for each damaged tail or snapshot."""
    for path in sorted(agents.glob("*/*")):
        agent_id = agent_id_in(path)
        if agent_id is not None:
            problem = read_settled(folder_of(agent_id)).problem
        else:
            problem = "no record can be read" if any(path.glob("*.json")) else None
        if problem is not None:
            yield f"{path}: {problem}"
        for piece in sorted(path.glob("*.safetensors")):
            problem = _problem_of(piece, None)
            if problem is not None:
                yield f"{piece}: {problem}"


def _problem_of(path: Path, address: str | None) -> str | None:
    """What is wrong with a piece of cache. One that a worker removed meanwhile is fine."""
    try:
        with open(path, "rb", buffering=0) as file:
            if not is_intact(file):
                return "it is damaged"
            return None if address is None else _misplaced(path, address, read_metadata(file))
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return "it is no block of ours"  # whole, but written by somebody else


def _misplaced(path: Path, address: str, metadata: dict[str, Any]) -> str | None:
    token_ids = np.array(metadata["token_ids"].split(","), dtype=np.uint32)
    if chain(metadata["parent"], token_ids.tolist())[1:] != [address]:
        return "it is another block than its name says"
    return None if path.parent.parent.name == metadata["model"][:16] else "it is another model's"
