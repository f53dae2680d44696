"""Walks a whole store and names what is wrong with it. Changes nothing; any thread, best while nobody writes.

A piece of cache that is missing is no problem: it may go at any time. One that is there must be what it says.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from stoker_worker.memory.agent_folder import AgentFolder
from stoker_worker.memory.blocks import chain
from stoker_worker.memory.cache_file import is_intact, read_metadata


def verify_blocks(blocks: Path) -> Iterator[str]:
    """One line for each file that is not the block its address says."""
    for path in sorted(x for x in blocks.rglob("*") if x.is_file()):
        problem = _problem_of(path)
        if problem is not None:
            yield f"{path}: {problem}"


def verify_agents(agents: Path, folder_of: Callable[[str], AgentFolder]) -> Iterator[str]:
    """One line for each agent whose transcript cannot be read, and for each damaged tail."""
    for path in sorted(agents.glob("*/*")):
        agent_id = _agent_id_in(path)
        if agent_id is not None:
            problem = folder_of(agent_id).read().problem
        else:
            problem = "no record can be read" if any(path.glob("*.json")) else None
        if problem is not None:
            yield f"{path}: {problem}"
        for tail in sorted(path.glob("tail-*")):
            with open(tail, "rb", buffering=0) as file:
                if not is_intact(file):
                    yield f"{tail}: it is damaged"


def _problem_of(path: Path) -> str | None:
    with open(path, "rb", buffering=0) as file:
        if not is_intact(file):
            return "it is damaged"
        metadata = read_metadata(file)
    token_ids = np.array(metadata["token_ids"].split(","), dtype=np.uint32)
    if chain(metadata["parent"], token_ids.tolist())[1:] != [path.stem]:
        return "it is another block than its name says"
    return None if path.parent.parent.name == metadata["model"][:16] else "it is another model's"


def _agent_id_in(folder: Path) -> str | None:
    """Whose folder it is: said by the first record that can be read and hashes to the folder's name."""
    for path in sorted(folder.glob("*.json")):
        try:
            agent_id = json.loads(path.read_bytes().partition(b"\n")[2])["agent_id"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(agent_id, str) and hashlib.sha256(agent_id.encode()).hexdigest() == folder.name:
            return agent_id
    return None
