"""Files appear whole or not at all, and nothing of a failed attempt stays behind."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_shared.durable_file import draft_of, fill, in_parts, replace_file, write_new


def test_a_file_is_replaced_as_a_whole_and_is_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"first", b"second"):
        replace_file(path, content)
        assert path.read_bytes() == content
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_never_replaces_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_new(path, [b"a", memoryview(b"b")])
    with pytest.raises(FileExistsError):
        write_new(path, [b"c"])
    assert path.read_bytes() == b"ab"


@pytest.mark.parametrize("kind", ["file", "folder", "nothing"])
def test_an_attempt_that_fails_leaves_the_old_file_and_no_draft(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail() -> None:
        with draft_of(path) as draft:
            if kind == "file":
                draft.write_bytes(b"new")
            if kind == "folder":
                draft.mkdir()
                (draft / "inside").write_bytes(b"new")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"old"


def test_a_folder_appears_with_all_its_files(tmp_path: Path) -> None:
    with draft_of(tmp_path / "folder") as draft:
        draft.mkdir()
        (draft / "inside").write_bytes(b"new")
        assert not (tmp_path / "folder").exists()
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == [
        "folder",
        "folder/inside",
    ]


def test_an_error_names_the_file_and_not_its_draft(tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "file", tmp_path / "folder"):
        (tmp_path / "folder" / "inside").mkdir(parents=True, exist_ok=True)
        with pytest.raises(OSError) as caught:
            replace_file(path, b"new")
        assert str(path) in str(caught.value)
        assert "draft" not in str(caught.value)


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
    write_new(tmp_path / "file", [piece if n % 2 else memoryview(piece) for n, piece in enumerate(pieces)])
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
