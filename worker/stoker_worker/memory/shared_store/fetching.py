"""Reads versions of agents from a shared store, and trusts nothing there. Any thread; changes nothing."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Final

from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.shared_store.bucket import READ_LIMIT_S, Bucket, Stored
from stoker_worker.memory.shared_store.objects import SharedVersion, number_in, version_name, versions_folder

_AT_ONCE: Final = 8

ChecksumHere = Callable[[int], bytes | None]
"""Of this machine's row of a version; ``None``: there is none."""


class Fetching:
    """Each call raises `BucketAway`, and `Damaged` for what is not as it was written or is missing."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def stored(self, agent_id: str) -> dict[int, Stored]:
        """The agent's versions there by their numbers, ascending."""
        found = self._bucket.listed(versions_folder(agent_id))
        return {number: stored for stored in found if (number := number_in(stored.name))}

    def version(self, agent_id: str, number: int) -> SharedVersion | None:
        content = self._bucket.get(version_name(agent_id, number), READ_LIMIT_S)
        try:
            return None if content is None else SharedVersion.decode(agent_id, number, content)
        except Damaged as damage:
            raise Damaged(f"version {number} is unusable: {damage}") from None

    def chain(
        self, agent_id: str, newest: int, here: int, checksum_here: ChecksumHere
    ) -> tuple[list[SharedVersion], bool]:
        """The versions to bring in for `newest`, oldest first.

        Args:
            here: the newest version of this machine; none up to it is read, if they prove to be the same.

        Returns:
            also whether this machine's versions before them are the same as there.
        """
        found = self._all(agent_id, [newest])
        record = found[0].record
        if record is None:  # the agent was forgotten
            return found, False
        first = newest - record.about.since_full
        found = self._all(agent_id, range(max(first, here + 1), newest)) + found
        follows = self._follows(found[0], checksum_here)
        if not follows and found[0].version > first:
            found = self._all(agent_id, range(first, found[0].version)) + found
            follows = self._follows(found[0], checksum_here)
        for before, version in pairwise(found):
            if version.record is None or version.record.parent != before.head:
                raise Damaged(f"version {version.version} does not follow the one before it")
        return found, follows

    def _all(self, agent_id: str, numbers: Iterable[int]) -> list[SharedVersion]:
        wanted = list(numbers)
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="shared-store") as threads:
            found = list(threads.map(lambda number: self.version(agent_id, number), wanted))
        for number, version in zip(wanted, found, strict=True):
            if version is None:
                raise Damaged(f"version {number} is missing")
        return [version for version in found if version is not None]

    def _follows(self, version: SharedVersion, checksum_here: ChecksumHere) -> bool:
        """Whether the version before is the same here as there."""
        if version.record is None or (ours := checksum_here(version.version - 1)) is None:
            return False
        if not version.record.keeps_nothing:
            return version.record.parent == ours
        before = self.version(version.agent_id, version.version - 1)
        return before is not None and before.head == ours
