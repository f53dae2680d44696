"""Checks of the agents' store: its folder, disk, format and lock. Changes nothing in it, also while a worker runs."""

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Final

from stoker_shared.durable_file import sync, write_new
from stoker_shared.errors import StoreUnusable
from stoker_worker.doctor.check import Check, Finding, fail, ok, warn
from stoker_worker.memory.database_file import check_database, has_database, refused_if_damaged
from stoker_worker.memory.locks import holder_of
from stoker_worker.memory.schema import FORMAT

_LITTLE_BYTES: Final = 10 * 2**30
_TOO_LITTLE_BYTES: Final = 2**28
_SYNCS: Final = 10
_SLOW_SYNC_MS: Final = 50.0


def checks(folder: Path) -> Iterator[Check]:
    yield Check("store folder", lambda: rights(folder))
    yield Check("store disk", lambda: disk(folder))
    yield Check("store fsync", lambda: sync_time(folder))
    yield Check("store format", lambda: store_format(folder))
    yield Check("store lock", lambda: lock(folder))


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def rights(folder: Path) -> Finding:
    there = existing(folder)
    if not there.is_dir():
        return fail(f"{there} is no folder", "give another one with --store")
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        return fail(f"{there} cannot be written by this user", "chown it, or give another one with --store")
    if there != folder.absolute():
        return ok(f"{folder} is not there yet; the worker will make it", exists=False)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o077:
        advice = f"chmod 700 {folder}: it has the agents' conversations"
        return warn(f"{folder} is open to other users ({mode:o})", advice, exists=True)
    return ok(f"{folder}, closed to other users", exists=True)


def disk(folder: Path) -> Finding:
    usage = shutil.disk_usage(existing(folder))
    line = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GB free"
    figures = {"free_bytes": usage.free, "total_bytes": usage.total}
    if usage.free < _TOO_LITTLE_BYTES:
        return fail(line, "make room: agents cannot be saved on a full disk", **figures)
    if usage.free < _LITTLE_BYTES:
        return warn(line, "make room: few caches fit, and evicted ones are computed again", **figures)
    return ok(line, **figures)


def sync_time(folder: Path) -> Finding:
    """Time to make 4 KB durable, as the end of each agent's turn does, beside the store."""
    times = []
    with scratch_folder(folder) as scratch:
        for number in range(_SYNCS):
            began = time.perf_counter()
            write_new(Path(scratch) / str(number), [bytes(4096)])
            sync(Path(scratch), to_platter=True)
            times.append((time.perf_counter() - began) * 1000)
    middle, most = median(times), max(times)
    line, figures = f"{middle:.1f} ms, at most {most:.1f} ms", {"fsync_ms": middle, "longest_fsync_ms": most}
    if middle > _SLOW_SYNC_MS:
        return warn(line, "put the store on a faster disk: each agent's turn waits for it", **figures)
    return ok(line, **figures)


def store_format(folder: Path) -> Finding:
    try:
        if not has_database(folder):
            return ok("no store there yet")
        with refused_if_damaged(folder):
            check_database(folder)
    except StoreUnusable as error:
        return fail(str(error), "look at `stoker-worker memory verify` before the worker is started")
    return ok(f"format {FORMAT}", format=FORMAT)


def lock(folder: Path) -> Finding:
    holder = holder_of(folder)
    if holder is None:
        return ok("no worker uses it", in_use=False)
    return warn(f"in use by {holder}", "stop that worker first: the figures are too low beside it", in_use=True)


def scratch_folder(folder: Path) -> "tempfile.TemporaryDirectory[str]":
    """A folder of our own on the store's disk, removed with the context."""
    return tempfile.TemporaryDirectory(prefix=".stoker-doctor-", dir=_beside(folder))


def _beside(folder: Path) -> Path | None:
    """A folder on the store's disk that may be written; else that of temporary files."""
    there = existing(folder)
    candidates = (there.parent, there) if there == folder.absolute() else (there,)
    device = there.stat().st_dev
    return next((path for path in candidates if path.stat().st_dev == device and os.access(path, os.W_OK)), None)
