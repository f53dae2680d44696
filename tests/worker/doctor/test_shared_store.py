"""The doctor's check of a shared store."""

from pathlib import Path

import pytest

from stoker_worker.doctor import shared_store
from stoker_worker.doctor.check import Status

pytest.importorskip("obstore")


def test_a_folder_that_works_one_that_is_not_there_and_one_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    found = {
        url: next(shared_store.checks(url)).made()
        for url in (f"file://{tmp_path}/there", f"file://{tmp_path}/away", "ftp://somewhere")
    }
    assert [finding.status for finding in found.values()] == [Status.OK, Status.FAIL, Status.FAIL]
    assert "does not overwrite" in found[f"file://{tmp_path}/there"].line
    assert "is the share mounted?" in found[f"file://{tmp_path}/away"].line
    assert not [path for path in (tmp_path / "there").rglob("*") if path.is_file()]
    assert not list(shared_store.checks(None))


def test_without_the_extra_the_advice_is_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_store, "find_spec", lambda name: None)
    found = next(shared_store.checks("file:///mnt/shared")).made()
    assert (found.status, found.advice) == (Status.FAIL, "pip install 'stoker[shared]'")
