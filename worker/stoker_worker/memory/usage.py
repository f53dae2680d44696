"""How much room a worker's store takes, for metrics and health checks. Any thread; reads only."""

import os
import shutil

from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.replica.agent_store import ReplicatedStore
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import StoreUse


def store_use(agents: AgentCacheStore | ReplicatedStore) -> StoreUse:
    """
    Raises:
        OSError: the store cannot be read or written.
    """
    store, shared = (agents, None) if isinstance(agents, AgentCacheStore) else (agents.local, agents.glance())
    folder = store.parts.path
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} is not writable")
    disk = shutil.disk_usage(folder)
    try:
        disk_bytes = store.budget.total_bytes
    except Damaged as error:
        raise OSError(str(error)) from error
    return StoreUse(
        disk_bytes=disk_bytes,
        disk_max_bytes=store.budget.max_bytes,
        disk_free_bytes=disk.free,
        disk_size_bytes=disk.total,
        ram_bytes=store.ram_cache.n_bytes,
        ram_max_bytes=store.ram_cache.max_bytes,
        shared=shared,
    )
