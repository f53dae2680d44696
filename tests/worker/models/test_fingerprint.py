"""A model's identity changes with its parts, and digests are remembered only while a file stays the same."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker_worker.models import fingerprint
from stoker_worker.models.fingerprint import ModelFolder

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
PARTS: dict[str, Any] = {"tokenizer_fingerprint": "t", "cache_spec": "c", "dtype": "float32"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / FIRST).write_bytes(b"one")
    (model / SECOND).write_bytes(b"two")
    (model / "config.json").write_text('{"b": 1, "a": 2}')
    (model / "tokenizer.json").write_text("{}")
    return model


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were really read."""
    names: list[str] = []
    real = fingerprint._xxh3_128

    def counted(file: Path) -> str:
        names.append(file.name)
        return real(file)

    monkeypatch.setattr(fingerprint, "_xxh3_128", counted)
    return names


@pytest.mark.parametrize(
    "written",
    [{SECOND: "twO"}, {FIRST: "two", SECOND: "one"}, {"config.json": '{"a": 2, "b": 2}'}],
    ids=["a weight", "weights swapped", "the config"],
)
def test_another_file_content_is_another_model(folder: Path, written: dict[str, str]) -> None:
    before = ModelFolder(folder).model_fingerprint(**PARTS)
    for name, text in written.items():
        (folder / name).write_text(text)
    assert ModelFolder(folder).model_fingerprint(**PARTS) != before


@pytest.mark.parametrize("part", sorted(PARTS))
def test_each_other_part_is_in_the_fingerprint(folder: Path, part: str) -> None:
    model = ModelFolder(folder)
    assert model.model_fingerprint(**{**PARTS, part: "x"}) != model.model_fingerprint(**PARTS)


def test_the_same_model_elsewhere_or_formatted_differently_is_the_same(folder: Path, tmp_path: Path) -> None:
    before = ModelFolder(folder).model_fingerprint(**PARTS)
    (folder / "config.json").write_text('{\n  "a": 2,\n  "b": 1\n}\n')
    (folder / "README.md").write_text("hello")
    folder.rename(tmp_path / "moved")
    assert ModelFolder(tmp_path / "moved").model_fingerprint(**PARTS) == before


def test_tokenizer_files_and_the_template_are_in_the_tokenizer_fingerprint(folder: Path) -> None:
    digests = {ModelFolder(folder).tokenizer_fingerprint("a"), ModelFolder(folder).tokenizer_fingerprint("b")}
    (folder / "tokenizer.json").write_text("{ }")
    digests.add(ModelFolder(folder).tokenizer_fingerprint("a"))
    (folder / "merges.txt").write_text("")
    digests.add(ModelFolder(folder).tokenizer_fingerprint("a"))
    assert len(digests) == 4


def test_unchanged_weights_are_read_once(folder: Path, tmp_path: Path, hashed: list[str]) -> None:
    memo = tmp_path / "state" / "digests.json"
    first = ModelFolder(folder, memo).model_fingerprint(**PARTS)
    assert ModelFolder(folder, memo).model_fingerprint(**PARTS) == first
    assert len(hashed) == 2
    assert ModelFolder(folder).model_fingerprint(**PARTS) == first


def same_size_and_time(weights: Path) -> None:
    stat = weights.stat()
    draft = weights.with_name("draft")  # another inode
    draft.write_bytes(b"ONE")
    os.utime(draft, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    draft.replace(weights)


def other_time(weights: Path) -> None:
    weights.write_bytes(b"ONE")
    os.utime(weights, ns=(1, 1))


@pytest.mark.parametrize("change", [same_size_and_time, other_time])
def test_a_changed_weight_file_is_read_again(
    folder: Path, tmp_path: Path, hashed: list[str], change: Callable[[Path], None]
) -> None:
    memo = tmp_path / "digests.json"
    before = ModelFolder(folder, memo).model_fingerprint(**PARTS)
    hashed.clear()
    change(folder / FIRST)
    assert ModelFolder(folder, memo).model_fingerprint(**PARTS) != before
    assert hashed == [FIRST]


@pytest.mark.parametrize("content", [b"", b"[]", b"nonsense", b'{"x": 3}', b"\xff"])
def test_a_damaged_memo_costs_a_read_and_nothing_else(
    folder: Path, tmp_path: Path, hashed: list[str], content: bytes
) -> None:
    expected = ModelFolder(folder).model_fingerprint(**PARTS)
    memo = tmp_path / "digests.json"
    memo.write_bytes(content)
    assert ModelFolder(folder, memo).model_fingerprint(**PARTS) == expected
    hashed.clear()
    assert ModelFolder(folder, memo).model_fingerprint(**PARTS) == expected
    assert hashed == []


def test_entries_of_other_models_stay_and_a_memo_that_cannot_be_written_is_no_error(
    folder: Path, tmp_path: Path
) -> None:
    memo = tmp_path / "digests.json"
    memo.write_text('{"/elsewhere": {"identity": [1, 2, 3], "xxh3_128": "0"}}')
    ModelFolder(folder, memo).model_fingerprint(**PARTS)
    content: dict[str, Any] = json.loads(memo.read_text())
    assert len(content) == 3
    blocked = tmp_path / "file" / "digests.json"
    blocked.parent.write_text("")
    ModelFolder(folder, blocked).model_fingerprint(**PARTS)


def test_two_links_to_one_weight_file_have_one_digest_each(folder: Path, hashed: list[str], tmp_path: Path) -> None:
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to(folder / FIRST)
    ModelFolder(folder, tmp_path / "digests.json").model_fingerprint(**PARTS)
    assert set(hashed) == {FIRST}
