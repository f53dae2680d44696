"""A disk of a few megabytes (tmpfs), for tests that fill it to the last byte. Linux, root; skipped elsewhere."""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class SmallDisk:
    path: Path

    @property
    def ballast(self) -> Path:
        return self.path / "ballast"

    def fill(self) -> None:
        """Write until not one byte more fits."""
        with self.ballast.open("ab", buffering=0) as file:
            for size in (1 << 16, 1 << 10, 1):
                while _has_written(file.fileno(), size):
                    pass

    def free(self) -> None:
        self.ballast.unlink()

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Inside, nothing can be written; no file may be open for writing."""
        self.remount("ro")
        try:
            yield
        finally:
            self.remount("rw")

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.path)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SmallDisk]:
    """4 MB, or the size in the test's parameter."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size = getattr(request, "param", 4 << 20)
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("there is no mount program")
    if mounted.returncode:
        pytest.skip("may not mount a file system")
    try:
        yield SmallDisk(folder)
    finally:  # lazily: a failed test may still have a file open
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _has_written(descriptor: int, size: int) -> bool:
    try:
        return os.write(descriptor, bytes(size)) > 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
