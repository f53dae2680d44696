"""Fills a ledger from what is in a store: sizes from the file system, users from the records. Reads all of it, once."""

from contextlib import suppress
from pathlib import Path

from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.census import take_census
from stoker_worker.memory.disk_usage import agent_use, allocated_bytes, store_parts
from stoker_worker.memory.ledger import Ledger


def take_stock(store: StoreAccess, ledger: Ledger) -> None:
    """Enter everything in `store`; agents count as used in the order in which they were saved."""
    for path in store_parts(store.path):
        if path.parent.parent == store.agents and path.is_dir():
            ledger.set_agent(path, None, agent_use(path))
        elif path.suffix == ".safetensors" and path.is_file():
            ledger.set_block(path, allocated_bytes(path))
        else:
            ledger.set_other(path, allocated_bytes(path))
    for entry in sorted(take_census(store), key=lambda entry: _last_saved(entry.folder)):
        ledger.set_blocks_of(entry.folder, entry.blocks)
        ledger.touch(entry.folder, entry.agent_id)


def _last_saved(folder: Path) -> float:
    """Unix time at which the agent's newest version was saved."""
    for name in ("HEAD", "HEAD.unsaved"):
        with suppress(OSError):
            return (folder / name).stat().st_mtime
    return 0.0
