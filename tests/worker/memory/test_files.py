"""Pieces of memory are one file on disk."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_worker.memory.files import Disk, fill, in_parts

MB = 1 << 20


@pytest.mark.parametrize("sizes", [(), (0,), (1, 0, 2), (3,) * 1000, (MB, 1, 3 * MB + 5), (MB // 3,) * 7])
@pytest.mark.parametrize("most_bytes", [None, 100_003])
def test_pieces_become_one_file_and_the_file_fills_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], most_bytes: int | None
) -> None:
    writev, readv = os.writev, os.readv

    def shortened(call: Any) -> Any:
        def called(file: int, pieces: list[memoryview]) -> int:
            return int(call(file, [piece[:most_bytes] for piece in pieces[: 1 if most_bytes else None]]))

        return called

    monkeypatch.setattr(os, "writev", shortened(writev))
    monkeypatch.setattr(os, "readv", shortened(readv))
    pieces = [os.urandom(size) for size in sizes]
    Disk().write(tmp_path / "file", [piece if n % 2 else memoryview(piece) for n, piece in enumerate(pieces)])
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    targets = [bytearray(size) for size in sizes]
    with open(tmp_path / "file", "rb", buffering=0) as file:
        assert all(fill(file.fileno(), part) for part in in_parts(map(memoryview, targets)))
        assert not fill(file.fileno(), [memoryview(bytearray(1))])
    assert targets == pieces


@given(st.lists(st.integers(0, 3 * MB), max_size=20), st.integers(1, 600))
def test_no_part_is_too_large_for_one_system_call(sizes: list[int], n_small: int) -> None:
    whole = memoryview(bytes(3 * MB))
    pieces = [whole[:size] for size in [*sizes, *[1] * n_small]]
    parts = list(in_parts(pieces))
    assert sum(len(piece) for part in parts for piece in part) == sum(map(len, pieces))
    assert all(0 < len(part) <= 256 and 0 < sum(map(len, part)) <= MB for part in parts)
