"""Files appear whole or not at all, and nothing of a failed attempt stays behind."""

import stat
from pathlib import Path

import pytest

from stoker_shared.durable_file import draft_of, replace_file, write_new


def test_a_file_is_replaced_as_a_whole_and_is_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"first", b"second"):
        replace_file(path, content)
        assert path.read_bytes() == content
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_never_replaces_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_new(path, b"ab")
    with pytest.raises(FileExistsError):
        write_new(path, b"c")
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
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "folder", tmp_path / "folder" / "inside"]


def test_an_error_names_the_file_and_not_its_draft(tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "file", tmp_path / "folder"):
        (tmp_path / "folder" / "inside").mkdir(parents=True, exist_ok=True)
        with pytest.raises(OSError) as caught:
            replace_file(path, b"new")
        assert str(path) in str(caught.value)
        assert "draft" not in str(caught.value)
