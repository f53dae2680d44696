"""Limits the bytes of caches in a shared store, by age and use. A command of the shell, beside workers.

The lists that workers keep beside the caches show what is in use, and since when. Versions stay: they are the truth. A
worker computes a removed file again. Objects that are not named like cache files stay.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from stoker_shared.errors import StoreUnusable
from stoker_worker.memory.replica.bucket import CACHE_LIMIT_S, MARKER, Bucket, Stored, identity_of
from stoker_worker.memory.replica.caches import BLOCKS, CACHES, PIECES, files_in, is_cache_file

_YOUNG_S: Final = 86_400.0
"""A worker may not have listed a younger file."""
_AT_ONCE: Final = 100
_THREADS: Final = 16
_LIMIT_S: Final = 3600.0
"""A list of a million objects is a thousand requests."""


@dataclass(frozen=True)
class CollectedThere:
    """What was removed, or would be. `files`: how many, with `bytes` in all. `agents`: how many lose their caches.
    `left_bytes`: of the cache files that stay."""

    files: int
    bytes: int
    agents: int
    left_bytes: int


def collect_there(
    bucket: Bucket, *, max_bytes: int | None = None, unused_s: float | None = None, dry_run: bool = False
) -> CollectedThere:
    """Remove the cache files that no agent uses; then those of agents unused for `unused_s`, and of those unused the
    longest, until `max_bytes` are left. Raises `StoreUnusable`: it is no shared store; `BucketAway`: call it again."""
    if (marker := bucket.get(MARKER)) is None:
        raise StoreUnusable(f"{bucket.url} is no shared store: it has no {MARKER}")
    identity_of(bucket, marker)
    bucket.landmark = MARKER  # a share that is not mounted any more must not look empty
    now = bucket.time()
    found = (stored for folder in (BLOCKS, PIECES) for stored in bucket.listed(folder, _LIMIT_S))
    files = {stored.name: stored for stored in found if is_cache_file(stored.name)}
    used_by = _uses(bucket, bucket.listed(CACHES, _LIMIT_S), files)
    lists = sorted(used_by, key=lambda stored: stored.changed_at)
    users: dict[str, int] = {}
    for names in used_by.values():
        for name in names:
            users[name] = users.get(name, 0) + 1
    going = {name: x for name, x in files.items() if name not in users and x.changed_at < now - _YOUNG_S}
    left = sum(x.n_bytes for x in files.values()) - sum(x.n_bytes for x in going.values())
    agents: list[Stored] = []
    for stored in lists:
        is_old = unused_s is not None and stored.changed_at < now - unused_s
        if not is_old and (max_bytes is None or left <= max_bytes):
            break
        agents.append(stored)
        for name in used_by[stored]:
            users[name] -= 1
            if not users[name]:
                going[name] = files[name]
                left -= files[name].n_bytes
    if not dry_run:
        # Reading a hundred thousand lists takes minutes: what workers have begun to use meanwhile stays.
        changed = _uses(bucket, set(bucket.listed(CACHES, _LIMIT_S)).difference(used_by), files)
        for names in changed.values():
            left += sum(going.pop(name).n_bytes for name in names if name in going)
        written = {stored.name for stored in changed}
        agents = [stored for stored in agents if stored.name not in written]
        _remove(bucket, [stored.name for stored in agents])  # first the lists
        _remove(bucket, list(going))
    return CollectedThere(len(going), sum(x.n_bytes for x in going.values()), len(agents), left)


def _uses(bucket: Bucket, lists: Iterable[Stored], files: dict[str, Stored]) -> dict[Stored, tuple[str, ...]]:
    """By list, those of `files` that it names. Raises `BucketAway`."""

    def names_in(stored: Stored) -> tuple[str, ...]:
        names = dict.fromkeys(files_in(bucket.get(stored.name, CACHE_LIMIT_S) or b""))
        return tuple(files[name].name for name in names if name in files)  # not a copy of each name for each agent

    lists = list(lists)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="shared-store") as threads:
        return dict(zip(lists, threads.map(names_in, lists), strict=True))


def _remove(bucket: Bucket, names: list[str]) -> None:
    """Raises `BucketAway`."""
    parts = [names[start : start + _AT_ONCE] for start in range(0, len(names), _AT_ONCE)]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="shared-store") as threads:
        list(threads.map(bucket.remove, parts))
